// Attention of a tile of bfloat16 queries by the tiles of AMX: attend.h's spans and chunks, with products of bfloat16. Keys, values
// and weights are rounded to it; scores and sums are float.
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

// Numbers of bfloat16 that a chunk's panels take: keys [D / 32, CHUNK / 16, 16 pairs of D, 16 keys, 2], values
// [CHUNK / 32, D / 16, 16 pairs of keys, 16 of D, 2], and the weights of a tile [rows, CHUNK].
static inline int64_t panels16(int64_t rows, int64_t size) { return 2 * CHUNK * size + rows * CHUNK; }

// Pairs of both vectors' numbers.
template <class E>
VLLM_TARGET("avx512bf16") static inline void store_pairs(const typename E::T *even, const typename E::T *odd, uint16_t *to) {
    const __m256i low = even ? reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(E::load(even))) : _mm256_setzero_si256();
    const __m256i high = odd ? reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(E::load(odd))) : _mm256_setzero_si256();
    _mm512_storeu_si512(to, _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16)));
}

template <class E>
static void make_panels(const Chunk<E> &chunk, int from, int to, int64_t size, uint16_t *keys, uint16_t *values) {
    for (int g = from / VF; g < (to + VF - 1) / VF; ++g)
        for (int64_t i = 0; i < size; i += 2) {
            const typename E::T *row = chunk.keys[g] + i * chunk.stride;
            store_pairs<E>(row, row + chunk.stride, keys + ((i / 32 * GROUPS + g) * TILE_SIDE + i % 32 / 2) * 32);
        }
    for (int t = 0; t < CHUNK; t += 2) {
        // Slots outside of the span may hold anything, and zero times that is not always zero.
        const bool even = t >= from && t < to, odd = t + 1 >= from && t + 1 < to;
        for (int64_t i = 0; i < size; i += VF)
            store_pairs<E>(even ? chunk.values[t] + i : nullptr, odd ? chunk.values[t + 1] + i : nullptr,
                           values + ((t / 32 * (size / VF) + i / VF) * TILE_SIDE + t % 32 / 2) * 32);
    }
}

// scores [16, CHUNK] = 16 rows of q [.., size] times the panel of keys.
VLLM_TARGET("amx-tile,amx-bf16") static void scores16(const uint16_t *q, int64_t size, const uint16_t *keys, float *scores) {
    constexpr int64_t AREA = TILE_SIDE * 32;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < size; i += 32, keys += GROUPS * AREA) {
        _tile_loadd(4, q + i, size * 2);
        _tile_loadd(6, keys, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, keys + AREA, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, keys + 2 * AREA, 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, keys + 3 * AREA, 64);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, scores, CHUNK * 4);
    _tile_stored(1, scores + 16, CHUNK * 4);
    _tile_stored(2, scores + 32, CHUNK * 4);
    _tile_stored(3, scores + 48, CHUNK * 4);
}

// value [16, size] += weights [16, CHUNK] times the panel of values.
VLLM_TARGET("amx-tile,amx-bf16") static void values16(const uint16_t *weights, const uint16_t *values, int64_t size, float *value) {
    constexpr int64_t AREA = TILE_SIDE * 32;
    _tile_loadd(4, weights, CHUNK * 2);
    _tile_loadd(5, weights + 32, CHUNK * 2);
    const uint16_t *rest = values + size / VF * AREA;
    for (int64_t i = 0; i < size; i += 32, values += 2 * AREA, rest += 2 * AREA) {
        _tile_loadd(0, value + i, size * 4);
        _tile_loadd(1, value + i + 16, size * 4);
        _tile_loadd(6, values, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, values + AREA, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, rest, 64);
        _tile_dpbf16ps(0, 5, 6);
        _tile_loadd(7, rest + AREA, 64);
        _tile_dpbf16ps(1, 5, 7);
        _tile_stored(0, value + i, size * 4);
        _tile_stored(1, value + i + 16, size * 4);
    }
}

VLLM_TARGET("avx512bf16") static void narrow_weights(const float *scores, int64_t rows, uint16_t *weights) {
    for (int64_t i = 0; i < rows * CHUNK; i += VF)
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(weights + i),
                            reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(scores + i))));
}

VLLM_TARGET("amx-tile") static void begin_tiles16() {
    const TileConfig config(64);
    _tile_loadconfig(config.written());
}

VLLM_TARGET("amx-tile") static void end_tiles16() { _tile_release(); }

// attend_span for queries [rows, D] of bfloat16 at `q`, D a multiple of 32. There is memory for rows up to a multiple of 16, and
// `panels` has room for panels16 numbers.
template <class E, class Fetch>
static void attend_span16(const Tile &tile, const uint16_t *q, float scale, int64_t begin, int64_t end, const Sums &sums,
                          const Fetch &fetch, Chunk<E> &chunk, uint16_t *panels) {
    uint16_t *keys = panels, *values = keys + CHUNK * tile.size, *weights = values + CHUNK * tile.size;
    alignas(64) float scales[CHUNK];
    for (float &one : scales) one = scale;
    clear(sums, tile.rows, tile.width);
    begin_tiles16();
    for (int64_t at = begin / CHUNK * CHUNK; at < end; at += CHUNK) {
        int from = static_cast<int>(larger(begin - at, 0)), to = static_cast<int>(smaller(end - at, CHUNK));
        fetch(at, from, to, chunk);
        make_panels<E>(chunk, from, to, tile.size, keys, values);
        for (int64_t r = 0; r < tile.rows; r += TILE_SIDE) scores16(q + r * tile.size, tile.size, keys, tile.scores + r * CHUNK);
        for (int64_t r = 0; r < tile.rows; ++r) weigh(tile, r, at, from, to, scales, nullptr, sums);
        narrow_weights(tile.scores, tile.rows, weights);
        for (int64_t r = 0; r < tile.rows; r += TILE_SIDE)
            values16(weights + r * CHUNK, values, tile.size, sums.value + r * tile.width);
    }
    end_tiles16();
}

#endif

VLLM_VARIANT_END

#endif
