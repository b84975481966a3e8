// What `flat.cu` is made of: shapes, words that carry their own flag, and the stream of weights. Comes after `flat_words.cuh`.
//
// Defined at compilation: H, INNER, HQ, HK, D (hidden and inner features, heads, KV heads, features of a head), LAYERS, TPB (tokens
// of a block), ROWS (at most 4), GRID (programs), WARPS (that work), BRINGERS (warps that bring weights), STAGES (of the ring, a
// multiple of WARPS and of BRINGERS), FLYING (stages on their way at once, a multiple of BRINGERS), NORM (of q and k), SPAN (keys
// of a piece of a row, where programs are enough), DEEP (keys that a lane reads at once), SHARED (bytes of a program).

constexpr int THREADS = WARPS * 32, ALL_THREADS = THREADS + BRINGERS * 32;
constexpr int NQ = HQ * D, NKV = HK * D, NQKV = NQ + 2 * NKV, G = HQ / HK;
// Of a stage: rows of a weight and its columns at most. A product's upper rows are a stage's left half, its lower ones the right.
constexpr int TILE = 8, DEPTH = 512;
// 64 bytes more than the numbers: two rows, read at once, lie in different banks.
constexpr int PITCH = DEPTH * 2 + 64, STAGE_BYTES = TILE * PITCH;
constexpr int MOST_PIECES = 16;
constexpr int SUMS_OF_WARPS = (WARPS + 3) / 4 * 4;

__host__ __device__ constexpr int chunks(int columns) { return (columns + DEPTH - 1) / DEPTH; }
__host__ __device__ constexpr int share(int count) { return (count + GRID - 1) / GRID; }
__host__ __device__ constexpr int tiles_of(int rows) { return (rows + TILE - 1) / TILE; }
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }

constexpr int X_PITCH = larger(larger(INNER, NQ), H) * 2 + 64;
// Each program's most stages in a phase. Of gate and up as many rows each lie in a tile.
constexpr int MOST_SUMS = larger(larger(tiles_of(share(NQKV)) * chunks(H), tiles_of(share(H)) * chunks(NQ)),
                                 larger(tiles_of(4 * share(INNER / 2)) * chunks(H), tiles_of(share(H)) * chunks(INNER)));
constexpr int OWN = share(H);

struct Layer {
    const u8 *qkv, *out, *gate_up, *down;
    const float *input_norm, *mlp_norm, *q_norm, *k_norm;
    u16* blocks;
};

struct Given {
    const Layer* layers;
    u16* residual;
    const float* cos_sin;
    const int *positions, *seq_lens, *block_table;
    const long long* slots;
    u64 *qkv, *middle, *inner, *attended, *out, *parts;
    u32* epoch;
    long long block_stride;
    int count, table_stride;
    float eps, scale;
};

// Shared memory after the ring. Inputs of products and what warps found in attention are not needed at the same time.
struct Rest {
    union {
        alignas(16) u8 x[ROWS * X_PITCH];
        alignas(16) float merged[WARPS * G * D];
    };
    alignas(16) float sums[MOST_SUMS * TILE * ROWS];
    alignas(16) float heads[(G + 2) * D];
    alignas(16) float turn[D];
    alignas(16) float statistics[MOST_PIECES * G * 2];
    alignas(16) float own[ROWS * OWN];
    alignas(16) float squares[ROWS * SUMS_OF_WARPS];
    float most[WARPS * G], total[WARPS * G];
    u64 full[STAGES], empty[STAGES];
    Layer layers[LAYERS];
};

static_assert(STAGES * STAGE_BYTES + sizeof(Rest) <= SHARED, "the launch gives as much");

__device__ __forceinline__ Rest& rest() { return *(Rest*)(shared_memory() + STAGES * STAGE_BYTES); }

__device__ __forceinline__ void barrier_of_workers() { meet<THREADS>(); }

// A value and the number of the phase that it is of, written and read at once: who finds the number has the value.
__device__ __forceinline__ void tell(u64* where, u32 value, u32 epoch) {
    put_word(where, (u64)epoch << 32 | value);
}

struct Heard {
    u32 first, second;
};

// Pairs of them from FROM to TO, all on their way at once. Ends the launch where nobody tells them for some seconds.
template <int FROM, int TO, int COUNT, class Place>
__device__ __forceinline__ void hear_some(Heard (&heard)[COUNT], u32 epoch, Place place) {
    for (u32 turns = 0; turns < 1u << 24; ++turns) {
        u64 first[TO - FROM], second[TO - FROM];
        bool all = true;
#pragma unroll
        for (int i = FROM; i < TO; ++i) get_words(first[i - FROM], second[i - FROM], place(i));
#pragma unroll
        for (int i = FROM; i < TO; ++i) {
            all = all && (u32)(first[i - FROM] >> 32) == epoch && (u32)(second[i - FROM] >> 32) == epoch;
            heard[i] = {(u32)first[i - FROM], (u32)second[i - FROM]};
        }
        if (all) return;
    }
    give_up();
}

// COUNT pairs, the first of each at an even place. Of many, one is waited for before the others are looked at.
template <int COUNT, class Place>
__device__ __forceinline__ void hear(Heard (&heard)[COUNT], u32 epoch, Place place) {
    constexpr int FIRST = COUNT > 4 ? 1 : COUNT;
    hear_some<0, FIRST>(heard, epoch, place);
    if constexpr (FIRST < COUNT) hear_some<FIRST, COUNT>(heard, epoch, place);
}

struct Span {
    int first, count;
};

// Rows of this program, of `rows` that all programs share in units of `unit`.
__device__ __forceinline__ Span mine(int rows, int unit) {
    const int units = rows / unit, begin = units * (int)blockIdx.x / GRID, end = units * ((int)blockIdx.x + 1) / GRID;
    return {begin * unit, (end - begin) * unit};
}

__device__ __forceinline__ u32 full_barrier(u32 slot) { return address_of(rest().full + slot); }
__device__ __forceinline__ u32 empty_barrier(u32 slot) { return address_of(rest().empty + slot); }

// The warps that bring, a stage each in turns: tiles of rows, each in chunks of columns. PAIRS: half of a tile's rows are of the
// gate, half of up.
template <int COLUMNS, bool PAIRS>
__device__ __forceinline__ void bring_rows(const u8* weight, Span rows, u32& stage, u64 policy) {
    constexpr int PER_TILE = PAIRS ? TILE / 2 : TILE;
    const int lane = threadIdx.x % 32, number = lane % PER_TILE, warp = (threadIdx.x - THREADS) / 32;
    for (int begin = 0; begin < rows.count; begin += PER_TILE) {
        const int here = min(PER_TILE, rows.count - begin);
        const bool copies = lane < TILE && number < here;
        const long long row = rows.first + begin + number + (PAIRS && lane >= PER_TILE ? INNER : 0);
        const u8* source = weight + row * (COLUMNS * 2);
        for (int column = 0; column < COLUMNS; column += DEPTH, ++stage) {
            if (stage % BRINGERS != warp) continue;
            const u32 slot = stage % STAGES, full = full_barrier(slot), bytes = min(DEPTH, COLUMNS - column) * 2;
            if (stage >= STAGES) barrier_wait(empty_barrier(slot), (stage / STAGES & 1) ^ 1);
            // More of them would not come sooner, and what programs tell one another would wait behind them. It is this warp's
            // own stage that is waited for: of another's slot a turn may be missed.
            if (stage >= FLYING) barrier_wait(full_barrier((stage - FLYING) % STAGES), (stage - FLYING) / STAGES & 1);
            if (lane == 0) barrier_expect(full, bytes * here * (PAIRS ? 2 : 1));
            __syncwarp();
            if (copies) copy_row(shared_address() + slot * STAGE_BYTES + lane * PITCH, source + column * 2, bytes, full, policy);
        }
    }
}

constexpr int STEPS = DEPTH / 64;

// What a thread has of a stage: 16 bytes of a row's left half and of its right half a step.
struct Tile {
    // What may not be read has a value all the same: else registers keep it from one layer to the next.
    uint4 left[STEPS] = {}, right[STEPS] = {};
};

// A working warp's stages of a phase, in turns with the others: a slot of the ring is always of the same warp.
template <int COLUMNS>
struct Product {
    u32 stage, count, index;
    Tile tile;

    // Weights do not wait for x: those of the first stage are read before it is there.
    __device__ __forceinline__ Product(int tiles, u32& before) : stage(before), count(tiles * chunks(COLUMNS)) {
        index = ((u32)threadIdx.x / 32 + WARPS - stage % WARPS) % WARPS;
        before += count;
        if (index < count) read();
    }

    __device__ __forceinline__ int steps() const {
        if (COLUMNS % DEPTH == 0) return STEPS;
        return min(DEPTH, COLUMNS - (int)(index % chunks(COLUMNS)) * DEPTH) / 64;
    }

    __device__ __forceinline__ void read() {
        const u32 number = stage + index, slot = number % STAGES, lane = threadIdx.x % 32;
        const u32 address = shared_address() + slot * STAGE_BYTES + lane / 4 * PITCH + lane % 4 * 16;
        const int mine = steps();
        barrier_wait(full_barrier(slot), number / STAGES & 1);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (step < mine) {
                tile.left[step] = at_once(address + step * 64), tile.right[step] = at_once(address + (mine + step) * 64);
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(empty_barrier(slot));
    }

    // With x: of all stages into `sums` [stage, TILE, ROWS]. A thread has eight numbers of a row at once; which of them the
    // instruction takes for which column does not matter to a sum. Columns of the upper rows' x come first, then the lower ones'.
    __device__ __forceinline__ void run() {
        const int lane = threadIdx.x % 32, group = lane / 4, part = lane % 4;
        const u32 x = address_of(rest().x) + min(group % 4, ROWS - 1) * X_PITCH + part * 16;
        while (index < count) {
            const int mine = steps();
            const u32 b = x + index % chunks(COLUMNS) * (DEPTH * 2) + (group >= 4 ? mine * 64 : 0);
            float sum[4][4] = {};
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                if (step < mine) {
                    const uint4 left = tile.left[step], right = tile.right[step], one = at_once(b + step * 64);
                    mma(sum[step % 2 * 2], left.x, right.x, left.y, right.y, one.x, one.y);
                    mma(sum[step % 2 * 2 + 1], left.z, right.z, left.w, right.w, one.z, one.w);
                }
            }
            float* sums = rest().sums + (index * TILE + group) * ROWS;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float upper = sum[0][i] + sum[1][i] + sum[2][i] + sum[3][i];
                const float lower = sum[0][2 + i] + sum[1][2 + i] + sum[2][2 + i] + sum[3][2 + i];
                const float both = upper + __shfl_down_sync(~0u, lower, 2);
                const int token = part * 2 + i;
                if (part < 2 && token < ROWS) sums[token] = both;
            }
            index += WARPS;
            if (index < count) read();
        }
        barrier_of_workers();
    }
};

// Of row `row` of the phase's tiles, over its chunks.
template <int COLUMNS>
__device__ __forceinline__ float summed(int tile, int row, int token) {
    const float* sums = rest().sums + (tile * chunks(COLUMNS) * TILE + row) * ROWS + token;
    float total = 0;
#pragma unroll
    for (int chunk = 0; chunk < chunks(COLUMNS); ++chunk) total += sums[chunk * TILE * ROWS];
    return total;
}

__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
    return value;
}

// Of a row's numbers, whose squares warps have summed.
__device__ __forceinline__ float inverse_root(int row, float eps) {
    float total = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp += 4) {
        const float4 four = *(const float4*)&rest().squares[row * SUMS_OF_WARPS + warp];
        total += four.x + four.y + four.z + four.w;
    }
    return rsqrtf(total / H + eps);
}

__host__ __device__ constexpr int each_of(int count) { return (count + THREADS - 1) / THREADS; }

// Rows whose numbers are heard at once, EACH of them by a thread.
template <int EACH>
__host__ __device__ constexpr int rows_at_once() {
    return EACH >= 4 ? 1 : (ROWS * EACH <= 8 ? ROWS : 8 / EACH);
}

// A norm's weight, read before its input is there: it comes from memory.
struct Norm {
    static constexpr int EACH = each_of(H / 2), AT_ONCE = rows_at_once<EACH>();
    float2 weight[EACH] = {};

    __device__ __forceinline__ explicit Norm(const float* weights) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) weight[i] = two_of(weights + 2 * pair(i));
    }

    // Threads without a pair of their own have the last one.
    static __device__ __forceinline__ int pair(int i) { return min((int)threadIdx.x + i * THREADS, H / 2 - 1); }
    static __device__ __forceinline__ bool own(int i) { return threadIdx.x + i * THREADS < H / 2; }

    // x = values * weight in bfloat16; returns what the values' squares add.
    __device__ __forceinline__ float put(int row, int i, float first, float second) const {
        if (!own(i)) return 0;
        *(u32*)(rest().x + row * X_PITCH + pair(i) * 4) = narrowed(first * weight[i].x, second * weight[i].y);
        return first * first + second * second;
    }

    // Each row's squares by warps: the root is taken where sums are read.
    static __device__ __forceinline__ void keep(int row, float squares) {
        squares = sum_of_warp(squares);
        if (threadIdx.x % 32 == 0) rest().squares[row * SUMS_OF_WARPS + threadIdx.x / 32] = squares;
    }

    __device__ __forceinline__ void of_told(const u64* told, u32 epoch, int count) const {
        for (int from = 0; from < count; from += AT_ONCE) {
            Heard heard[AT_ONCE * EACH];
            hear(heard, epoch, [=](int i) { return told + (min(from + i / EACH, count - 1) * H + 2 * pair(i % EACH)); });
#pragma unroll
            for (int row = 0; row < AT_ONCE; ++row) {
                if (from + row >= count) continue;
                float squares = 0;
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    const Heard both = heard[row * EACH + i];
                    squares += put(from + row, i, __uint_as_float(both.first), __uint_as_float(both.second));
                }
                keep(from + row, squares);
            }
        }
        barrier_of_workers();
    }

    __device__ __forceinline__ void of_numbers(const u16* numbers, int count) const {
        for (int row = 0; row < count; ++row) {
            float squares = 0;
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const u32 both = ((const u32*)numbers)[row * (H / 2) + pair(i)];
                squares += put(row, i, widened(both & 0xFFFF), __uint_as_float(both & 0xFFFF0000));
            }
            keep(row, squares);
        }
        barrier_of_workers();
    }
};

// x of words that are two bfloat16 each.
template <int COLUMNS>
__device__ __forceinline__ void put_told(const u64* told, u32 epoch, int count) {
    constexpr int EACH = each_of(COLUMNS / 4), AT_ONCE = rows_at_once<EACH>();
    const auto four = [](int i) { return min((int)threadIdx.x + i * THREADS, COLUMNS / 4 - 1); };
    for (int from = 0; from < count; from += AT_ONCE) {
        Heard heard[AT_ONCE * EACH];
        hear(heard, epoch, [=](int i) { return told + (min(from + i / EACH, count - 1) * (COLUMNS / 2) + 2 * four(i % EACH)); });
#pragma unroll
        for (int i = 0; i < AT_ONCE * EACH; ++i) {
            if (from + i / EACH >= count) continue;
            uint2* target = (uint2*)(rest().x + (from + i / EACH) * X_PITCH + four(i % EACH) * 8);
            *target = make_uint2(heard[i].first, heard[i].second);
        }
    }
    barrier_of_workers();
}
