// Attention of `flat.cu`: a program has one row, one KV head and a piece of the row's keys. Comes after `flat.cuh`.

constexpr int LANES = D / 8, AT_ONCE = 32 / LANES, BATCH = WARPS * AT_ONCE * DEEP, EACH = D / 32;

// `target`: where the new key goes, from the first block on; negative: nowhere. `begin`, `end`: its keys of the cache, and
// `places` those of this lane's first.
struct Piece {
    int row, head, index, pieces, begin, end;
    long long target, places[DEEP];
    bool here;
};

__device__ __forceinline__ int key_of_lane(int first, int i) {
    return first + (threadIdx.x / 32 * DEEP + i) * AT_ONCE + threadIdx.x % 32 / LANES;
}

// Where this lane's part of a key lies, from the first block on. Past the end it is the last one.
__device__ __forceinline__ long long place_of(const Given& given, const Piece& piece, int first, int i) {
    const int key = max(min(key_of_lane(first, i), piece.end - 1), 0);
    const long long block = given.block_table[piece.row * given.table_stride + key / TPB];
    return block * given.block_stride + (piece.head * TPB + key % TPB) * D + threadIdx.x % LANES * 8;
}

// The same pieces in every layer. A row has fewer where programs are fewer.
__device__ __forceinline__ Piece piece_of(const Given& given) {
    const int items = given.count * HK, item = blockIdx.x % items;
    Piece piece;
    piece.row = item / HK, piece.head = item % HK, piece.index = blockIdx.x / items;
    const int cached = given.seq_lens[piece.row] - 1, most = min(MOST_PIECES, max(1, GRID / items));
    piece.pieces = min(max((cached + SPAN - 1) / SPAN, 1), most);
    piece.here = piece.index < piece.pieces;
    piece.begin = (int)((long long)cached * piece.index / piece.pieces);
    piece.end = (int)((long long)cached * (piece.index + 1) / piece.pieces);
#pragma unroll
    for (int i = 0; i < DEEP; ++i) piece.places[i] = piece.here ? place_of(given, piece, piece.begin, i) : 0;
    const long long slot = given.slots[piece.row];
    piece.target = slot < 0 ? -1 : slot / TPB * given.block_stride + (piece.head * TPB + slot % TPB) * D;
    for (int i = threadIdx.x; i < D; i += THREADS) {
        rest().turn[i] = given.cos_sin[(long long)given.positions[piece.row] * D + i];
    }
    return piece;
}

struct Keys {
    uint4 k[DEEP] = {}, v[DEEP] = {};
};

__device__ __forceinline__ void load_keys(Keys& keys, const u16* blocks, const long long (&places)[DEEP]) {
#pragma unroll
    for (int i = 0; i < DEEP; ++i) {
        keys.k[i] = of_cache(blocks + places[i]), keys.v[i] = of_cache(blocks + places[i] + HK * TPB * D);
    }
}

__device__ __forceinline__ void unpacked(const uint4& words, float (&out)[8]) {
    const u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) out[2 * i] = widened(word[i] & 0xFFFF), out[2 * i + 1] = __uint_as_float(word[i] & 0xFFFF0000);
}

// Where a head's numbers of this thread begin: EACH neighbours a lane of a warp.
__device__ __forceinline__ int first_of_lane() { return threadIdx.x % 32 * EACH; }

__device__ __forceinline__ void norm_and_turn(float (&x)[EACH], const float (&norm)[EACH], float eps) {
    if (NORM) {
        float squares = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) squares += x[i] * x[i];
        const float root = rsqrtf(sum_of_warp(squares) / D + eps);
#pragma unroll
        for (int i = 0; i < EACH; ++i) x[i] *= root * norm[i];
    }
    const bool upper = threadIdx.x % 32 >= 16;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const float other = __shfl_xor_sync(~0u, x[i], 16);
        const int pair = first_of_lane() % (D / 2) + i;
        x[i] = x[i] * rest().turn[pair] + (upper ? other : -other) * rest().turn[D / 2 + pair];
    }
}

// Queries of the KV head, and the new key and value, which go to the cache, to `heads` [G + 2, D]; a warp each.
__device__ __forceinline__ void prepare_heads(const Given& given, const Layer& layer, const Piece& piece, u32 epoch) {
    static_assert(G + 2 <= WARPS, "a warp has one head");
    const int head = threadIdx.x / 32;
    if (head < (piece.index == piece.pieces - 1 ? G + 2 : G)) {
        float norm[EACH] = {}, x[EACH];
        const float* weights = head < G ? layer.q_norm : layer.k_norm;
#pragma unroll
        for (int i = 0; i < EACH; i += 2) {
            const float2 two = NORM ? two_of(weights + first_of_lane() + i) : make_float2(0, 0);
            norm[i] = two.x, norm[i + 1] = two.y;
        }
        const int column = head < G ? (piece.head * G + head) * D : NQ + (head == G ? 0 : NKV) + piece.head * D;
        const u64* told = given.qkv + (piece.row * NQKV + column + first_of_lane());
        Heard heard[EACH / 2];
        hear(heard, epoch, [=](int i) { return told + 2 * i; });
#pragma unroll
        for (int i = 0; i < EACH; ++i) x[i] = __uint_as_float(i % 2 ? heard[i / 2].second : heard[i / 2].first);
        if (head <= G) norm_and_turn(x, norm, given.eps);
        if (head >= G) {
            u16* target = layer.blocks + piece.target + first_of_lane() + (head > G ? HK * TPB * D : 0);
#pragma unroll
            for (int i = 0; i < EACH; i += 2) {
                const u32 both = narrowed(x[i], x[i + 1]);
                if (piece.target >= 0) *(u32*)(target + i) = both;
                x[i] = widened(both & 0xFFFF), x[i + 1] = __uint_as_float(both & 0xFFFF0000);
            }
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i) rest().heads[head * D + first_of_lane() + i] = head < G ? x[i] * given.scale : x[i];
    }
    barrier_of_workers();
}

struct State {
    float q[G][8], sum[G][8], most[G], total[G];
};

// This lane's numbers of a head.
__device__ __forceinline__ void load_eight(float (&x)[8], int head) {
    const float4* heads = (const float4*)&rest().heads[head * D + threadIdx.x % LANES * 8];
    const float4 a = heads[0], b = heads[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

// COUNT keys at once; `there` says which.
template <int COUNT>
__device__ __forceinline__ void attend(
    State& state, const float (&k)[COUNT][8], const float (&v)[COUNT][8], const bool (&there)[COUNT]) {
#pragma unroll
    for (int g = 0; g < G; ++g) {
        float score[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            score[i] = 0;
#pragma unroll
            for (int d = 0; d < 8; ++d) score[i] += state.q[g][d] * k[i][d];
        }
#pragma unroll
        for (int distance = LANES / 2; distance; distance /= 2) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) score[i] += __shfl_xor_sync(~0u, score[i], distance);
        }
        float most = state.most[g];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) most = there[i] ? fmaxf(most, score[i]) : most;
        const float kept = power_of_2(state.most[g] - most);
        state.total[g] *= kept;
#pragma unroll
        for (int d = 0; d < 8; ++d) state.sum[g][d] *= kept;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const float weight = there[i] ? power_of_2(score[i] - most) : 0.0f;
            state.total[g] += weight;
#pragma unroll
            for (int d = 0; d < 8; ++d) state.sum[g][d] += weight * v[i][d];
        }
        state.most[g] = most;
    }
}

// Lanes of other keys, then other warps: leaves `merged` [WARPS, G, D] with `most` and `total`.
__device__ __forceinline__ void merge_warp(State& state) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int g = 0; g < G; ++g) {
        float most = state.most[g];
#pragma unroll
        for (int distance = LANES; distance < 32; distance *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
        const float kept = power_of_2(state.most[g] - most);
        float total = state.total[g] * kept;
#pragma unroll
        for (int distance = LANES; distance < 32; distance *= 2) total += __shfl_xor_sync(~0u, total, distance);
        float sum[8];
#pragma unroll
        for (int d = 0; d < 8; ++d) {
            sum[d] = state.sum[g][d] * kept;
#pragma unroll
            for (int distance = LANES; distance < 32; distance *= 2) sum[d] += __shfl_xor_sync(~0u, sum[d], distance);
        }
        float4* merged = (float4*)&rest().merged[(warp * G + g) * D + lane % LANES * 8];
        if (lane < LANES) {
            merged[0] = make_float4(sum[0], sum[1], sum[2], sum[3]), merged[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
        }
        if (lane == 0) rest().most[warp * G + g] = most, rest().total[warp * G + g] = total;
    }
}

constexpr float LOWEST = -1e30f;

// float32 words of a piece: sums [G, D], then largest scores and totals in turns.
constexpr int PART = G * D + 2 * G;

__device__ __forceinline__ u64* part_of(const Given& given, const Piece& piece, int index) {
    return given.parts + ((long long)(piece.row * HK + piece.head) * MOST_PIECES + index) * PART;
}

__device__ __forceinline__ void tell_attended(
    const Given& given, const Piece& piece, int pair, float first, float second, u32 epoch) {
    tell(given.attended + (long long)piece.row * (NQ / 2) + piece.head * (G * D / 2) + pair, narrowed(first, second), epoch);
}

// What the warps have, summed: the row's heads where it is one piece, else a part of them.
__device__ __forceinline__ void finish_piece(const Given& given, const Piece& piece, u32 epoch) {
    for (int pair = threadIdx.x; pair < G * D / 2; pair += THREADS) {
        const int g = pair / (D / 2);
        float most = LOWEST;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) most = fmaxf(most, rest().most[warp * G + g]);
        float first = 0, second = 0, total = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            const float kept = power_of_2(rest().most[warp * G + g] - most);
            const float2 both = *(const float2*)&rest().merged[warp * G * D + 2 * pair];
            first += kept * both.x, second += kept * both.y, total += kept * rest().total[warp * G + g];
        }
        if (piece.pieces == 1) {
            tell_attended(given, piece, pair, first / total, second / total, epoch);
            continue;
        }
        u64* part = part_of(given, piece, piece.index);
        tell(part + 2 * pair, __float_as_uint(first), epoch);
        tell(part + 2 * pair + 1, __float_as_uint(second), epoch);
        if (pair % (D / 2) == 0) {
            tell(part + G * D + 2 * g, __float_as_uint(most), epoch);
            tell(part + G * D + 2 * g + 1, __float_as_uint(total), epoch);
        }
    }
}

// Each program of a row's head sums its share of the numbers over all pieces.
__device__ __forceinline__ void join_pieces(const Given& given, const Piece& piece, u32 epoch) {
    constexpr int PAIRS = G * D / 2;
    const int first = PAIRS * piece.index / piece.pieces, count = PAIRS * (piece.index + 1) / piece.pieces - first;
    float2* values = (float2*)rest().merged;
    barrier_of_workers();
    const int sums = count * piece.pieces;
    for (int index = threadIdx.x; index < sums + G * piece.pieces; index += THREADS) {
        const bool is_sum = index < sums;
        const int from = is_sum ? index / count : (index - sums) / G;
        const u64* part = part_of(given, piece, from) +
            (is_sum ? 2 * (first + index - from * count) : G * D + (index - sums) % G * 2);
        Heard heard[1];
        hear(heard, epoch, [=](int) { return part; });
        float2* target = is_sum ? values + index : (float2*)rest().statistics + (index - sums);
        *target = make_float2(__uint_as_float(heard[0].first), __uint_as_float(heard[0].second));
    }
    barrier_of_workers();
    for (int pair = threadIdx.x; pair < count; pair += THREADS) {
        const int g = (first + pair) / (D / 2);
        float most = LOWEST, total = 0, one = 0, other = 0;
        for (int index = 0; index < piece.pieces; ++index) most = fmaxf(most, rest().statistics[2 * (index * G + g)]);
        for (int index = 0; index < piece.pieces; ++index) {
            const float kept = power_of_2(rest().statistics[2 * (index * G + g)] - most);
            const float2 both = values[index * count + pair];
            total += kept * rest().statistics[2 * (index * G + g) + 1], one += kept * both.x, other += kept * both.y;
        }
        tell_attended(given, piece, first + pair, one / total, other / total, epoch);
    }
}

__device__ __forceinline__ void attend_piece(const Given& given, const Layer& layer, const Piece& piece, u32 epoch) {
    Keys keys;
    if (piece.begin < piece.end) load_keys(keys, layer.blocks, piece.places);
    prepare_heads(given, layer, piece, epoch);
    State state;
#pragma unroll
    for (int g = 0; g < G; ++g) {
        state.most[g] = LOWEST, state.total[g] = 0;
        load_eight(state.q[g], g);
#pragma unroll
        for (int d = 0; d < 8; ++d) state.sum[g][d] = 0;
    }
    for (int first = piece.begin; first < piece.end; first += BATCH) {
        const Keys now = keys;
        if (first + BATCH < piece.end) {
            long long places[DEEP];
#pragma unroll
            for (int i = 0; i < DEEP; ++i) places[i] = place_of(given, piece, first + BATCH, i);
            load_keys(keys, layer.blocks, places);
        }
#pragma unroll
        for (int i = 0; i < DEEP; i += 2) {
            float k[2][8], v[2][8];
            bool there[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                unpacked(now.k[i + j], k[j]), unpacked(now.v[i + j], v[j]);
                there[j] = key_of_lane(first, i + j) < piece.end;
            }
            attend<2>(state, k, v, there);
        }
    }
    // By the warp that has fewest of the others.
    if (piece.index == piece.pieces - 1 && threadIdx.x / 32 == WARPS - 1) {
        float k[1][8], v[1][8];
        const bool there[1] = {threadIdx.x % 32 < LANES};
        load_eight(k[0], G), load_eight(v[0], G + 1);
        attend<1>(state, k, v, there);
    }
    merge_warp(state);
    barrier_of_workers();
    finish_piece(given, piece, epoch);
    if (piece.pieces > 1) join_pieces(given, piece, epoch);
    barrier_of_workers();
}
