// Attention of rows of one query over the paged KV, for Hopper (sm_90a): out [T, Hq, D] = softmax(q k^T * scale) v. bfloat16
// or float16, sums and statistics in float32. FRESH: q, k and v are as the products left them; norms and rotation come along,
// and the token's key and value are stored in the cache.
//
// A program has a part of the keys of all rows (`decode_plan.cuh`). Two warps bring them (`decode_bring.cuh`), WARPS attend to
// boxes of 16 keys in turn, all G heads that share them at a time: scores [16 keys, 8 heads] are products of keys and queries,
// sums [D, 8 heads] those of values and weights. A stage of the ring is always the same warp's: copies come in any order, and
// one that is ahead of the others would take the stage's box before for its own. One more warp puts their sums together at a
// row's end (`decode_join.cuh`), while they go on.
//
// The cache is [blocks, 2, HK, TPB, D]. What lies beyond a row's length may be no number: such scores are masked, such values
// cleared before they are multiplied by weights of zero.
//
// Comes after `chip.cuh`, `ampere.cuh`, `hopper.cuh`, `decode.cuh`, `decode_plan.cuh`, `decode_bring.cuh` and
// `decode_join.cuh`.

// Largest scores and sums of weights of heads lane % 4 * 2 and the next; of weights this thread's part.
struct Statistics {
    float largest[2], total[2];
};

// A warp that attends, as each of its threads has it: queries, sums, and where it is.
struct Warp {
    const Places& at;
    const float scale;
    const int warp, lane;
    int stage, phase, next;
    u32 query[STEPS][2];
    float sum[STEPS][4];
    Statistics statistics;

    __device__ __forceinline__ void take_head(u32 (&words)[STEPS][2], const u8* head) const {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            words[step][0] = *(const u32*)(head + step * 32 + lane % 4 * 4);
            words[step][1] = *(const u32*)(head + step * 32 + 16 + lane % 4 * 4);
        }
    }

    // A box of which `there` keys are the row's, at least one; MASK: not all are.
    template <bool MASK>
    __device__ __forceinline__ void attend(u32 box, int there) {
        float score[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
        const u32 row = (lane % 8 + (lane >> 3 & 1) * 8) * 128;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            u32 key[4];
            load_matrices(key, box + step / 4 * PIECE_BYTES + row + ((step % 4 * 2 + (lane >> 4)) ^ lane % 8) * 16);
            float(&part)[4] = step % 2 ? odd : score;
            multiply(part, key[0], key[1], key[2], key[3], query[step][0], query[step][1], part);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            score[i] += odd[i];
            if (MASK && lane / 4 + i / 2 * 8 >= there) score[i] = NOTHING;
        }
        float shrink[2];
#pragma unroll
        for (int head = 0; head < 2; ++head) {
            float highest = fmaxf(score[head], score[head + 2]);
#pragma unroll
            for (int step = 4; step < 32; step *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
            highest = fmaxf(highest, statistics.largest[head]);
            const float base = highest * scale;
            shrink[head] = power_of_2(statistics.largest[head] * scale - base);
            statistics.largest[head] = highest;
            score[head] = power_of_2(score[head] * scale - base);
            score[head + 2] = power_of_2(score[head + 2] * scale - base);
            statistics.total[head] = statistics.total[head] * shrink[head] + (score[head] + score[head + 2]);
        }
        const u32 low = transposed(two_numbers(score[0], score[1]));
        const u32 high = transposed(two_numbers(score[2], score[3]));
        u32 seen_low = ~0u, seen_high = ~0u;
        if (MASK) {
            const int key = lane % 4 * 2;
            seen_low = (key < there ? 0xFFFFu : 0u) | (key + 1 < there ? 0xFFFF0000u : 0u);
            seen_high = (key + 8 < there ? 0xFFFFu : 0u) | (key + 9 < there ? 0xFFFF0000u : 0u);
        }
        const u32 values = box + PART_BYTES + (lane % 8 + (lane >> 4) * 8) * 128;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            u32 value[4];
            load_transposed(value, values + step / 4 * PIECE_BYTES + ((step % 4 * 2 + (lane >> 3 & 1)) ^ lane % 8) * 16);
            if (MASK) value[0] &= seen_low, value[1] &= seen_low, value[2] &= seen_high, value[3] &= seen_high;
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[step][i] *= shrink[i % 2];
            multiply(sum[step], value[0], value[1], value[2], value[3], low, high, sum[step]);
        }
    }

    // The warp's of `count` boxes, of keys from `first` on, of `written` that are in the cache. They end before box `end`.
    __device__ __forceinline__ void attend_to_all(int first, int count, int end, int written) {
        for (; next < end; next += WARPS) {
            const int there = written - (first + next - (end - count)) * KEYS;
            const u32 box = at.boxes + stage * BOX_BYTES;
            barrier_wait(at.full + stage * 8, phase);
            if (there >= KEYS) {
                attend<false>(box, there);
            } else if (there > 0) {
                attend<true>(box, there);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(at.empty + stage * 8);
            stage += WARPS;
            if (stage >= STAGES) stage -= STAGES, phase ^= 1;
        }
    }

    // The token's own key and value.
    __device__ __forceinline__ void attend_to_newest(const u8* slot) {
        u32 key[STEPS][2];
        const u8* const value = slot + 64 + (G + 1) * HEAD_BYTES;
        take_head(key, slot + 64 + G * HEAD_BYTES);
        float score = 0;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 a = query[step][half], b = key[step][half];
                score += number(a & 0xFFFF) * number(b & 0xFFFF) + number(a >> 16) * number(b >> 16);
            }
        }
        score += __shfl_xor_sync(~0u, score, 1);
        score += __shfl_xor_sync(~0u, score, 2);
        float shrink[2], weight[2];
#pragma unroll
        for (int head = 0; head < 2; ++head) {
            const float mine = __shfl_sync(~0u, score, (lane % 4 * 2 + head) * 4);
            const float highest = fmaxf(statistics.largest[head], mine), base = highest * scale;
            shrink[head] = power_of_2(statistics.largest[head] * scale - base);
            weight[head] = power_of_2(mine * scale - base);
            statistics.largest[head] = highest;
            statistics.total[head] = statistics.total[head] * shrink[head] + (lane < 4 ? weight[head] : 0);
        }
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float v = number(*(const u16*)(value + (step * 16 + lane / 4 + i / 2 * 8) * 2));
                sum[step][i] = sum[step][i] * shrink[i % 2] + v * weight[i % 2];
            }
        }
    }

    __device__ __forceinline__ void leave_sums() {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int step = 4; step < 32; step *= 2) {
                statistics.total[i] += __shfl_xor_sync(~0u, statistics.total[i], step);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int head = lane % 4 * 2 + i;
            if (head < G) {
                float* const mine = at.sums + (warp * G + head) * SUM_HEAD + lane / 4;
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    mine[step * 16] = sum[step][i], mine[step * 16 + 8] = sum[step][i + 2];
                }
            }
            if (lane < 4) {
                at.statistics[warp * 16 + head] = statistics.largest[i];
                at.statistics[warp * 16 + 8 + head] = statistics.total[i];
            }
        }
    }

    __device__ __forceinline__ void attend_to_rows() {
        Ring<SLOTS> ring;
        u32 taken = 1;
        stage = next = warp, phase = 0;
        for (int end = 0;;) {
            const u8* const slot = at.slot_memory + ring.slot * SLOT_BYTES;
            barrier_wait(at.slot_full + ring.slot * 8, ring.phase);
            const Work work = *(const Work*)slot;
            if (!work.count) return;
            end += work.count;
            // Heads beyond the last one repeat it, and are not written.
            take_head(query, slot + 64 + min(lane / 4, G - 1) * HEAD_BYTES);
#pragma unroll
            for (int step = 0; step < STEPS; ++step) sum[step][0] = sum[step][1] = sum[step][2] = sum[step][3] = 0;
            statistics = {{NOTHING, NOTHING}, {0, 0}};
            attend_to_all(work.first, work.count, end, work.keys);
            // The warp whose box would come next.
            if (FRESH && work.newest && next == end) attend_to_newest(slot);
            __syncwarp();
            if (lane == 0) barrier_arrive(at.slot_empty + ring.slot * 8);
            ring.advance();
            barrier_wait(at.sums_empty, taken);
            taken ^= 1;
            leave_sums();
            __syncwarp();
            if (lane == 0) barrier_arrive(at.sums_full);
        }
    }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32 + 96, 2)
    decode(const __grid_constant__ TensorMap cache, const __grid_constant__ Given given) {
    const Places at = places();
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == WARPS * 32) {
        prefetch(cache);
        set_up_barriers(at);
    }
    __syncthreads();
    let_next_kernel_start();
    const Rows rows = {given.query_start, given.seq_lens, given.rows, given.tokens, given.longest};
    Plan plan = {rows, given.least, lane};
    if (warp == WARPS) {
        bring_boxes(at, cache, given, plan);
    } else if (warp == WARPS + 1) {
        Heads heads = {at, given, lane};
        heads.bring_all(plan);
    } else if (warp == WARPS + 2) {
        wait_for_previous_kernel();
        Joiner joiner = {at, given, lane};
        joiner.join_all();
    } else {
        Warp mine = {at, given.scale, warp, lane};
        mine.attend_to_rows();
    }
}
