// Product of few rows with a packed weight, for all chips since Ampere (sm_80): out [T, N] = x [T, K] @ weight [N, K].T +
// bias. ADD: out += that. GATED: weight is [2N, K], and out = f(gate) * up. Products are of codes as they are, summed in
// float32; a group's scale goes to its sum.
//
// A tile is ROWS rows of the weight for all T rows of x, at most 8 * TILES. The CLUSTER programs of a cluster share a tile,
// and the PARTS groups of ROW_WARPS warps of a program share it further: each has a part of K, and they put the parts together
// in one order. A warp brings its own codes, BLOCKS records at a time, through a ring of STAGES in shared memory, and widens
// them in registers: rows of the weight are M of mma.sync, rows of x are N. The warps of a part share x, in the ring or, where
// it is DIRECT, in the L1 cache.
//
// The weight does not depend on the kernel before: its ring is filled before `griddepcontrol.wait`, while that one drains.
//
// Comes after `ampere.cuh`, `epilogue.cuh`, `packed.cuh` and `packed_finish.cuh`. Defined at compilation, beside theirs:
// ROW_WARPS, PARTS, BLOCKS, TILES, CLUSTER, STAGES, RESIDENT (programs a multiprocessor that registers are left for), DIRECT
// (each warp reads x itself), DEPENDENT (the chip has dependent launch).

constexpr int SHARERS = ROW_WARPS * 32, THREADS = SHARERS * PARTS;
constexpr int ROWS = ROW_WARPS * BLOCKS * 16, COLUMNS = ROWS / HALVES;  // of the weight, and of out
constexpr int HALF_BLOCKS = COLUMNS / 16;
constexpr int W_BYTES = BLOCKS * (CODE_BYTES + SCALE_BYTES);  // of a warp's stage
constexpr int X_BYTES = DIRECT ? 0 : TILES * 8 * DEPTH * 2;   // of a part's stage
constexpr int STAGE_BYTES = ROW_WARPS * PARTS * W_BYTES + PARTS * X_BYTES;
constexpr int PIECES = DEPTH / 8;       // of 16 bytes in a row of x
constexpr int STRIDE = SHARERS / PIECES, MOST = (TILES * 8 + STRIDE - 1) / STRIDE;  // rows of a thread, and how many
constexpr int LINE = line_of(ROWS), PART = TILES * 8 * LINE;  // sums of a row, and of a part
constexpr int CHAINS = BLOCKS * TILES > 1 ? 1 : 2;  // of products that wait for one another: one alone would be too slow
constexpr bool APART = SETS || CHAINS > 1;          // sums of a stage are not added to by its products
static_assert(ROWS % (16 * HALVES) == 0, "a half is of whole blocks");

// Where a piece of x lies in a stage: even and odd rows in different halves of the banks.
__device__ __forceinline__ int place_of(int row, int piece) { return row * DEPTH * 2 + (piece ^ (row & 1) << 2) * 16; }

// What a lane brings of a warp's next records, of BLOCKS blocks of rows.
struct Weights {
    const u8 *codes[BLOCKS], *scales[BLOCKS];
    bool scaler;  // the lane has a piece of the scales
};

__device__ __forceinline__ void bring(u32 target, Weights& weights) {
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        const u32 place = target + b * (CODE_BYTES + SCALE_BYTES);
#pragma unroll
        for (int i = 0; i < CODE_BYTES; i += 512) copy(place + i, weights.codes[b] + i);
        if (SCALE_BYTES) copy_if(weights.scaler, place + CODE_BYTES, weights.scales[b]);
        weights.codes[b] += CODE_BYTES, weights.scales[b] += SCALE_BYTES;
    }
}

// Of few rows of x a lane reads what it multiplies itself, one record ahead: a ring would take as many instructions again.
struct Direct {
    const u16* from;  // the first eight inputs of its first row in the next record
    u64 rows[TILES];  // elements from there to its other rows; of rows that are not there it reads the last one
    int columns;      // from the record on
};

typedef uint4 Inputs[DIRECT ? TILES : 1][UNITS];

__device__ __forceinline__ void read_x(Inputs& inputs, Direct& direct, int t) {
#pragma unroll
    for (int tile = 0; tile < (DIRECT ? TILES : 0); ++tile) {
        const u16* from = direct.from + direct.rows[tile];
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            if (direct.columns < DEPTH) inputs[tile][unit] = make_uint4(0, 0, 0, 0);
            if (direct.columns >= DEPTH || unit * 32 + t * 8 < direct.columns) {
                inputs[tile][unit] = *(const uint4*)(from + unit * 32);
            }
        }
    }
    direct.from += DEPTH, direct.columns -= DEPTH;
}

// What one thread of a part brings of x: a piece of every STRIDE-th row.
struct Input {
    const u16* from;  // the piece of its first row
    int stride;       // elements from one of its rows to the next
    int rows, columns;  // how many rows are left from its first on, and columns from its piece on
    int place;        // of the first row's piece in a stage; even strides keep to one half of the banks
};

__device__ __forceinline__ void bring_x(u32 target, const Input& input, int column) {
    const bool inside = column < input.columns;
    const u16* from = input.from + (inside ? column : 0);
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
        const u32 place = target + input.place + i * STRIDE * DEPTH * 2;
        if (i * STRIDE < input.rows) copy_or_clear(place, from + (u64)i * input.stride, inside);
    }
}

// The first stages of x, all on the way at once. They are no copies of the kind that the weight's are: these end in the order
// in which they began, and x would have to wait for all of the ring.
__device__ __forceinline__ void load_first_x(u8* ring, const Input& input, int column, int count) {
    constexpr int ALL = MOST * (STAGES - 1), BATCH = ALL < 12 ? ALL : 12, UNROLLED = ALL > 24 ? 1 : ALL;
#pragma unroll UNROLLED
    for (int first = 0; first < ALL; first += BATCH) {
        uint4 held[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int stage = (first + j) / MOST, i = (first + j) % MOST, at = column + stage * DEPTH;
            held[j] = make_uint4(0, 0, 0, 0);
            if (first + j < ALL && stage < count && i * STRIDE < input.rows && at < input.columns) {
                held[j] = *(const uint4*)(input.from + (u64)i * input.stride + at);
            }
        }
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const int stage = (first + j) / MOST, i = (first + j) % MOST;
            if (first + j < ALL && i * STRIDE < input.rows) {
                *(uint4*)(ring + stage * STAGE_BYTES + input.place + i * STRIDE * DEPTH * 2) = held[j];
            }
        }
    }
}

// Add the products of one stage; `held` are the inputs where they are not in a stage.
__device__ __forceinline__ void consume(
    float (&sum)[BLOCKS][TILES][4], const u8* weight, const u8* x, const Inputs& held, int lane) {
    const int g = lane / 4, t = lane % 4;
    const float nothing[4] = {0, 0, 0, 0};
    // Sums of a group, as long as it lasts.
    float part[BLOCKS][TILES][CHAINS][4];
    Codes codes[BLOCKS];
    Scales scales[BLOCKS];
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
        const bool first = unit % STEP == 0, last = unit % STEP == STEP - 1;
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            const u8* record = weight + b * (CODE_BYTES + SCALE_BYTES);
            if (FORMAT != INT4) codes[b] = *(const Codes*)(record + unit * 512 + lane * 16);
            if (FORMAT == INT4 && unit % 2 == 0) codes[b] = *(const Codes*)(record + unit / 2 * 512 + lane * 16);
            if (first) scales[b] = scales_of(record + CODE_BYTES, unit / STEP, g);
            u32 low[4], high[4];
            widen(low, codes[b], unit, true, scales[b].minus_low);
            widen(high, codes[b], unit, false, scales[b].minus_high);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const int place = place_of(tile * 8 + g, unit * 4 + t);
                const uint4 in = DIRECT ? held[DIRECT ? tile : 0][unit] : *(const uint4*)(x + place);
                float(&total)[4] = sum[b][tile];
                float(&one)[4] = APART ? part[b][tile][0] : total;
                float(&other)[4] = CHAINS > 1 ? part[b][tile][CHAINS - 1] : one;
                multiply(one, low[0], high[0], low[1], high[1], in.x, in.y, APART && first ? nothing : one);
                multiply(other, low[2], high[2], low[3], high[3], in.z, in.w, CHAINS > 1 && first ? nothing : other);
                if (APART && last) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float whole = CHAINS > 1 ? one[i] + other[i] : one[i];
                        total[i] += SETS ? (i < 2 ? scales[b].low : scales[b].high) * whole : whole;
                    }
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    packed_rows(const u8* codes, const u8* scales, const float* row_scale, const u16* x, void* out, const float* bias, int T,
                int N, int K, int x_row) {
    u8* const memory = shared_memory();
    const int rank = blockIdx.x % CLUSTER, tile = blockIdx.x / CLUSTER;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp / ROW_WARPS, row_warp = warp % ROW_WARPS;
    const int records = (K + DEPTH - 1) / DEPTH, share = (records + PARTS * CLUSTER - 1) / (PARTS * CLUSTER);
    const int begin = (rank * PARTS + part) * share, count = max(0, min(share, records - begin));
    u8* const weight_ring = memory + warp * W_BYTES;
    u8* const x_ring = memory + ROW_WARPS * PARTS * W_BYTES + part * X_BYTES;

    if (DEPENDENT) let_next_kernel_start();
    Weights weights;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        const int local = row_warp * BLOCKS + b, half = local / HALF_BLOCKS, block = tile * HALF_BLOCKS + local % HALF_BLOCKS;
        // Of a block that is not there the last one is read instead; nobody reads its sums.
        const u64 record = (u64)(half * (N / 16) + min(block, (N - 1) / 16)) * records + begin;
        weights.codes[b] = codes + record * CODE_BYTES + lane * 16;
        weights.scales[b] = scales + record * SCALE_BYTES + lane * 16;
    }
    weights.scaler = lane < SCALE_BYTES / 16;
    constexpr int LAST = (STAGES - 1) * STAGE_BYTES;
    const u32 target = kept(shared_address() + warp * W_BYTES + lane * 16);
    const u32 x_target = shared_address() + ROW_WARPS * PARTS * W_BYTES + part * X_BYTES;
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        if (stage < count) bring(target + stage * STAGE_BYTES, weights);
        end_group();
    }
    if (DEPENDENT) wait_for_previous_kernel();

    float sum[BLOCKS][TILES][4] = {};
    Inputs even, odd;
    Direct direct = {x + begin * DEPTH + lane % 4 * 8, {}, K - begin * DEPTH};
#pragma unroll
    for (int i = 0; i < TILES; ++i) direct.rows[i] = (u64)min(i * 8 + lane / 4, T - 1) * x_row;
    const int row = (row_warp * 32 + lane) / PIECES, piece = lane % PIECES;
    const Input input = {x + (u64)row * x_row + piece * 8, STRIDE * x_row, T - row, K - piece * 8, place_of(row, piece)};
    if (DIRECT) {
        if (count > 0) read_x(even, direct, lane % 4);
    } else {
        load_first_x(x_ring, input, begin * DEPTH, count);
    }
    int slot = 0, free = LAST;
    auto advance = [&](int step, const Inputs& now, Inputs& next) {
        if (DIRECT && step + 1 < count) read_x(next, direct, lane % 4);
        wait_for_groups<STAGES - 2>();
        if (DIRECT) {
            __syncwarp();
        } else {
            barrier<SHARERS>(part + 1);
        }
        if (step + STAGES - 1 < count) {
            bring(target + free, weights);
            if (!DIRECT) bring_x(x_target + free, input, (begin + step + STAGES - 1) * DEPTH);
        }
        end_group();
        consume(sum, weight_ring + slot, x_ring + slot, now, lane);
        slot = slot == LAST ? 0 : slot + STAGE_BYTES;
        free = free == LAST ? 0 : free + STAGE_BYTES;
    };
    if (DIRECT) {
        for (int step = 0; step < count; step += 2) {
            advance(step, even, odd);
            if (step + 1 < count) advance(step + 1, odd, even);
        }
    } else {
        for (int step = 0; step < count; ++step) advance(step, even, odd);
    }
    wait_for_groups<0>();
    __syncthreads();
    float* const sums = (float*)memory;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
        for (int column = 0; column < TILES; ++column) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = column * 8 + lane % 4 * 2 + i % 2, row = (row_warp * BLOCKS + b) * 16 + lane / 4 + i / 2 * 8;
                sums[part * PART + token * LINE + row] = sum[b][column][i];
            }
        }
    }
    if (CLUSTER > 1) {
        cluster_barrier();
    } else {
        __syncthreads();
    }
    const u32 place = shared_address();
    finish<COLUMNS, THREADS>(
        {out, bias, row_scale, T, N}, rank, CLUSTER, tile * COLUMNS, [&](float(&total)[4], int half, int token, int within) {
            for (int other = 0; other < CLUSTER; ++other) {
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    const int sum = part * PART + token * LINE + half * COLUMNS + within;
                    add<(CLUSTER > 1)>(total, other, place + sum * 4);
                }
            }
        });
    if (CLUSTER > 1) cluster_barrier();
}
