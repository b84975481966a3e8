// What attention of prompts (`extend.cu`) reads: queries and keys by one warp, values by another, box by box.
//
// Comes after `extend_tiles.cuh`.

struct Cache {
    const TensorMap& map;
    const int* table;
    int table_stride, blocks;
};

// The block of a lane's box of the keys from `start` on; one that is not there, where they are beyond those that are seen.
__device__ __forceinline__ int block_of(const Cache& cache, const Work& work, int start, int lane) {
    const int key = start + lane * BOX;
    return lane < BOXES && key < work.keys ? cache.table[(u64)work.row * cache.table_stride + key / TPB] : cache.blocks;
}

// Lane by lane, a box each; `part` is 0 for keys, 1 for values.
__device__ __forceinline__ void bring_keys(
    const Cache& cache, u32 target, u32 barrier, int part, const Work& work, int start, int block, int lane) {
    if (lane == 0) barrier_expect(barrier, KV_BYTES);
    __syncwarp();
    if (lane < BOXES) {
        const int y = (part * HK + work.head) * TPB + (start + lane * BOX) % TPB;
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            bring_box(target + piece * KEYS * 128 + lane * BOX * 128, cache.map, piece * 64, y, block, barrier);
        }
    }
}

__device__ __forceinline__ void produce_keys(const Places& at, const TensorMap& q, const Cache& cache, int lane) {
    Ring<SLOTS> works, queries;
    Stages ring;
    for (;;) {
        const Work work = next_work(at, works, lane);
        if (!work.keys) return;
        int block = block_of(cache, work, work.first, lane);
        for (int band = 0; band < BANDS; ++band) {
            const int place = queries.slot * BANDS + band;
            barrier_wait(at.q_empty + place * 8, queries.phase ^ 1);
            if (lane == 0) {
                barrier_expect(at.q_full + place * 8, LINES * D * 2);
                for (int piece = 0; piece < PIECES; ++piece) {
                    const u32 target = at.q + place * Q_BYTES + piece * 64 * 128;
                    bring_box(target, q, piece * 64, work.head * G, work.token + band * QUERIES, at.q_full + place * 8);
                }
            }
        }
        queries.advance();
        ring.begin();
        for (int start = work.first; start < work.keys; start += KEYS) {
            barrier_wait(at.k_empty + ring.slot * 8, ring.phase() ^ 1);
            bring_keys(cache, at.k + ring.slot * KV_BYTES, at.k_full + ring.slot * 8, 0, work, start, block, lane);
            block = block_of(cache, work, start + KEYS, lane);
            ring.advance();
        }
    }
}

// Values of those `from` to `to` in a stage become zeros.
__device__ __forceinline__ void clear_values(u8* stage, int from, int to, int lane) {
    for (int place = from * 128 + lane * 16; place < to * 128; place += 512) {
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) *(uint4*)(stage + piece * KEYS * 128 + place) = make_uint4(0, 0, 0, 0);
    }
}

__device__ __forceinline__ void produce_values(const Places& at, const Cache& cache, int window, int lane) {
    Ring<SLOTS> works;
    Stages ring;
    for (u32 landed = 0;;) {
        const Work work = next_work(at, works, lane);
        if (!work.keys) return;
        int block = block_of(cache, work, work.first, lane);
        ring.begin();
        for (int start = work.first; start < work.keys; start += KEYS) {
            const u32 target = at.v + ring.slot * KV_BYTES, full = at.v_full + ring.slot * 8;
            const int there = work.length - start, brought = min(KEYS, (work.keys - start + BOX - 1) / BOX * BOX);
            const int gone = first_seen(work.oldest, window) - start;
            barrier_wait(at.v_empty + ring.slot * 8, ring.phase() ^ 1);
            if (there >= brought && gone <= 0) {
                bring_keys(cache, target, full, 1, work, start, block, lane);
            } else {
                bring_keys(cache, target, at.v_landed, 1, work, start, block, lane);
                barrier_wait(at.v_landed, landed);
                landed ^= 1;
                u8* const stage = at.values + ring.slot * KV_BYTES;
                clear_values(stage, there, brought, lane);
                if (WINDOW) clear_values(stage, 0, min(gone, brought), lane);
                show_to_copies();
                __syncwarp();
                if (lane == 0) barrier_arrive(full);
            }
            block = block_of(cache, work, start + KEYS, lane);
            ring.advance();
        }
    }
}
