// Product of few rows with a weight matrix, for Hopper (sm_90a): out [T, N] = x [T, K] @ weight [N, K].T + bias. ADD: out +=
// that. GATED: weight is [2N, K], and out = f(gate) * up.
//
// A tile is ROWS rows of the weight for all T rows of x, at most 64 * BANDS. The CLUSTER programs of a cluster share a tile:
// each sums a part of K, and they put the parts together through each other's shared memory, always in one order. One warp
// brings weight and x by bulk tensor copies into two rings of shared memory; BANDS groups of four warps multiply, the rows of
// x as M and the rows of the weight as N of wgmma. What copies read outside of a matrix is zero, so K and N need not be
// multiples of a tile.
//
// The weight does not depend on the kernel before: its ring is filled before `griddepcontrol.wait`, while that kernel drains.
//
// Comes after `chip.cuh`, `hopper.cuh` and `epilogue.cuh`. Defined at compilation: ROWS, BANDS, CLUSTER, STAGES, X_STAGES,
// EPILOGUE, KIND, BIAS, WIDE_OUT (a float32 out), and the function `multiply`, one wgmma of 64 x ROWS x 16.

constexpr int DEPTH = 64;  // columns of K in a stage: 128 bytes, the span of the swizzle
constexpr int GROUPS = ROWS / 8, HALVES = EPILOGUE == GATED ? 2 : 1;
constexpr int COLUMNS = ROWS / HALVES;            // of out in a tile
constexpr int SLICE = GROUPS / HALVES / CLUSTER;  // groups of 8 columns of out that one program finishes
constexpr int W_BYTES = ROWS * DEPTH * 2, X_BYTES = BANDS * 64 * DEPTH * 2;
constexpr int WORKERS = BANDS * 128;
static_assert(ROWS % 8 == 0 && ROWS <= 256 && SLICE * HALVES * CLUSTER == GROUPS, "a slice is of whole groups");
static_assert((CLUSTER - 1) * SLICE * HALVES * WORKERS * 16 <= STAGES * W_BYTES + X_STAGES * X_BYTES, "parts fit the rings");

struct Rings {
    u32 weight, x, weight_full, x_full, empty;
};

// The stages of one program: `tiles` tiles from `first`, `stride` apart, each over `count` stages of K from `begin`.
struct Work {
    int first, stride, tiles, begin, count;
};

// Bring all stages, each as soon as its place in a ring is free. The consumers give back one of x and one of the weight at
// once, so one barrier stands for both.
__device__ __forceinline__ void produce(
    const Rings& rings, const TensorMap& weight, const TensorMap& x, const Work& work, int N, int x_rows) {
    const u64 once = read_once(), again = read_again();
    const int total = work.tiles * work.count;
    int row = work.first * COLUMNS, step = 0, slot = 0;
    auto next_weight = [&] {
        u32 barrier = rings.weight_full + slot * 8, target = rings.weight + slot * W_BYTES;
        int column = (work.begin + step) * DEPTH;
        barrier_expect(barrier, W_BYTES);
        bring(target, weight, column, row, barrier, once);
        if (EPILOGUE == GATED) bring(target + W_BYTES / 2, weight, column, N + row, barrier, once);
        if (++step == work.count) step = 0, row += work.stride * COLUMNS;
        if (++slot == STAGES) slot = 0;
    };
    int ahead = 0;
    for (; ahead < total && ahead < STAGES; ++ahead) next_weight();
    wait_for_previous_kernel();
    for (int index = 0, x_slot = 0, x_step = 0, phase = 1; index < total || ahead < total; ++index) {
        if (index >= X_STAGES) barrier_wait(rings.empty + x_slot * 8, phase);
        if (index < total) {
            u32 barrier = rings.x_full + x_slot * 8;
            barrier_expect(barrier, x_rows * DEPTH * 2);
            bring(rings.x + x_slot * X_BYTES, x, (work.begin + x_step) * DEPTH, 0, barrier, again);
        }
        if (index >= X_STAGES && ahead < total) next_weight(), ++ahead;
        if (++x_step == work.count) x_step = 0;
        if (++x_slot == X_STAGES) x_slot = 0, phase ^= 1;
    }
}

// Where a worker is in the rings.
struct Place {
    int slot = 0, x_slot = 0;
    u32 phase = 0, x_phase = 0;
};

// Multiply `count` stages, and sum.
__device__ __forceinline__ void consume(float (&sum)[GROUPS * 4], const Rings& rings, int count, int band, Place& place) {
    const bool speaker = threadIdx.x % 32 == 0;
    for (int index = 0; index < count; ++index) {
        barrier_wait(rings.weight_full + place.slot * 8, place.phase);
        barrier_wait(rings.x_full + place.x_slot * 8, place.x_phase);
        u64 a = descriptor(rings.x + place.x_slot * X_BYTES + band * 64 * DEPTH * 2);
        u64 b = descriptor(rings.weight + place.slot * W_BYTES);
        begin_multiplying();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; ++k) multiply(sum, a + k * 2, b + k * 2);
        wait_for_products();
        // Memory is the slower side: a stage is given back at once, not when the next one has come.
        if (speaker) barrier_arrive(rings.empty + place.x_slot * 8);
        if (++place.slot == STAGES) place.slot = 0, place.phase ^= 1;
        if (++place.x_slot == X_STAGES) place.x_slot = 0, place.x_phase ^= 1;
    }
#pragma unroll
    for (int i = 0; i < GROUPS * 4; ++i) settle(sum[i]);
}

// Put the parts of a cluster together: this program's slice of the columns is summed over all of them.
__device__ __forceinline__ void gather(
    float (&mine)[SLICE * HALVES * 4], const float (&sum)[GROUPS * 4], u32 parts, int rank, int worker) {
#pragma unroll
    for (int other = 0; other < CLUSTER; ++other) {
        u32 target = 0;
        if (other != rank) {
            int place = rank < other ? rank : rank - 1;
            u32 local = parts + (place * SLICE * HALVES * WORKERS + worker) * 16;
            target = shared_address_of(other, local);
        }
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
#pragma unroll
            for (int group = 0; group < SLICE; ++group) {
                int index = half * SLICE + group;
                const float* value = sum + (half * (GROUPS / HALVES) + other * SLICE + group) * 4;
                if (other == rank) {
                    for (int i = 0; i < 4; ++i) mine[index * 4 + i] = value[i];
                } else {
                    store_to_cluster(target + index * WORKERS * 16, value);
                }
            }
        }
    }
}

// Add what the other programs of the cluster left here.
__device__ __forceinline__ void add_parts(float (&mine)[SLICE * HALVES * 4], u32 parts, int worker) {
#pragma unroll
    for (int place = 0; place < CLUSTER - 1; ++place) {
#pragma unroll
        for (int index = 0; index < SLICE * HALVES; ++index) {
            add_from_shared(mine + index * 4, parts + ((place * SLICE * HALVES + index) * WORKERS + worker) * 16);
        }
    }
}

// Residual of this worker's elements of out, two of a 32-bit word.
__device__ __forceinline__ void read_residual(u32 (&residual)[SLICE * 2], const void* out, int T, int N, int row, int column) {
#pragma unroll
    for (int group = 0; group < SLICE; ++group) {
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
            int token = row + lower * 8, at = column + group * 8;
            residual[group * 2 + lower] = 0;
            if (token < T && at < N) residual[group * 2 + lower] = *(const u32*)((const u16*)out + (u64)token * N + at);
        }
    }
}

// Write groups of 8 columns from the sums of a worker: its rows are `row` and `row + 8`, its columns two from `column`.
__device__ __forceinline__ void finish(
    const float* sum, const u32 (&residual)[SLICE * 2], void* out, const u16* bias, int T, int N, int row, int column) {
#pragma unroll
    for (int group = 0; group < SLICE; ++group) {
        const int at = column + group * 8;
        const bool inside = at < N;
        float offset[HALVES * 2] = {};
        if (BIAS && inside) {
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                u32 both = *(const u32*)(bias + half * N + at);
                offset[half * 2] = widened(both), offset[half * 2 + 1] = widened(both >> 16);
            }
        }
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
            const int token = row + lower * 8;
            float value[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                value[i] = sum[group * 4 + lower * 2 + i] + offset[i];
                if (EPILOGUE == GATED) {
                    float up = sum[(SLICE + group) * 4 + lower * 2 + i] + offset[2 + i];
                    value[i] = activated(value[i]) * up;
                }
                if (EPILOGUE == ADD) value[i] += widened(residual[group * 2 + lower] >> i * 16);
            }
            if (inside && token < T) {
                const u64 place = (u64)token * N + at;
                if (WIDE_OUT) {
                    *(float2*)((float*)out + place) = make_float2(value[0], value[1]);
                } else {
                    *(u32*)((u16*)out + place) = narrowed(value[0], value[1]);
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(WORKERS + 32)
    few_rows(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, void* out, const u16* bias, int T,
             int N, int stages, int tiles, int x_rows) {
    const int rank = blockIdx.x % CLUSTER, warp = threadIdx.x / 32;
    const u32 base = shared_address(), barriers = base + STAGES * W_BYTES + X_STAGES * X_BYTES;
    const Rings rings = {base, base + STAGES * W_BYTES, barriers, barriers + STAGES * 8, barriers + (STAGES + X_STAGES) * 8};
    const int share = (stages + CLUSTER - 1) / CLUSTER, begin = rank * share;
    const int first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
    const Work work = {first, stride, (tiles - first + stride - 1) / stride, begin, max(0, min(share, stages - begin))};

    let_next_kernel_start();
    if (threadIdx.x == WORKERS) {
        for (int i = 0; i < STAGES + X_STAGES; ++i) barrier_init(barriers + i * 8, 1);
        for (int i = 0; i < X_STAGES; ++i) barrier_init(rings.empty + i * 8, BANDS * 4);
        show_barriers();
    }
    __syncthreads();
    if (warp == WORKERS / 32) {
        if (threadIdx.x == WORKERS) produce(rings, weight, x, work, N, x_rows);
        if (CLUSTER > 1) {
            __syncwarp();
            cluster_barrier();
            cluster_barrier();
        }
        return;
    }
    wait_for_previous_kernel();
    const int worker = threadIdx.x, band = worker / 128;
    const int row = band * 64 + worker % 128 / 32 * 16 + worker % 32 / 4, corner = worker % 4 * 2;
    Place place;
    for (int tile = 0; tile < work.tiles; ++tile) {
        const int column = (first + tile * stride) * COLUMNS + rank * SLICE * 8 + corner;
        float sum[GROUPS * 4];
        u32 residual[SLICE * 2];
#pragma unroll
        for (int i = 0; i < GROUPS * 4; ++i) sum[i] = 0;
        if (EPILOGUE == ADD) read_residual(residual, out, T, N, row, column);
        consume(sum, rings, work.count, band, place);
        if constexpr (CLUSTER > 1) {
            // A cluster has one tile: nothing else comes into the rings once all of it has been multiplied.
            float mine[SLICE * HALVES * 4];
            cluster_barrier();
            gather(mine, sum, base, rank, worker);
            cluster_barrier();
            add_parts(mine, base, worker);
            finish(mine, residual, out, bias, T, N, row, column);
        } else {
            finish(sum, residual, out, bias, T, N, row, column);
        }
    }
}
