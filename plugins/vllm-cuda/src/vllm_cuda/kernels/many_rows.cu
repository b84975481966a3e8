// Product of many rows with a weight matrix, for Hopper (sm_90a): out [T, N] = x [T, K] @ weight [N, K].T + bias. ADD: out +=
// that, rounded before it is added. GATED: weight is [2N, K], and out = f(gate) * up. All of 16 bits, sums of float32.
//
// A tile is 128 rows of x and ROWS rows of the weight, of a gate half of them from each projection. The two programs of a
// cluster take tiles of the same weight, one below the other: each brings its own x and half of the weight, which goes to
// both. One warp brings stages of DEPTH columns into a ring of shared memory; two groups of four warps multiply 64 rows each.
// What copies read outside of a matrix is zero, and what they would write there is not written.
//
// Programs stay for many tiles: a warp puts its sums into boxes of shared memory, copies take them from there, and the next
// tile's products begin. The groups are LEAD stages apart, so that one multiplies while the other finishes a tile. Tiles go
// down `height` pairs of rows of tiles and then to the right, so that those at work at a time share x and weight in L2.
//
// Comes after `chip.cuh`, `number.cuh`, `hopper.cuh` and `epilogue.cuh`. Defined at compilation: ROWS, STAGES, LEAD, EPILOGUE,
// KIND, BIAS, HALF (float16, else bfloat16), and the function `multiply`, one wgmma of 64 x ROWS x 16.

constexpr int CLUSTER = 2, BANDS = 2;  // programs of a cluster; groups of four warps, each with a band of 64 rows of x
constexpr int DEPTH = 64;              // columns of K in a stage: 128 bytes, the span of the swizzle
constexpr int LINES = BANDS * 64, WORKERS = BANDS * 128;
constexpr int HALVES = EPILOGUE == GATED ? 2 : 1, COLUMNS = ROWS / HALVES;  // of out in a tile
constexpr int PART = ROWS / CLUSTER;                                        // rows of the weight that one program brings
constexpr int X_BYTES = LINES * DEPTH * 2, STAGE_BYTES = X_BYTES + ROWS * DEPTH * 2;
constexpr int BOX = 64, BOX_BYTES = 16 * BOX * 2, BOXES = 2;  // columns of out in a box of 16 rows; boxes of a warp
static_assert(COLUMNS % BOX == 0, "a tile is of whole boxes");
static_assert(LEAD < STAGES, "the group that follows gives back what the other waits for");

struct Ring {
    u32 memory, full, empty;
};

// All tiles, `rows` (of clusters) by `columns`; this cluster's are from `first`, `stride` apart, each of `steps` stages.
struct Work {
    int rows, columns, height, steps, first, stride, rank;
};

// Where a tile begins in x and in out.
struct Corner {
    int row, column;
};

__device__ __forceinline__ Corner corner_of(const Work& work, int tile) {
    const int band = work.height * work.columns, above = tile / band * work.height;
    const int height = min(work.height, work.rows - above), place = tile % band;
    return {((above + place % height) * CLUSTER + work.rank) * LINES, place / height * COLUMNS};
}

// Bring all stages, each as soon as both programs have given back its place: half of the weight goes to both. The first ones
// of the weight are brought while the kernel before drains.
__device__ __forceinline__ void produce(
    const Ring& ring, const TensorMap& weight, const TensorMap& x, const Work& work, int T, int N) {
    const u64 once = read_once(), again = read_again();
    const int part = work.rank * (EPILOGUE == GATED ? N : PART), ahead = min(STAGES, work.steps);
    // Copies of what lies wholly outside of a matrix take long.
    const int last = (T - 1) / LINES * LINES;
    auto bring_weight = [&](int slot, int column, int row) {
        const u32 barrier = ring.full + slot * 8, target = ring.memory + slot * STAGE_BYTES + X_BYTES;
        barrier_expect(barrier, STAGE_BYTES);
        bring_to_all(target + work.rank * PART * DEPTH * 2, weight, column, row, barrier, once, (1 << CLUSTER) - 1);
    };
    for (int slot = 0; slot < ahead; ++slot) bring_weight(slot, slot * DEPTH, corner_of(work, work.first).column + part);
    wait_for_previous_kernel();
    int slot = 0;
    u32 phase = 1;
    for (int tile = work.first; tile < work.rows * work.columns; tile += work.stride) {
        const Corner corner = corner_of(work, tile);
        for (int step = 0; step < work.steps; ++step) {
            if (tile != work.first || step >= ahead) {
                barrier_wait(ring.empty + slot * 8, phase);
                bring_weight(slot, step * DEPTH, corner.column + part);
            }
            bring(ring.memory + slot * STAGE_BYTES, x, step * DEPTH, min(corner.row, last), ring.full + slot * 8, again);
            if (++slot == STAGES) slot = 0, phase ^= 1;
        }
    }
}

// Multiply the stages of a tile from `slot` on, and sum. A stage is given back once the products of the next are queued.
__device__ __forceinline__ void consume(float (&sum)[ROWS / 2], const Ring& ring, int steps, int band, int& slot, u32& phase) {
    const int lane = threadIdx.x % 32;
    const u32 empty = shared_address_of(lane % CLUSTER, ring.empty);
    int last = 0;
    for (int step = 0; step < steps; ++step) {
        barrier_wait(ring.full + slot * 8, phase);
        const u32 memory = ring.memory + slot * STAGE_BYTES;
        const u64 a = descriptor(memory + band * 64 * DEPTH * 2), b = descriptor(memory + X_BYTES);
        begin_multiplying();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; ++k) multiply(sum, a + k * 2, b + k * 2, step > 0 || k > 0);
        close_group_of_products();
        wait_for_groups_of_products<1>();
        if (step > 0 && lane < CLUSTER) barrier_arrive_there(empty + last * 8);
        last = slot;
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
    wait_for_groups_of_products<0>();
    if (lane < CLUSTER) barrier_arrive_there(empty + last * 8);
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) settle(sum[i]);
}

// Numbers of the bias for two columns of out from `column`, of the gate and of the up projection.
__device__ __forceinline__ void read_bias(float (&offset)[4], const u16* bias, int N, int column) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        const u32 both = BIAS && column < N ? *(const u32*)(bias + half * N + column) : 0;
        offset[half * 2] = number(both), offset[half * 2 + 1] = number(both >> 16);
    }
}

// Two numbers of out, from the sums at `index` and, of a gate, those of the up projection.
__device__ __forceinline__ u32 finished(const float (&sum)[ROWS / 2], const float (&offset)[4], int index) {
    float value[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        value[i] = sum[index + i];
        if (BIAS) value[i] += offset[i];
        if (EPILOGUE == GATED) {
            float up = sum[COLUMNS / 2 + index + i];
            if (BIAS) up += offset[2 + i];
            value[i] = activated(value[i]) * up;
        }
    }
    return two_numbers(value[0], value[1]);
}

// Write a warp's 16 rows of a tile from `corner` on. Its boxes serve in turns: one is filled while the other is taken.
__device__ __forceinline__ void finish(
    const float (&sum)[ROWS / 2], u32 boxes, u32& turn, const TensorMap& out, const u16* bias, int N, Corner corner) {
    const int lane = threadIdx.x % 32, matrix = lane / 8;
    const u32 line = (matrix % 2 * 8 + lane % 8) * BOX * 2, chunk = (lane % 8 ^ matrix / 2) * 16;
#pragma unroll
    for (int box = 0; box < COLUMNS / BOX; ++box) {
        const u32 target = boxes + turn * BOX_BYTES;
        turn ^= 1;
        if (lane == 0) wait_for_takes<BOXES - 1>();
        __syncwarp();
#pragma unroll
        for (int pair = 0; pair < BOX / 16; ++pair) {
            u32 word[4];
#pragma unroll
            for (int group = 0; group < 2; ++group) {
                const int begin = box * BOX / 8 + pair * 2 + group;
                float offset[4];
                read_bias(offset, bias, N, corner.column + begin * 8 + lane % 4 * 2);
                word[group * 2] = finished(sum, offset, begin * 4);
                word[group * 2 + 1] = finished(sum, offset, begin * 4 + 2);
            }
            store_matrices(target + line + (chunk ^ pair * 32), word);
        }
        show_to_copies();
        __syncwarp();
        if (lane == 0) {
            if (EPILOGUE == ADD) {
                take_and_add(out, corner.column + box * BOX, corner.row, target);
            } else {
                take(out, corner.column + box * BOX, corner.row, target);
            }
            close_group_of_takes();
        }
    }
}

extern "C" __global__ void __launch_bounds__(WORKERS + 32)
    many_rows(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,
              const __grid_constant__ TensorMap out, const u16* bias, int T, int N, int height, int steps) {
    const int warp = threadIdx.x / 32, band = warp / 4;
    const u32 base = shared_address(), boxes = base + STAGES * STAGE_BYTES;
    const u32 barriers = boxes + WORKERS / 32 * BOXES * BOX_BYTES;
    const Ring ring = {base, barriers, barriers + STAGES * 8};
    const int rows = (T + CLUSTER * LINES - 1) / (CLUSTER * LINES), columns = (N + COLUMNS - 1) / COLUMNS;
    const int first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER, rank = blockIdx.x % CLUSTER;
    const Work work = {rows, columns, height, steps, first, stride, rank};

    let_next_kernel_start();
    if (threadIdx.x == WORKERS) {
        prefetch(weight), prefetch(x), prefetch(out);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(ring.full + i * 8, 1);
            barrier_init(ring.empty + i * 8, CLUSTER * WORKERS / 32);
        }
        show_barriers();
    }
    cluster_barrier();
    if (warp == WORKERS / 32) {
        if (threadIdx.x == WORKERS) produce(ring, weight, x, work, T, N);
        __syncwarp();
    } else {
        int slot = 0;
        u32 phase = 0, turn = 0;
        wait_for_previous_kernel();
        if (band == 1 && LEAD > 0 && LEAD < steps) barrier_wait(ring.full + LEAD * 8, 0);
        for (int tile = first; tile < rows * columns; tile += stride) {
            float sum[ROWS / 2];
            consume(sum, ring, steps, band, slot, phase);
            Corner corner = corner_of(work, tile);
            corner.row += warp * 16;
            finish(sum, boxes + warp * BOXES * BOX_BYTES, turn, out, bias, N, corner);
        }
        if (threadIdx.x % 32 == 0) wait_for_takes<0>();
    }
    // None leaves while the other may still bring something here.
    cluster_barrier();
}
