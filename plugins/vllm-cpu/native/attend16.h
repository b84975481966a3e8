// Attention of a tile of bfloat16 queries by the tiles of AMX: attend.h's spans and chunks, with products of bfloat16. Keys,
// values and weights are rounded to it; scores and sums are float.
#ifndef VLLM_CPU_ATTEND16_H
#define VLLM_CPU_ATTEND16_H

#include "attend.h"
#include "tiles.h"

VLLM_VARIANT_BEGIN

// Fewer rows of a tile than this are faster by attend.h, which makes no panels.
constexpr int64_t LEAST_ROWS16 = 8;
constexpr int64_t TILE_ROWS16 = 128;  // queries times query heads of a KV head: what pays for a chunk's panels

#if defined(VLLM_AVX512) && defined(VLLM_AMX)
#define VLLM_TILES16

// Numbers of bfloat16 that a tile's memory takes: a chunk's keys [CHUNK / 16, D / 32, 16 keys, 32 of D] and values
// [D / 16, CHUNK / 32, 16 of D, 32 keys], queries [rows / 16, D / 32, 16 pairs of D, 16 rows, 2] and, as floats, sums
// [rows / 16, D, 16 rows].
static inline int64_t panels16(int64_t rows, int64_t size) { return 2 * CHUNK * size + 3 * rows * size; }

// Pairs of both vectors' numbers, rounded.
VLLM_TARGET("avx512bf16") static inline void store_words(vf even, vf odd, uint16_t *to) {
    const __m512i places = _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                                             0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(places, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even))));
}

constexpr int64_t NUMBERS16 = TILE_SIDE * 32;  // of a tile of factors

static inline void turn16(uint16_t *tiles, int64_t count) {
    for (int64_t i = 0; i < count; ++i) turn_tile(reinterpret_cast<float *>(tiles + i * NUMBERS16));
}

template <class E>
VLLM_TARGET("avx512bf16") static void make_panels(const Chunk<E> &chunk, int from, int to, int64_t size, uint16_t *keys,
                                                  uint16_t *values) {
    const int first = from / VF, end = (to + VF - 1) / VF;
    for (int g = first; g < end; ++g)
        for (int64_t i = 0; i < size; i += 2) {
            const typename E::T *row = chunk.keys[g] + i * chunk.stride;
            store_words(E::load(row), E::load(row + chunk.stride), keys + (g * (size / 32) + i / 32) * NUMBERS16 + i % 32 * 16);
        }
    turn16(keys + first * size * TILE_SIDE, (end - first) * size / 32);
    for (int t = 0; t < CHUNK; t += 2) {
        // Slots outside of the span may hold anything, and zero times that is not always zero.
        const bool even = t >= from && t < to, odd = t + 1 >= from && t + 1 < to;
        for (int64_t i = 0; i < size; i += VF)
            store_words(even ? E::load(chunk.values[t] + i) : vf_zero(), odd ? E::load(chunk.values[t + 1] + i) : vf_zero(),
                        values + (i / VF * (CHUNK / 32) + t / 32) * NUMBERS16 + t % 32 * 16);
    }
    turn16(values, size / VF * (CHUNK / 32));
}

// Queries [rows, size] to tiles; rows that are not there are whatever they were.
static void turn_queries(const uint16_t *q, int64_t rows, int64_t size, uint16_t *to) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < size; i += 32)
            memcpy(to + (r / TILE_SIDE * (size / 32) + i / 32) * NUMBERS16 + r % TILE_SIDE * 32, q + r * size + i, 64);
    turn16(to, (rows + TILE_SIDE - 1) / TILE_SIDE * size / 32);
}

// scores [CHUNK, 16 rows] = keys times the queries of 16 rows.
VLLM_TARGET("amx-tile,amx-bf16") static void scores16(const uint16_t *keys, const uint16_t *q, int64_t size, float *scores) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const int64_t step = size * TILE_SIDE;
    for (int64_t i = 0; i < step; i += NUMBERS16, keys += NUMBERS16) {
        _tile_loadd(6, q + i, 64);
        _tile_loadd(4, keys, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, keys + step, 64);
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(4, keys + 2 * step, 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(5, keys + 3 * step, 64);
        _tile_dpbf16ps(3, 5, 6);
    }
    _tile_stored(0, scores, 64);
    _tile_stored(1, scores + 16 * VF, 64);
    _tile_stored(2, scores + 32 * VF, 64);
    _tile_stored(3, scores + 48 * VF, 64);
}

// value [size, 16 rows] += values times weights [CHUNK / 2, 16 rows, 2].
VLLM_TARGET("amx-tile,amx-bf16") static void values16(const uint16_t *values, const uint16_t *weights, int64_t size,
                                                      float *value) {
    _tile_loadd(6, weights, 64);
    _tile_loadd(7, weights + NUMBERS16, 64);
    for (int64_t i = 0; i < size; i += 32, values += 4 * NUMBERS16, value += 32 * VF) {
        _tile_loadd(0, value, 64);
        _tile_loadd(1, value + 16 * VF, 64);
        _tile_loadd(4, values, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, values + 2 * NUMBERS16, 64);
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(4, values + NUMBERS16, 64);
        _tile_dpbf16ps(0, 4, 7);
        _tile_loadd(5, values + 3 * NUMBERS16, 64);
        _tile_dpbf16ps(1, 5, 7);
        _tile_stored(0, value, 64);
        _tile_stored(1, value + 16 * VF, 64);
    }
}

// 2^x for x of at most 0; never less than 2^-126. Its error, 3e-6 of the number, is far below the rounding to bfloat16.
static inline vf power_of_two(vf x) {
    const vf magic = vf_set(12582912.0f);  // as in vf_exp
    x = vf_max(vf_set(-126.0f), x);
    const vf t = vf_add(x, magic), r = vf_sub(x, vf_sub(t, magic));
    vf p = vf_set(1.33335581e-3f);  // ln(2)^n / n!
    p = vf_fma(p, r, vf_set(9.61812911e-3f));
    p = vf_fma(p, r, vf_set(5.55041087e-2f));
    p = vf_fma(p, r, vf_set(2.40226507e-1f));
    p = vf_fma(p, r, vf_set(6.93147181e-1f));
    p = vf_fma(p, r, vf_set(1.0f));
    return vf_of(vi_of(p) + (vi_of(t) << 23));
}

// Which keys sixteen rows of a tile from `row` on may see: lanes are rows, and those that are not there may hold anything.
struct Sight {
    vi first, last;
    bool whole, any;  // whether each row sees all of the chunk; whether some row sees some of it
    Sight(const Tile &tile, int64_t row, int64_t at, int from, int to) {
        const int64_t end = smaller(row + VF, tile.rows) - 1;
        // Rows come in the order of their positions.
        whole = from == 0 && to == CHUNK && tile.first[end] <= at && tile.last[row] >= at + CHUNK - 1;
        any = tile.first[row] < at + to && tile.last[end] >= at + from;
        first = vi_set(0), last = vi_set(CHUNK - 1);
        for (int i = 0; !whole && any && i <= end - row; ++i) {
            first[i] = static_cast<int32_t>(larger(from, smaller(tile.first[row + i] - at, CHUNK)));
            last[i] = static_cast<int32_t>(smaller(to - 1, larger(tile.last[row + i] - at, -1)));
        }
    }
    vi of(int t) const { return vi((first <= vi_set(t)) & (last >= vi_set(t))); }
};

// Scores [CHUNK, 16 rows] to weights in bfloat16, [CHUNK / 2, 16 rows, 2]; what the rows' sums hold, of which value is
// [size, 16 rows], is brought along.
VLLM_TARGET("avx512bf16") static void weigh16(const Sight &sight, float scale, float cap, float *scores, uint16_t *weights,
                                              const Sums &sums, int64_t size) {
    const vf before = vf_load(sums.most), finest = vf_set(-3.4e38f);
    vf top = before;
    for (int t = 0; t < CHUNK; ++t) {
        vf s = vf_mul(vf_load(scores + t * VF), vf_set(scale));
        if (cap > 0.0f) s = vf_mul(vf_set(cap), vf_tanh(vf_div(s, vf_set(cap))));
        if (!sight.whole) s = vf_select(sight.of(t), s, vf_set(-INFINITY));
        vf_store(scores + t * VF, s);
        top = vf_max(top, s);
    }
    constexpr float LOG2_E = 1.44269504088896341f;
    // Rows that have seen nothing yet take any finite number.
    const vf shift = vf_max(top, finest), factor = vf_exp(vf_sub(before, shift)), less = vf_mul(shift, vf_set(-LOG2_E));
    vf total[2] = {vf_zero(), vf_zero()};
    for (int t = 0; t < CHUNK; t += 2) {
        vf p[2];
        for (int i = 0; i < 2; ++i) {
            p[i] = power_of_two(vf_fma(vf_load(scores + (t + i) * VF), vf_set(LOG2_E), less));
            if (!sight.whole) p[i] = vf_of(vi_of(p[i]) & sight.of(t + i));
            total[i] = vf_add(total[i], p[i]);
        }
        store_words(p[0], p[1], weights + t * VF);
    }
    vf_store(sums.weight, vf_fma(vf_load(sums.weight), factor, vf_add(total[0], total[1])));
    vf_store(sums.most, top);
    if (vf_sum(vf_of(vi_of(vf_set(1.0f)) & vi(before != top))) == 0.0f) return;
    for (int64_t i = 0; i < size; ++i) vf_store(sums.value + i * VF, vf_mul(vf_load(sums.value + i * VF), factor));
}

VLLM_TARGET("amx-tile") static void begin_tiles16() {
    const TileConfig config(64);
    _tile_loadconfig(config.written());
}

VLLM_TARGET("amx-tile") static void end_tiles16() { _tile_release(); }

// attend_span for queries [rows, D] of bfloat16 at `q`, D a multiple of 32. There is memory for rows up to a multiple of 16, and
// `panels` has room for panels16 numbers.
//
// Products are taken the other way round, keys times queries and values times weights: lanes are rows of the tile then, and
// nothing is summed across lanes.
template <class E, class Fetch>
static void attend_span16(const Tile &tile, const uint16_t *q, float scale, int64_t begin, int64_t end, const Sums &sums,
                          const Fetch &fetch, Chunk<E> &chunk, uint16_t *panels) {
    const int64_t groups = (tile.rows + TILE_SIDE - 1) / TILE_SIDE, size = tile.size, step = size * TILE_SIDE;
    uint16_t *keys = panels, *values = keys + CHUNK * size, *queries = values + CHUNK * size;
    float *value = reinterpret_cast<float *>(queries + groups * step);
    alignas(64) float scores[CHUNK * VF];
    alignas(64) uint16_t weights[CHUNK * VF];
    turn_queries(q, tile.rows, size, queries);
    memset(value, 0, static_cast<size_t>(groups * step) * 4);
    for (int64_t r = 0; r < groups * TILE_SIDE; ++r) sums.most[r] = -INFINITY, sums.weight[r] = 0.0f;
    begin_tiles16();
    for (int64_t at = begin / CHUNK * CHUNK; at < end; at += CHUNK) {
        const int from = static_cast<int>(larger(begin - at, 0)), to = static_cast<int>(smaller(end - at, CHUNK));
        fetch(at, from, to, chunk);
        make_panels<E>(chunk, from, to, size, keys, values);
        for (int64_t g = 0; g < groups; ++g) {
            const Sight sight(tile, g * TILE_SIDE, at, from, to);
            if (!sight.any) continue;
            const Sums own{sums.most + g * TILE_SIDE, sums.weight + g * TILE_SIDE, value + g * step};
            scores16(keys, queries + g * step, size, scores);
            weigh16(sight, scale, tile.cap, scores, weights, own, size);
            values16(values, weights, size, own.value);
        }
    }
    end_tiles16();
    for (int64_t g = 0; g < groups; ++g)
        for (int64_t i = 0; i < size; i += VF) {
            float *part = value + g * step + i * TILE_SIDE;
            turn_tile(part);
            for (int64_t m = 0; m < TILE_SIDE && g * TILE_SIDE + m < tile.rows; ++m)
                vf_store(sums.value + (g * TILE_SIDE + m) * tile.width + i, vf_load(part + m * VF));
        }
}

#endif

VLLM_VARIANT_END

#endif
