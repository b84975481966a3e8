// Product of few rows with a weight matrix, for Hopper (sm_90a): out [T, N] = x [T, K] @ weight [N, K].T + bias, in
// bfloat16, sums of float32. ADD: out += that. GATED: weight is [2N, K], and out = f(gate) * up.
//
// A tile is ROWS rows of the weight for TOKENS rows of x, one of `spans` of them. The rows of the weight are M of wgmma, 64 for
// each of GROUPS groups of four warps (what the last one has beyond ROWS is not written), and the rows of x are N: of these no
// more are multiplied than there are, in steps of 16. The PARTS programs of a cluster share a tile: each sums a part of K, and
// each finishes a slice of the rows of x, from parts that the others put into its shared memory, added in one order.
//
// Two warps bring stages of DEPTH columns into a ring of shared memory, one of them the weight and one x: a stage passes in
// some hundred cycles, in which one thread that waits, counts and brings both is late. The weight does not depend on the
// kernel before: its ring is filled before `griddepcontrol.wait`. Of a gate eight rows alternate with eight of the up
// projection, so that a thread has both numbers of an element of out. What copies read outside of a matrix is zero, so K and N
// need not be multiples of a tile.
//
// Comes after `chip.cuh`, `hopper.cuh` and `epilogue.cuh`. Defined at compilation: GROUPS, ROWS, TOKENS, PARTS, STAGES, TRADE,
// LATE (a stage is given back when the next one is being multiplied, not before), EPILOGUE, KIND, BIAS, and the function
// `multiply`, one wgmma of 64 x TOKENS x 16.

constexpr int DEPTH = 64;  // columns of K in a stage: 128 bytes, the span of the swizzle
constexpr int LINES = GROUPS * 64, WORKERS = GROUPS * 128;
constexpr int COLUMNS = EPILOGUE == GATED ? ROWS / 2 : ROWS;  // of out in a tile
constexpr int EIGHTS = TOKENS / 8, SLICE = EIGHTS / PARTS;    // of rows of x; that one program finishes
constexpr int W_BYTES = LINES * DEPTH * 2, STAGE_BYTES = W_BYTES + TOKENS * DEPTH * 2;
constexpr int GIVEN_BYTES = (PARTS - 1) * SLICE * WORKERS * 16;
// Where sums take more registers than all threads can have, the warps that bring give theirs to those that multiply.
constexpr int BRINGERS = TRADE ? 128 : 64;
static_assert(ROWS % 16 == 0 && ROWS > LINES - 64 && ROWS <= LINES, "a tile is of whole pairs of eights");
static_assert(STAGES > LATE, "a stage is held while the next one is multiplied");
static_assert(SLICE * 8 * PARTS == TOKENS && TOKENS <= 256, "a slice is of whole groups of eight rows");

struct Ring {
    u32 memory, full, empty;
};

// The stages of one program: of `tiles` tiles, `spans` of them for the same rows of the weight, those from `first` on,
// `stride` apart, each over `count` stages of K from `begin`.
struct Work {
    int first, stride, tiles, spans, begin, count;
};

// Call `stage` with the place in the ring, the step and the tile of each stage, in order.
template <typename Function>
__device__ __forceinline__ void for_stages(const Work& work, const Function& stage) {
    int index = 0, slot = 0, phase = 1;
    for (int tile = work.first; tile < work.tiles; tile += work.stride) {
        for (int step = 0; step < work.count; ++step, ++index) {
            stage(index, slot, phase, tile, step);
            if (++slot == STAGES) slot = 0, phase ^= 1;
        }
    }
}

// Bring the weight of all stages, each as soon as its place is free.
__device__ __forceinline__ void bring_weight(const Ring& ring, const TensorMap& weight, const Work& work, int x_rows) {
    const u64 once = read_once();
    int row = 0;
    for_stages(work, [&](int index, int slot, int phase, int tile, int step) {
        if (step == 0) row = tile / work.spans * COLUMNS;
        if (index >= STAGES) barrier_wait(ring.empty + slot * 8, phase);
        const u32 barrier = ring.full + slot * 8, target = ring.memory + slot * STAGE_BYTES;
        const int column = (work.begin + step) * DEPTH;
        barrier_expect(barrier, (ROWS + x_rows) * DEPTH * 2);
        if (EPILOGUE == GATED) {
            bring_pairs(target, weight, column, row / 8, barrier, once);
        } else {
            bring(target, weight, column, row, barrier, once);
        }
    });
}

// The same of x, which is there once the kernel before has ended.
__device__ __forceinline__ void bring_x(const Ring& ring, const TensorMap& x, const Work& work) {
    const u64 again = read_again();
    int row = 0;
    prefetch(x);
    wait_for_previous_kernel();
    for_stages(work, [&](int index, int slot, int phase, int tile, int step) {
        if (step == 0) row = tile % work.spans * TOKENS;
        if (index >= STAGES) barrier_wait(ring.empty + slot * 8, phase);
        const u32 target = ring.memory + slot * STAGE_BYTES + W_BYTES;
        bring(target, x, (work.begin + step) * DEPTH, row, ring.full + slot * 8, again);
    });
}

// Multiply `count` stages from `slot` on, and sum.
__device__ __forceinline__ void consume(float (&sum)[TOKENS / 2], const Ring& ring, int count, int& slot, u32& phase) {
    const bool speaker = threadIdx.x % 32 == 0;
    const u32 part = threadIdx.x / 128 * 64 * DEPTH * 2;
    int last = 0;
    for (int index = 0; index < count; ++index) {
        barrier_wait(ring.full + slot * 8, phase);
        const u32 memory = ring.memory + slot * STAGE_BYTES;
        const u64 a = descriptor(memory + part), b = descriptor(memory + W_BYTES);
        begin_multiplying();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; ++k) multiply(sum, a + k * 2, b + k * 2, index > 0 || k > 0);
        close_group_of_products();
        wait_for_groups_of_products<LATE>();
        if (speaker && (!LATE || index > 0)) barrier_arrive(ring.empty + (LATE ? last : slot) * 8);
        last = slot;
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
    if (LATE) {
        wait_for_groups_of_products<0>();
        if (speaker && count > 0) barrier_arrive(ring.empty + last * 8);
    }
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) {
        settle(sum[i]);
        if (count == 0) sum[i] = 0;
    }
}

// Give each other program of the cluster its slice of the sums, and move this one's slice to the front.
__device__ __forceinline__ void scatter(float (&sum)[TOKENS / 2], u32 given, u32 barrier, int rank) {
#pragma unroll
    for (int other = 0; other < PARTS; ++other) {
        if (other == rank) continue;
        const int place = rank < other ? rank : rank - 1;
        const u32 target = shared_address_of(other, given + (place * SLICE * WORKERS + threadIdx.x) * 16);
        const u32 counted = shared_address_of(other, barrier);
#pragma unroll
        for (int eight = 0; eight < SLICE; ++eight) {
            give(target + eight * WORKERS * 16, sum + (other * SLICE + eight) * 4, counted);
        }
    }
#pragma unroll
    for (int other = 1; other < PARTS; ++other) {
#pragma unroll
        for (int i = 0; i < SLICE * 4; ++i) sum[i] = other == rank ? sum[other * SLICE * 4 + i] : sum[i];
    }
}

// Add what the others have given to the slice in front.
__device__ __forceinline__ void add_parts(float (&sum)[TOKENS / 2], u32 given) {
#pragma unroll
    for (int place = 0; place < PARTS - 1; ++place) {
#pragma unroll
        for (int eight = 0; eight < SLICE; ++eight) {
            add_from_shared(sum + eight * 4, given + ((place * SLICE + eight) * WORKERS + threadIdx.x) * 16);
        }
    }
}

// Two rows of x of one column of out, from two columns of one row; and back.
__device__ __forceinline__ u32 residual_of(const void* out, int T, int N, int end, int token, int column) {
    const bool inside = token < T && column < end;
    return transposed(inside ? *(const u32*)((const u16*)out + (u64)token * N + column) : 0);
}

__device__ __forceinline__ void write(void* out, int T, int N, int end, int token, int column, float first, float second) {
    const u32 both = transposed(narrowed(first, second));
    if (token < T && column < end) *(u32*)((u16*)out + (u64)token * N + column) = both;
}

// Write eight rows of x: `value` has two of them of the thread's first row of the weight, and two of its second.
__device__ __forceinline__ void finish(
    float (&value)[4], const u32 (&residual)[2], const float (&offset)[2], void* out, int T, int N, int end, int token,
    int column) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (BIAS) value[i] += offset[i / 2];
        if (EPILOGUE == ADD) value[i] += widened(residual[i / 2] >> i % 2 * 16);
    }
    if (EPILOGUE == GATED) {
        write(out, T, N, end, token, column, activated(value[0]) * value[2], activated(value[1]) * value[3]);
    } else {
        write(out, T, N, end, token, column, value[0], value[1]);
        write(out, T, N, end, token, column + 8, value[2], value[3]);
    }
}

extern "C" __global__ void __launch_bounds__(WORKERS + BRINGERS)
    few_rows(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, void* out, const u16* bias, int T,
             int N, int stages, int tiles, int spans, int x_rows) {
    const int rank = blockIdx.x % PARTS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 base = shared_address(), given = base + STAGES * STAGE_BYTES, barriers = given + GIVEN_BYTES;
    const Ring ring = {base, barriers, barriers + STAGES * 8};
    const u32 all_given = barriers + 2 * STAGES * 8;
    const int share = (stages + PARTS - 1) / PARTS, begin = rank * share;
    const int first = blockIdx.x / PARTS, stride = gridDim.x / PARTS;
    const Work work = {first, stride, tiles, spans, begin, max(0, min(share, stages - begin))};

    let_next_kernel_start();
    if (TRADE && warp >= WORKERS / 32) keep_registers<24>();
    if (warp == WORKERS / 32) {
        // The weight is on its way before the others know of the barriers.
        if (lane == 0) {
            for (int i = 0; i < STAGES; ++i) {
                barrier_init(ring.full + i * 8, 1);
                barrier_init(ring.empty + i * 8, WORKERS / 32);
            }
            barrier_init(all_given, 1);
            show_barriers();
            barrier_expect(all_given, GIVEN_BYTES);
        }
        __syncwarp();
        announce<WORKERS + BRINGERS>();
        if (PARTS > 1) arrive_in_cluster();
        if (lane == 0) bring_weight(ring, weight, work, x_rows);
        return;
    }
    if (PARTS > 1) arrive_in_cluster();
    await<WORKERS + BRINGERS>();
    if (warp > WORKERS / 32) {
        if (threadIdx.x == WORKERS + 32) bring_x(ring, x, work);
        return;
    }
    if (TRADE) take_registers<160>();
    wait_for_previous_kernel();
    int slot = 0;
    u32 phase = 0;
    for (int tile = first; tile < tiles; tile += stride) {
        const int edge = tile / spans * COLUMNS, end = min(N, edge + COLUMNS);
        const int corner = edge + warp * (EPILOGUE == GATED ? 8 : 16);
        const int column = corner + lane % 4 * 2, token = tile % spans * TOKENS + rank * SLICE * 8 + lane / 4;
        float sum[TOKENS / 2], offset[2] = {};
        consume(sum, ring, work.count, slot, phase);
        if (BIAS && corner + lane / 4 < end) {
            const int own = corner + lane / 4, other = EPILOGUE == GATED ? N + own : own + 8;
            offset[0] = widened(bias[own]);
            if (EPILOGUE == GATED || other < end) offset[1] = widened(bias[other]);
        }
        u32 residual[SLICE][2];
        auto read_residual = [&](int eight) {
            for (int i = 0; i < 2; ++i) residual[eight][i] = residual_of(out, T, N, end, token + eight * 8, column + i * 8);
        };
        if constexpr (PARTS > 1) {
            // A cluster has one tile.
            wait_in_cluster();
            scatter(sum, given, all_given, rank);
#pragma unroll
            for (int eight = 0; eight < SLICE; ++eight) {
                if (EPILOGUE == ADD) read_residual(eight);
            }
            barrier_wait(all_given, 0);
            add_parts(sum, given);
        }
#pragma unroll
        for (int eight = 0; eight < SLICE; ++eight) {
            if (PARTS == 1 && EPILOGUE == ADD) read_residual(eight);
            float(&value)[4] = *(float(*)[4])(sum + eight * 4);
            finish(value, residual[eight], offset, out, T, N, end, token + eight * 8, column);
        }
    }
}
