// What attention of single queries (`decode.cu`) reads, and where a program has it: keys and values by one warp, box by box;
// by another what belongs to a row: its queries, which it norms and rotates, and the token's own key and value, which it
// stores.
//
// Lengths, block tables and the cache are what kernels before this one wrote: before those have ended a program finds what its
// part would be, and looks again afterwards.
//
// Comes after `decode.cuh` and `decode_plan.cuh`. Defined at compilation: D (64 or 128), G, TPB, STAGES, WARPS (that attend),
// FRESH (the token's key and value are not in the cache yet), NORM, ROPE, INTERLEAVED, HALF_ROPE (pairs that rotate).

constexpr int PIECES = D / 64;                      // of 128 bytes, the span of the swizzle, in a head
constexpr int PIECE_BYTES = KEYS * 128, PART_BYTES = PIECES * PIECE_BYTES, BOX_BYTES = 2 * PART_BYTES;
constexpr int SLOTS = 2;                            // of rows and heads to come
constexpr int HEAD_BYTES = D * 2 + 16;              // eight heads lie in different banks
constexpr int TABLE_BYTES = ROPE ? HALF_ROPE * 8 : 0;
constexpr int SLOT_BYTES = 64 + (G + (FRESH ? 2 : 0)) * HEAD_BYTES + TABLE_BYTES;
constexpr int SUM_HEAD = D + 4;                     // of a warp's sums: two heads lie in different banks
constexpr int PART = G * D + 16;                    // numbers of a piece: sums, largest scores and totals
constexpr int STEPS = D / 16;                       // of a product, and tiles of sums
static_assert(STAGES % WARPS == 0 && STAGES > 0 && G <= 8 && D % 64 == 0 && TPB % KEYS == 0, "");
static_assert(SLOT_BYTES % 16 == 0 && !(ROPE && !FRESH), "");

// What a launch is given. q, k, v and out [tokens, heads, D], slots [tokens], positions [tokens], cos_sin [positions, 2,
// HALF_ROPE], block_table [rows, ...]; for pieces of rows and heads partial [programs, 2, PART] and counts [rows * HK], which
// are zero before and after. Strides are in elements.
struct Given {
    u16* out;
    const u16 *q, *k, *v;
    const float *q_weight, *k_weight, *cos_sin;
    const int* positions;
    const long long* slots;
    u16* blocks;
    const int *block_table, *query_start, *seq_lens;
    float* partial;
    int* counts;
    long long block_stride;
    int q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head;
    int table_stride, rows, tokens, longest, least;
    float scale, eps;  // of scores in units of log2
};

// Where things lie in shared memory.
struct Places {
    u32 boxes, slots, full, empty, slot_full, slot_empty, landed, sums_full, sums_empty;
    u8* slot_memory;
    float *sums, *statistics;
};

__device__ __forceinline__ Places places() {
    constexpr int SUMS = STAGES * BOX_BYTES, STATISTICS = SUMS + WARPS * G * SUM_HEAD * 4, SLOT = STATISTICS + WARPS * 64;
    constexpr int BARRIERS = SLOT + SLOTS * SLOT_BYTES;
    const u32 base = shared_address(), full = base + BARRIERS, slot_full = full + 2 * STAGES * 8;
    const u32 landed = slot_full + 2 * SLOTS * 8;
    u8* const memory = shared_memory();
    return {base,        base + SLOT,   full, full + STAGES * 8, slot_full, slot_full + SLOTS * 8, landed, landed + 8,
            landed + 16, memory + SLOT, (float*)(memory + SUMS), (float*)(memory + STATISTICS)};
}

__device__ __forceinline__ void set_up_barriers(const Places& at) {
    for (int i = 0; i < STAGES; ++i) barrier_init(at.full + i * 8, 1), barrier_init(at.empty + i * 8, 1);
    // Those who attend, and those who put sums together.
    for (int i = 0; i < SLOTS; ++i) barrier_init(at.slot_full + i * 8, 1), barrier_init(at.slot_empty + i * 8, WARPS + 1);
    barrier_init(at.landed, 1), barrier_init(at.sums_full, WARPS), barrier_init(at.sums_empty, 1);
    show_barriers();
}

// A segment as others than those who bring see it.
struct Work {
    int token, head, keys, first, count, unit, piece, pieces, newest;  // keys: of the row, in the cache
};
static_assert(sizeof(Work) <= 64, "");

// Where a ring is at; what is waited for has the parity `phase`.
template <int COUNT>
struct Ring {
    int slot = 0;
    u32 phase = 0;
    __device__ __forceinline__ void advance(int step = 1) {
        slot += step;
        if (slot >= COUNT) slot -= COUNT, phase ^= 1;
    }
};

// ---- Keys and values

// The block of a lane's box from `from` on.
__device__ __forceinline__ int block_of(const Given& given, const Segment& segment, int from, int lane) {
    const int box = min(from + lane, segment.count - 1), key = (segment.first + box) * KEYS;
    return segment.count ? fetched(given.block_table + (u64)segment.row * given.table_stride + key / TPB) : 0;
}

__device__ __forceinline__ int line_of(const Segment& segment, int box) {
    return segment.head * TPB + (segment.first + box) * KEYS % TPB;
}

__device__ __forceinline__ void bring_boxes(const Places& at, const TensorMap& map, const Given& given, Plan& plan) {
    const int lane = plan.lane;
    const u64 policy = read_once();
    plan.begin();
    wait_for_previous_kernel();
    Segment segment = plan.segment, next = {};
    int found = block_of(given, segment, 0, lane), next_found = 0;
    if (!plan.still_holds()) segment = plan.segment, found = block_of(given, segment, 0, lane);
    Ring<STAGES> ring;
    while (segment.count) {
        int ahead = 0;
        for (int box = 0; box < segment.count; ++box) {
            if (box && box % 32 == 0) found = ahead;
            const int block = __shfl_sync(~0u, found, box % 32);
            barrier_wait(at.empty + ring.slot * 8, ring.phase ^ 1);
            __syncwarp();
            if (lane == 0) {
                const u32 full = at.full + ring.slot * 8;
                barrier_expect(full, BOX_BYTES);
                bring_box(at.boxes + ring.slot * BOX_BYTES, map, line_of(segment, box), block, full, policy);
            }
            ring.advance();
            if (box % 32 == 0) ahead = block_of(given, segment, box + 32, lane);
            if (box == 0) next = plan.next(), next_found = block_of(given, next, 0, lane);
        }
        segment = next, found = next_found;
    }
}

// ---- Rows

// Where a segment's token was, and goes.
struct Token {
    int position;
    long long slot;
};

struct Heads {
    const Places& at;
    const Given& given;
    const int lane;
    Ring<SLOTS> ring = {};
    u32 landed = 0;

    __device__ __forceinline__ u8* slot() const { return at.slot_memory + ring.slot * SLOT_BYTES; }
    __device__ __forceinline__ u8* head(int index) const { return slot() + 64 + index * HEAD_BYTES; }
    __device__ __forceinline__ static bool is_newest(const Segment& segment) {
        return FRESH && segment.count && segment.is_last();
    }

    __device__ __forceinline__ Token token_of(const Segment& segment) const {
        return {ROPE && segment.count ? fetched(given.positions + segment.token) : 0,
                is_newest(segment) ? fetched(given.slots + segment.token) : 0};
    }

    // A token's queries, its key and value where the segment ends with it, and what rotates them.
    __device__ __forceinline__ void bring(const Segment& segment, int position) {
        const u64 token = segment.token;
        const u16* source = nullptr;
        const bool newest = is_newest(segment);
        if (lane == 0) barrier_expect(at.landed, (G + (newest ? 2 : 0)) * D * 2 + TABLE_BYTES);
        if (lane < G) source = given.q + token * given.q_token + (segment.head * G + lane) * given.q_head;
        if (newest && lane == G) source = given.k + token * given.k_token + segment.head * given.k_head;
        if (newest && lane == G + 1) source = given.v + token * given.v_token + segment.head * given.v_head;
        // The slot has what this warp made of the heads before.
        show_to_copies();
        __syncwarp();
        const u32 place = at.slots + ring.slot * SLOT_BYTES;
        if (source) bring_bytes(place + 64 + lane * HEAD_BYTES, source, D * 2, at.landed);
        if (ROPE && lane == 31) {
            const float* const table = given.cos_sin + (u64)position * (2 * HALF_ROPE);
            bring_bytes(place + SLOT_BYTES - TABLE_BYTES, table, TABLE_BYTES, at.landed);
        }
    }

    // A thread's numbers of a head: those of columns step * 16 + lane % 4 * 2 and the next, and 8 further.
    __device__ __forceinline__ void take(float (&x)[STEPS][4], const u8* head) const {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 both = *(const u32*)(head + step * 32 + half * 16 + lane % 4 * 4);
                x[step][half * 2] = number(both & 0xFFFF), x[step][half * 2 + 1] = number(both >> 16);
            }
        }
    }

    __device__ __forceinline__ void norm(float (&x)[STEPS][4], const float* weight) const {
        float squares = 0;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) squares += x[step][i] * x[step][i];
        }
        squares += __shfl_xor_sync(~0u, squares, 1);
        squares += __shfl_xor_sync(~0u, squares, 2);
        const float factor = rsqrtf(squares / D + given.eps);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 w = *(const float2*)(weight + step * 16 + half * 8 + lane % 4 * 2);
                x[step][half * 2] = factor * x[step][half * 2] * w.x;
                x[step][half * 2 + 1] = factor * x[step][half * 2 + 1] * w.y;
            }
        }
    }

    __device__ __forceinline__ static void turn(float& low, float& high, float cos, float sin) {
        const float turned = low * cos - high * sin;
        high = high * cos + low * sin, low = turned;
    }

    __device__ __forceinline__ void rotate(float (&x)[STEPS][4]) const {
        const float* const table = (const float*)(slot() + SLOT_BYTES - TABLE_BYTES);
        if (INTERLEAVED) {
#pragma unroll
            for (int step = 0; step < HALF_ROPE / 8; ++step) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int pair = step * 8 + half * 4 + lane % 4;
                    turn(x[step][half * 2], x[step][half * 2 + 1], table[pair], table[HALF_ROPE + pair]);
                }
            }
        } else {
            constexpr int APART = HALF_ROPE / 16;
#pragma unroll
            for (int step = 0; step < APART; ++step) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int pair = step * 16 + half * 8 + lane % 4 * 2;
                    const float2 cos = *(const float2*)(table + pair), sin = *(const float2*)(table + HALF_ROPE + pair);
                    turn(x[step][half * 2], x[step + APART][half * 2], cos.x, sin.x);
                    turn(x[step][half * 2 + 1], x[step + APART][half * 2 + 1], cos.y, sin.y);
                }
            }
        }
    }

    // A head in its place, as those who attend take it; `words` are the thread's.
    __device__ __forceinline__ void prepare(u32 (&words)[STEPS][2], u8* head, const float* weight, bool mine) const {
        float x[STEPS][4];
        take(x, head);
        if (NORM) norm(x, weight);
        if (ROPE) rotate(x);
        __syncwarp();
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                words[step][half] = two_numbers(x[step][half * 2], x[step][half * 2 + 1]);
                if (mine) *(u32*)(head + step * 32 + half * 16 + lane % 4 * 4) = words[step][half];
            }
        }
    }

    // The token's own key and value, to the cache: a step of the key by four lanes each.
    __device__ __forceinline__ void store(const u32 (&key)[STEPS][2], const Segment& segment, long long slot) const {
        const long long block = slot / TPB, place = slot % TPB;
        u16* const target = given.blocks + block * given.block_stride + (segment.head * TPB + place) * D;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (step == lane / 4) {
                u16* const mine = target + step * 16 + lane % 4 * 2;
                *(u32*)mine = key[step][0], *(u32*)(mine + 8) = key[step][1];
            }
        }
        if (lane < D / 8) *(uint4*)(target + HK * TPB * D + lane * 8) = *(const uint4*)(head(G + 1) + lane * 16);
    }

    __device__ __forceinline__ void prepare_all(const Segment& segment, long long slot) const {
        u32 words[STEPS][2];
        // Heads beyond the last one repeat it.
        prepare(words, head(min(lane / 4, G - 1)), given.q_weight, lane / 4 < G);
        if (is_newest(segment)) {
            prepare(words, head(G), given.k_weight, lane < 4);
            store(words, segment, slot);
        }
    }

    __device__ __forceinline__ void tell(const Segment& segment) {
        if (lane == 0) {
            *(Work*)slot() = {segment.token, segment.head, segment.length - FRESH, segment.first, segment.count,
                              segment.row * HK + segment.head, segment.piece, segment.pieces, is_newest(segment)};
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(at.slot_full + ring.slot * 8);
        ring.advance();
    }

    __device__ __forceinline__ void bring_all(Plan& plan) {
        plan.begin();
        wait_for_previous_kernel();
        Segment segment = plan.segment;
        Token token = token_of(segment);
        if (!plan.still_holds()) segment = plan.segment, token = token_of(segment);
        for (;;) {
            barrier_wait(at.slot_empty + ring.slot * 8, ring.phase ^ 1);
            __syncwarp();
            if (!segment.count) break;
            bring(segment, token.position);
            const Segment next = plan.next();
            const Token next_token = token_of(next);
            barrier_wait(at.landed, landed);
            landed ^= 1;
            __syncwarp();
            if (FRESH) prepare_all(segment, token.slot);
            tell(segment);
            segment = next, token = next_token;
        }
        tell(segment);
    }
};
