// All layers of a dense decoder for one token of each of a few rows, in one launch. Comes after `flat_attend.cuh`.
//
// A program of each multiprocessor owns rows of every weight. Some of its warps bring them, layer after layer, through a ring
// of stages in shared memory: what comes next never depends on what is computed, so weights are on their way while the others wait
// for one another. Programs hand on what they compute through the L2 cache, in words that carry the number of their phase.
// A buffer is written again one layer later, when every program has told what depends on its having read it.
// All programs must run at once: the launch is cooperative.

__device__ __forceinline__ float activated(float gate, float up) {
    return gate / (1.0f + power_of_2(-1.4426950408889634f * gate)) * up;
}

__device__ __forceinline__ void bring_layers() {
    const Span qkv = mine(NQKV, 1), out = mine(H, 1), pairs = mine(INNER, 2);
    const u64 policy = read_once();
    u32 stage = 0;
    for (int index = 0; index < LAYERS; ++index) {
        const Layer& layer = rest().layers[index];
        bring_rows<H, false>(layer.qkv, qkv, stage, policy);
        bring_rows<NQ, false>(layer.out, out, stage, policy);
        bring_rows<H, true>(layer.gate_up, pairs, stage, policy);
        bring_rows<INNER, false>(layer.down, out, stage, policy);
    }
}

// Rows of the residual stream that this program owns, with what a product adds, told; of the last layer they are the result.
template <int COLUMNS>
__device__ __forceinline__ void add_to_own(Span rows, u64* told, u32 epoch, int count, u16* result) {
    for (int index = threadIdx.x; index < OWN * count; index += THREADS) {
        const int row = index % OWN, token = index / OWN, place = token * H + rows.first + row;
        if (row >= rows.count) continue;
        float& own = rest().own[token * OWN + row];
        own += summed<COLUMNS>(row / TILE, row % TILE, token);
        if (result != nullptr) {
            result[place] = (u16)narrowed(own, 0.0f);
        } else {
            tell(told + place, __float_as_uint(own), epoch);
        }
    }
}

__device__ __forceinline__ void compute_layers(const Given& given) {
    const Span qkv = mine(NQKV, 1), out = mine(H, 1), pairs = mine(INNER, 2);
    const u32 before = *(volatile u32*)given.epoch;
    const Piece piece = piece_of(given);
    const int count = given.count;
    u32 stage = 0;
    for (int index = threadIdx.x; index < OWN * count; index += THREADS) {
        const int row = index % OWN, token = index / OWN;
        if (row < out.count) rest().own[index] = widened(given.residual[token * H + out.first + row]);
    }
    for (int index = 0; index < LAYERS; ++index) {
        const Layer& layer = rest().layers[index];
        const u32 epoch = before + index + 1;
        {
            const Norm norm(layer.input_norm);
            Product<H> product(tiles_of(qkv.count), stage);
            if (index == 0) {
                norm.of_numbers(given.residual, count);
            } else {
                norm.of_told(given.out, epoch - 1, count);
            }
            product.run();
            for (int i = threadIdx.x; i < share(NQKV) * count; i += THREADS) {
                const int row = i % share(NQKV), token = i / share(NQKV);
                if (row >= qkv.count) continue;
                const float value = summed<H>(row / TILE, row % TILE, token) * inverse_root(token, given.eps);
                tell(given.qkv + (token * NQKV + qkv.first + row), __float_as_uint(value), epoch);
            }
        }
        if (piece.here) attend_piece(given, layer, piece, epoch);
        {
            Product<NQ> product(tiles_of(out.count), stage);
            put_told<NQ>(given.attended, epoch, count);
            product.run();
            add_to_own<NQ>(out, given.middle, epoch, count, nullptr);
        }
        {
            const Norm norm(layer.mlp_norm);
            Product<H> product(tiles_of(2 * pairs.count), stage);
            norm.of_told(given.middle, epoch, count);
            product.run();
            // Neighbours of a warp have neighbouring features, which are told together.
            constexpr int SPACE = 2 * share(INNER / 2);
            for (int from = 0; from < SPACE * count; from += THREADS) {
                const int i = from + threadIdx.x, feature = i % SPACE, token = i / SPACE;
                const bool here = feature < pairs.count && token < count;
                float value = 0;
                if (here) {
                    const float root = inverse_root(token, given.eps);
                    const int tile = feature / 4, row = feature % 4;
                    const float gate = summed<H>(tile, row, token), up = summed<H>(tile, row + 4, token);
                    value = activated(gate * root, up * root);
                }
                const float next = __shfl_down_sync(~0u, value, 1);
                if (here && feature % 2 == 0) {
                    tell(given.inner + (token * INNER + pairs.first + feature) / 2, narrowed(value, next), epoch);
                }
            }
        }
        {
            Product<INNER> product(tiles_of(out.count), stage);
            put_told<INNER>(given.inner, epoch, count);
            product.run();
            add_to_own<INNER>(out, given.out, epoch, count, index == LAYERS - 1 ? given.residual : nullptr);
        }
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *given.epoch = before + LAYERS;
}

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) flat(const __grid_constant__ Given given) {
    if (threadIdx.x < STAGES) barrier_init(full_barrier(threadIdx.x), 1), barrier_init(empty_barrier(threadIdx.x), 1);
    // Of warps that there are not, so that four are read at once.
    for (int i = threadIdx.x; i < ROWS * SUMS_OF_WARPS; i += ALL_THREADS) rest().squares[i] = 0;
    for (int i = threadIdx.x; i < LAYERS * (int)(sizeof(Layer) / sizeof(u64)); i += ALL_THREADS) {
        ((u64*)rest().layers)[i] = ((const u64*)given.layers)[i];
    }
    show_barriers();
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        bring_layers();
    } else {
        compute_layers(given);
    }
}
