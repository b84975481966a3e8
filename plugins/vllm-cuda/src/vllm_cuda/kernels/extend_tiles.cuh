// Tiles of attention of prompts (`extend.cu`): their shape, where a program has them, and which of them it takes. Every
// program takes one tile of each round of them; those with the most keys come first.
//
// Comes after `hopper.cuh` and `extend.cuh`. Defined at compilation: D (64 or 128), G, HK, TPB, GROUPS, KEYS, STAGES, TURNS
// (groups ask in turn), SPLIT, SINGLES (rows of one query are taken, too), WINDOW and SINKS (there are such), CONSUMER and
// PRODUCER (registers of a thread), `score_first` and `score`, one wgmma of 64 x KEYS x 16 each, `score_first_half` and
// `score_half`, of half as many keys, and `weigh`, one of 64 x D x 16.

constexpr int PIECES = D / 64;                        // of 128 bytes, the span of the swizzle, in a head
constexpr int QUERIES = 64 / G, LINES = QUERIES * G;  // of a group; lines beyond are of nobody
constexpr int BANDS = SPLIT ? 1 : GROUPS;             // of 64 lines in a tile
constexpr int TILE = BANDS * QUERIES;                 // queries of a tile
constexpr int BOX = TPB < KEYS ? TPB : KEYS, BOXES = KEYS / BOX;
constexpr int Q_BYTES = 64 * D * 2, KV_BYTES = KEYS * D * 2;
constexpr int WORKERS = GROUPS * 128;
constexpr int SCORES = KEYS / 2, VALUES = D / 2, WEIGHTS = KEYS / 4;  // registers of a thread
constexpr int SLOTS = 2;                              // of tiles to come, and of their queries
constexpr int READERS = SPLIT ? 4 : GROUPS * 4;       // warps that read a stage
constexpr int SUM_BYTES = SPLIT ? (VALUES + 4) * 128 * 4 : 0;
constexpr int SUMMED = 1 + GROUPS, TAKEN = 2 + GROUPS;  // barriers, after those of turns
static_assert(!SPLIT || (GROUPS == 2 && STAGES == 2), "a group has a stage");
static_assert(D % 64 == 0 && KEYS % 32 == 0 && KEYS % BOX == 0 && BOXES <= 32 && G <= 64, "boxes are whole");

// Where things lie in shared memory.
struct Places {
    u32 q, k, v;
    u32 q_full, q_empty, k_full, k_empty, v_full, v_empty, v_landed, work_full, work_empty;
    u8 *values, *work;
    float* sums;
};

__device__ __forceinline__ Places places() {
    constexpr int K = SLOTS * BANDS * Q_BYTES, V = K + STAGES * KV_BYTES, SUMS = V + STAGES * KV_BYTES;
    constexpr int BARRIERS = SUMS + SUM_BYTES;
    constexpr int WORK = BARRIERS + (2 * SLOTS * BANDS + 4 * STAGES + 1 + 2 * SLOTS) * 8;
    const u32 base = shared_address(), q = base + BARRIERS, k = q + 2 * SLOTS * BANDS * 8, v = k + 2 * STAGES * 8;
    const u32 landed = v + 2 * STAGES * 8, work = landed + 8;
    return {base, base + K, base + V, q, q + SLOTS * BANDS * 8, k, k + STAGES * 8, v, v + STAGES * 8, landed, work,
            work + SLOTS * 8, shared_memory() + V, shared_memory() + WORK, (float*)(shared_memory() + SUMS)};
}

// A tile: its first query's token and position, how many queries of the row are left from there on, the keys that its newest
// query sees, those of the row, the row, the KV head, and the first key of the first tile that its oldest query sees something
// of. No keys: there is no more.
struct Work {
    int token, oldest, left, keys, length, row, head, first;
};

// Where a ring is at; what is waited for has the parity `phase`.
template <int COUNT>
struct Ring {
    int slot = 0;
    u32 phase = 0;
    __device__ __forceinline__ void advance() {
        if (++slot == COUNT) slot = 0, phase ^= 1;
    }
};

// The same of keys or values, as those who bring them see it: where SPLIT, the first tile of keys is the first group's.
struct Stages {
    int slot = 0;
    u32 phases = 0;
    __device__ __forceinline__ u32 phase() const { return phases >> slot & 1; }
    __device__ __forceinline__ void begin() {
        if (SPLIT) slot = 0;
    }
    __device__ __forceinline__ void advance() {
        phases ^= 1u << slot;
        if (++slot == STAGES) slot = 0;
    }
};

// ---- Finding tiles

struct Rows {
    const int *query_start, *seq_lens;
    int count, levels;  // levels: tiles of KEYS keys of the longest row
    int window;
};

// The first key that a query at this position sees.
__device__ __forceinline__ int first_seen(int position, int window) { return WINDOW ? max(0, position + 1 - window) : 0; }

struct Row {
    int begin, queries, length, tiles;
};

__device__ __forceinline__ Row row_of(const Rows& rows, int index) {
    if (index >= rows.count) return {0, 0, 0, 0};
    const int begin = rows.query_start[index], queries = rows.query_start[index + 1] - begin;
    return {begin, queries, rows.seq_lens[index], queries > 1 || SINGLES ? (queries + TILE - 1) / TILE : 0};
}

// Tiles of a row whose newest query sees more than so many keys.
__device__ __forceinline__ int beyond(const Row& row, int keys) {
    return row.length <= keys ? 0 : row.tiles - max(0, keys - (row.length - row.queries)) / TILE;
}

__device__ __forceinline__ int all_beyond(const Rows& rows, int keys, int lane) {
    int sum = 0;
    for (int index = lane; index < rows.count; index += 32) sum += beyond(row_of(rows, index), keys);
    return __reduce_add_sync(~0u, sum);
}

// The tile of a rank, by a warp; one lane leaves it in `slot`. Ranks are by numbers of keys, in steps of KEYS, most first,
// then by row.
__device__ __forceinline__ void find(Work* slot, const Rows& rows, int rank, int head, int lane) {
    int low = 0, high = rows.levels;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (all_beyond(rows, middle * KEYS, lane) > rank) {
            low = middle;
        } else {
            high = middle;
        }
    }
    int left = rank - all_beyond(rows, high * KEYS, lane);
    for (int first = 0;; first += 32) {
        const Row row = row_of(rows, first + lane);
        const int these = beyond(row, low * KEYS), level = these - beyond(row, high * KEYS);
        int sum = level;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += other;
        }
        const u32 found = __ballot_sync(~0u, sum > left);
        if (found) {
            if (lane == __ffs(found) - 1) {
                const int query = (row.tiles - these + left - (sum - level)) * TILE, oldest = row.length - row.queries + query;
                const int keys = min(oldest + TILE, row.length);
                const int from = first_seen(oldest, rows.window) / KEYS * KEYS;
                *slot = {row.begin + query, oldest, row.queries - query, keys, row.length, first + lane, head, from};
            }
            return;
        }
        left -= __shfl_sync(~0u, sum, 31);
    }
}

// Every program takes one of each round of tiles, in one round from the first on, in the next from the last.
__device__ __forceinline__ void find_all(const Places& at, const Rows& rows, int lane) {
    const int total = all_beyond(rows, 0, lane), programs = gridDim.x, program = blockIdx.x;
    Ring<SLOTS> ring;
    for (int round = 0;; ++round) {
        const int index = round * programs + (round & 1 ? programs - 1 - program : program), rank = index / HK;
        Work* const slot = (Work*)at.work + ring.slot;
        barrier_wait(at.work_empty + ring.slot * 8, ring.phase ^ 1);
        if (rank < total) {
            find(slot, rows, rank, index % HK, lane);
        } else if (lane == 0) {
            slot->keys = 0;
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(at.work_full + ring.slot * 8);
        if (rank >= total) return;
        ring.advance();
    }
}

// What is the same in all lanes, and is known to be: addresses made of it take no vector registers, nor time between products.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// A warp's copy of the next tile.
__device__ __forceinline__ Work next_work(const Places& at, Ring<SLOTS>& ring, int lane) {
    barrier_wait(at.work_full + ring.slot * 8, ring.phase);
    const Work found = ((const Work*)at.work)[ring.slot];
    const Work work = {uniform(found.token), uniform(found.oldest), uniform(found.left), uniform(found.keys),
                       uniform(found.length), uniform(found.row), uniform(found.head), WINDOW ? uniform(found.first) : 0};
    if (lane == 0) barrier_arrive(at.work_empty + ring.slot * 8);
    ring.advance();
    return work;
}
