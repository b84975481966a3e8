// Attention of a tile of bfloat16 queries by the tiles of AMX: attend.h's spans and chunks, with products of bfloat16. Keys,
// values and weights are rounded to it; scores and sums are float.
#ifndef VLLM_CPU_ATTEND16_H
#define VLLM_CPU_ATTEND16_H

#include "attend.h"
#include "tiles.h"

VLLM_VARIANT_BEGIN

// Fewer rows of a tile than this are faster by attend.h, which makes no panels.
constexpr int64_t LEAST_ROWS16 = 8;
constexpr int64_t TILE_ROWS16 = 256;  // queries times query heads of a KV head: what pays for a span's panels

#if defined(VLLM_AVX512) && defined(VLLM_AMX)
#define VLLM_TILES16

constexpr int CHUNK16 = 2 * CHUNK;      // keys whose scores are made before they are weighed
constexpr int PAIR = 2 * TILE_SIDE;     // rows of a tile that are taken together, and keys of a tile of values
constexpr int64_t NUMBERS16 = TILE_SIDE * PAIR;  // of a tile of factors
static_assert(SPAN % CHUNK16 == 0, "spans begin with chunks");

// Numbers of bfloat16 that a span's panels take: keys [SPAN / 16, D / 32, 16 pairs of D, 16 keys, 2] and values
// [SPAN / 32, D / 16, 16 pairs of keys, 16 of D, 2].
static inline int64_t panels16(int64_t size) { return 2 * SPAN * size; }

// Pairs of both vectors' numbers, rounded.
VLLM_TARGET("avx512bf16") static inline void store_words(vf even, vf odd, uint16_t *to) {
    const __m512i places = _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                                             0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(places, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even))));
}

// Panels of a chunk's keys from .. to - 1; values of the other keys of their tiles are zero.
template <class E>
VLLM_TARGET("avx512bf16") static void make_panels(const Chunk<E> &chunk, int from, int to, int64_t size, uint16_t *keys,
                                                  uint16_t *values) {
    for (int g = from / VF; g < (to + VF - 1) / VF; ++g)
        for (int64_t i = 0; i < size; i += 2) {
            const typename E::T *row = chunk.keys[g] + i * chunk.stride;
            store_words(E::load(row), E::load(row + chunk.stride), keys + g * size * TILE_SIDE + i * TILE_SIDE);
        }
    for (int t = from / PAIR * PAIR; t < (to + PAIR - 1) / PAIR * PAIR; t += 2) {
        // Slots outside of the span may hold anything, and zero times that is not always zero.
        const bool even = t >= from && t < to, odd = t + 1 >= from && t + 1 < to;
        for (int64_t i = 0; i < size; i += VF)
            store_words(even ? E::load(chunk.values[t] + i) : vf_zero(), odd ? E::load(chunk.values[t + 1] + i) : vf_zero(),
                        values + t / PAIR * PAIR * size + i * PAIR + t % PAIR * TILE_SIDE);
    }
}

// scores [16 or 32 rows, CHUNK16] = queries [.., size] times keys of `tiles` tiles; an even number of them.
template <int GROUPS16>
VLLM_TARGET("amx-tile,amx-bf16") static void scores16(const uint16_t *q, const uint16_t *keys, int tiles, int64_t size,
                                                      float *scores) {
    const int64_t step = size * TILE_SIDE;
    for (int t = 0; t < tiles; t += 2, keys += 2 * step, scores += 2 * TILE_SIDE) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t i = 0; i < size; i += 32) {
            _tile_loadd(4, q + i, size * 2);
            _tile_loadd(6, keys + i * TILE_SIDE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, keys + step + i * TILE_SIDE, 64);
            _tile_dpbf16ps(1, 4, 7);
            if (GROUPS16 > 1) {
                _tile_loadd(5, q + step + i, size * 2);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, scores, CHUNK16 * 4);
        _tile_stored(1, scores + TILE_SIDE, CHUNK16 * 4);
        if (GROUPS16 > 1) {
            _tile_stored(2, scores + TILE_SIDE * CHUNK16, CHUNK16 * 4);
            _tile_stored(3, scores + TILE_SIDE * CHUNK16 + TILE_SIDE, CHUNK16 * 4);
        }
    }
}

// value [16 or 32 rows, size] = weights [.., CHUNK16] times values of the tiles of 32 keys from `begin` to `end`, added to what is
// there unless it is the first.
template <int GROUPS16>
VLLM_TARGET("amx-tile,amx-bf16") static void values16(const uint16_t *weights, const uint16_t *values, int begin, int end,
                                                      int64_t size, bool first, float *value) {
    const int64_t below = size * TILE_SIDE;
    for (int64_t i = 0; i < size; i += 32, value += 32) {
        if (first) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        } else {
            _tile_loadd(0, value, size * 4);
            _tile_loadd(1, value + TILE_SIDE, size * 4);
            if (GROUPS16 > 1) {
                _tile_loadd(2, value + below, size * 4);
                _tile_loadd(3, value + below + TILE_SIDE, size * 4);
            }
        }
        for (int t = begin; t < end; ++t) {
            const uint16_t *from = values + t * PAIR * size + i * PAIR;
            _tile_loadd(4, weights + t * PAIR, CHUNK16 * 2);
            _tile_loadd(6, from, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, from + NUMBERS16, 64);
            _tile_dpbf16ps(1, 4, 7);
            if (GROUPS16 > 1) {
                _tile_loadd(5, weights + TILE_SIDE * CHUNK16 + t * PAIR, CHUNK16 * 2);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, value, size * 4);
        _tile_stored(1, value + TILE_SIDE, size * 4);
        if (GROUPS16 > 1) {
            _tile_stored(2, value + below, size * 4);
            _tile_stored(3, value + below + TILE_SIDE, size * 4);
        }
    }
}

// Up to sixteen rows of a tile and the keys of a chunk that each may see: from first[r] to last[r], none where that is less.
struct Sight {
    int32_t count, first[TILE_SIDE], last[TILE_SIDE];
    Sight(const Tile &tile, int64_t row, int64_t at, int from, int to) {
        count = static_cast<int32_t>(smaller(TILE_SIDE, tile.rows - row));
        for (int r = 0; r < count; ++r) {
            first[r] = static_cast<int32_t>(larger(from, smaller(tile.first[row + r] - at, CHUNK16)));
            last[r] = static_cast<int32_t>(smaller(to - 1, larger(tile.last[row + r] - at, -1)));
        }
    }
    bool whole(int r, int end) const { return first[r] == 0 && last[r] >= end - 1; }
    // Of the sixteen keys from t on.
    vi of(int r, int t) const {
        const vi lanes = vi{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + vi_set(t);
        return vi((lanes >= vi_set(first[r])) & (lanes <= vi_set(last[r])));
    }
};

template <bool SUM>
static inline vf both(vf a, vf b) {
    return SUM ? vf_add(a, b) : vf_max(a, b);
}

// Lane i: the sum, or the largest, of vector i's numbers.
template <bool SUM>
static inline vf across(const vf *rows) {
    vf fours[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const vf *v = rows + 4 * i;
        const __m512d a = _mm512_castps_pd(both<SUM>(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1])));
        const __m512d b = _mm512_castps_pd(both<SUM>(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3])));
        fours[i] = both<SUM>(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    vf eights[2];
    for (int i = 0; i < 2; ++i)
        eights[i] = both<SUM>(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x44),
                              _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xee));
    return both<SUM>(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88), _mm512_shuffle_f32x4(eights[0], eights[1], 0xdd));
}

// Largest of a row's scores, by lanes.
template <int VECTORS>
static inline vf top16(const Sight &sight, int r, const float *row) {
    const bool whole = sight.whole(r, VECTORS * VF);
    vf top = vf_set(-INFINITY);
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
        vf s = vf_load(row + v * VF);
        if (!whole) s = vf_select(sight.of(r, v * VF), s, vf_set(-INFINITY));
        top = vf_max(top, s);
    }
    return top;
}

// Weights of a row, and their sum by lanes.
template <int VECTORS, bool WHOLE>
VLLM_TARGET("avx512bf16") static inline vf exponents16(const Sight &sight, int r, const float *row, vf times, vf less,
                                                         uint16_t *weights) {
    vf total[2] = {vf_zero(), vf_zero()};
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v += 2) {
        vf p[2];
        for (int i = 0; i < 2; ++i) {
            p[i] = vf_power_of_two(vf_fma(vf_load(row + (v + i) * VF), times, less));
            if (!WHOLE) p[i] = vf_of(vi_of(p[i]) & sight.of(r, (v + i) * VF));
            total[i] = vf_add(total[i], p[i]);
        }
        _mm512_storeu_si512(weights + v * VF, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(p[1], p[0])));
    }
    return vf_add(total[0], total[1]);
}

// Scores [rows, CHUNK16] of 32 * TILES keys to weights in bfloat16 of the same shape; the rows' sums, whose values are
// [rows, size], are brought along, unless they are the first.
template <int TILES>
VLLM_TARGET("avx512bf16") static void weigh16(const Sight &sight, float scale, float cap, float *scores, uint16_t *weights,
                                              const Sums &sums, int64_t size, bool fresh) {
    constexpr int VECTORS = 2 * TILES, END = VECTORS * VF;
    constexpr float LOG2_E = 1.44269504088896341f;
    // Scores are scaled with the exponent where that keeps their order.
    const bool later = cap <= 0.0f && scale > 0.0f;
    for (int r = 0; !later && r < sight.count; ++r)
        for (int v = 0; v < VECTORS; ++v) {
            float *at = scores + r * CHUNK16 + v * VF;
            vf s = vf_mul(vf_load(at), vf_set(scale));
            if (cap > 0.0f) s = vf_mul(vf_set(cap), vf_tanh(vf_div(s, vf_set(cap))));
            vf_store(at, s);
        }
    vf rows[TILE_SIDE];
    for (int r = 0; r < TILE_SIDE; ++r) rows[r] = vf_set(-INFINITY);
    for (int r = 0; r < sight.count; ++r) rows[r] = top16<VECTORS>(sight, r, scores + r * CHUNK16);
    const vf before = vf_load(sums.most), top = vf_max(before, vf_mul(across<false>(rows), vf_set(later ? scale : 1.0f)));
    // Rows that have seen nothing yet take any finite number.
    const vf shift = vf_max(top, vf_set(-3.4e38f)), factor = vf_exp(vf_sub(before, shift));
    alignas(64) float less[TILE_SIDE], factors[TILE_SIDE];
    vf_store(less, vf_mul(shift, vf_set(-LOG2_E)));
    vf_store(factors, factor);
    vf_store(sums.most, top);
    const vf times = vf_set(later ? scale * LOG2_E : LOG2_E);
    for (int r = 0; r < TILE_SIDE; ++r) rows[r] = vf_zero();
    for (int r = 0; r < sight.count; ++r) {
        const float *row = scores + r * CHUNK16;
        uint16_t *to = weights + r * CHUNK16;
        rows[r] = sight.whole(r, END) ? exponents16<VECTORS, true>(sight, r, row, times, vf_set(less[r]), to)
                                      : exponents16<VECTORS, false>(sight, r, row, times, vf_set(less[r]), to);
    }
    vf_store(sums.weight, vf_fma(vf_load(sums.weight), factor, across<true>(rows)));
    for (int r = 0; !fresh && r < sight.count; ++r)
        if (factors[r] != 1.0f) scale_row(sums.value + r * size, size, factors[r]);
}

static void weigh16(int tiles, const Sight &sight, float scale, float cap, float *scores, uint16_t *weights, const Sums &sums,
                    int64_t size, bool fresh) {
    switch (tiles) {
        case 1: return weigh16<1>(sight, scale, cap, scores, weights, sums, size, fresh);
        case 2: return weigh16<2>(sight, scale, cap, scores, weights, sums, size, fresh);
        case 3: return weigh16<3>(sight, scale, cap, scores, weights, sums, size, fresh);
        default: return weigh16<4>(sight, scale, cap, scores, weights, sums, size, fresh);
    }
}

VLLM_TARGET("amx-tile") static void begin_tiles16() {
    const TileConfig config(64);
    _tile_loadconfig(config.written());
}

VLLM_TARGET("amx-tile") static void end_tiles16() { _tile_release(); }

// Sixteen or 32 rows of a tile from `row` on, over the keys begin .. end - 1 of a span whose panels are there.
template <int GROUPS16>
static void attend_pair16(const Tile &tile, int64_t row, const uint16_t *q, float scale, int64_t begin, int64_t end,
                          const Sums &sums, const uint16_t *keys, const uint16_t *values) {
    const int64_t size = tile.size, base = begin / SPAN * SPAN, last_row = smaller(row + GROUPS16 * TILE_SIDE, tile.rows) - 1;
    alignas(64) float scores[GROUPS16 * TILE_SIDE * CHUNK16];
    alignas(64) uint16_t weights[GROUPS16 * TILE_SIDE * CHUNK16];
    for (int64_t r = 0; r < GROUPS16 * TILE_SIDE; ++r) sums.most[r] = -INFINITY, sums.weight[r] = 0.0f;
    bool fresh = true;
    // Rows come in the order of their positions.
    const int64_t low = larger(begin, tile.first[row]), high = smaller(end, tile.last[last_row] + 1);
    for (int64_t at = low / CHUNK16 * CHUNK16; at < high; at += CHUNK16) {
        const int from = static_cast<int>(larger(begin - at, 0)), to = static_cast<int>(smaller(end - at, CHUNK16));
        const int tiles = static_cast<int>((smaller(high - at, CHUNK16) + PAIR - 1) / PAIR);
        const int64_t before = (at - base) * size;
        scores16<GROUPS16>(q, keys + before, 2 * tiles, size, scores);
        for (int g = 0; g < GROUPS16; ++g) {
            const Sums own{sums.most + g * TILE_SIDE, sums.weight + g * TILE_SIDE, sums.value + g * TILE_SIDE * size};
            weigh16(tiles, Sight(tile, row + g * TILE_SIDE, at, from, to), scale, tile.cap, scores + g * TILE_SIDE * CHUNK16,
                    weights + g * TILE_SIDE * CHUNK16, own, size, fresh);
        }
        // Panels begin with the span's keys.
        values16<GROUPS16>(weights, values + before, static_cast<int>(larger(low - at, 0)) / PAIR, tiles, size, fresh, sums.value);
        fresh = false;
    }
    if (fresh) memset(sums.value, 0, static_cast<size_t>(GROUPS16 * TILE_SIDE * size) * 4);
}

// attend_span for queries [rows, D] of bfloat16, D a multiple of 32. There is memory for rows up to a multiple of 16, and
// `panels` has room for panels16 numbers.
template <class E, class Fetch>
static void attend_span16(const Tile &tile, float scale, int64_t begin, int64_t end, const Sums &sums, const Fetch &fetch,
                          Chunk<E> &chunk, uint16_t *panels) {
    const int64_t size = tile.size, base = begin / SPAN * SPAN;
    uint16_t *keys = panels, *values = keys + SPAN * size;
    for (int64_t at = begin / CHUNK * CHUNK; at < end; at += CHUNK) {
        const int from = static_cast<int>(larger(begin - at, 0)), to = static_cast<int>(smaller(end - at, CHUNK));
        fetch(at, from, to, chunk);
        make_panels<E>(chunk, from, to, size, keys + (at - base) * size, values + (at - base) * size);
    }
    begin_tiles16();
    for (int64_t row = 0; row < tile.rows; row += PAIR) {
        const Sums own{sums.most + row, sums.weight + row, sums.value + row * size};
        const uint16_t *q = tile.narrow + row * size;
        if (row + TILE_SIDE < tile.rows)
            attend_pair16<2>(tile, row, q, scale, begin, end, own, keys, values);
        else
            attend_pair16<1>(tile, row, q, scale, begin, end, own, keys, values);
    }
    end_tiles16();
}

#endif

VLLM_VARIANT_END

#endif
