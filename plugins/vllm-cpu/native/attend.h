// Attention of a tile of queries over a span of keys: one order of all sums for every caller.
//
// A query's keys are taken in chunks of CHUNK at absolute positions, with a running maximum (online softmax, Milakov and
// Gimelshein 2018), within spans of SPAN; spans are merged in order. A score is one chain of fused multiply-adds over D, an
// output one over the keys of a span. So the bits of a query's result depend on its own keys alone: not on the tile it is
// in, nor on how a prompt was cut, nor on whether spans were computed by several threads.
#ifndef VLLM_CPU_ATTEND_H
#define VLLM_CPU_ATTEND_H

#include "kv.h"

VLLM_VARIANT_BEGIN

constexpr int CHUNK = 64;
constexpr int SPAN = 256;
constexpr int GROUPS = CHUNK / VF;  // vectors of neighbouring keys
constexpr int TILE_ROWS = 32;       // queries times query heads of a KV head, about: what a core's first cache holds

// Where the keys and values of a chunk are: VF keys [D, VF] from each pointer, `stride` numbers between rows; a value a token.
template <class E>
struct Chunk {
    const typename E::T *keys[GROUPS];
    const typename E::T *values[CHUNK];
    int64_t stride;
    alignas(64) float key_scale[CHUNK];
    alignas(64) float value_scale[CHUNK];
};

// Sums that a tile carries: per row the largest score, the sum of weights, and the weighted values [rows, width].
struct Sums {
    float *most;
    float *weight;
    float *value;
};

// A tile: rows of q float [rows, D], times the scale, or `narrow` ones (q is NULL then): bfloat16 as they are, or words with
// `steps`, what one of a row's stands for. Row r may see keys first[r] .. last[r].
struct Tile {
    const float *q;
    const uint16_t *narrow;
    const float *steps;
    const int64_t *first;
    const int64_t *last;
    float *scores;  // [rows, CHUNK]
    int64_t rows;
    int64_t size;   // D
    int64_t width;  // of values: D, rounded up to VF where they were gathered
    float cap;
};

// scores[r][g * VF ..] = q[r] . keys, for R rows and G groups.
template <class E, int R, int G>
static inline void score_block(const float *q, int64_t size, const typename E::T *const *keys, int64_t stride, float *scores) {
    vf sum[R][G];
    for (int r = 0; r < R; ++r)
        for (int g = 0; g < G; ++g) sum[r][g] = vf_zero();
    for (int64_t i = 0; i < size; ++i) {
        vf k[G];
        for (int g = 0; g < G; ++g) k[g] = E::load(keys[g] + i * stride);
        for (int r = 0; r < R; ++r) {
            vf a = vf_set(q[r * size + i]);
            for (int g = 0; g < G; ++g) sum[r][g] = vf_fma(a, k[g], sum[r][g]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int g = 0; g < G; ++g) vf_store(scores + r * CHUNK + g * VF, sum[r][g]);
}

template <class E, int R, int G>
static inline void score_groups(const float *q, int64_t size, const Chunk<E> &chunk, int begin, int end, float *scores) {
    int g = begin;
    for (; g + G <= end; g += G) score_block<E, R, G>(q, size, chunk.keys + g, chunk.stride, scores + g * VF);
    for (; g < end; ++g) score_block<E, R, 1>(q, size, chunk.keys + g, chunk.stride, scores + g * VF);
}

// value[r][c * VF ..] += sum over keys begin .. end of weights[r][t] * values[t], for R rows and C vectors.
template <class E, int R, int C>
static inline void value_block(const float *weights, const typename E::T *const *values, int64_t at, int begin, int end,
                               float *value, int64_t width) {
    vf sum[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sum[r][c] = vf_load(value + r * width + at + c * VF);
    for (int t = begin; t < end; ++t) {
        vf v[C];
        for (int c = 0; c < C; ++c) v[c] = E::load(values[t] + at + c * VF);
        for (int r = 0; r < R; ++r) {
            vf p = vf_set(weights[r * CHUNK + t]);
            for (int c = 0; c < C; ++c) sum[r][c] = vf_fma(p, v[c], sum[r][c]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) vf_store(value + r * width + at + c * VF, sum[r][c]);
}

template <class E, int R, int C>
static inline void value_columns(const float *weights, const Chunk<E> &chunk, int begin, int end, float *value, int64_t width) {
    int64_t at = 0;
    for (; at + C * VF <= width; at += C * VF) value_block<E, R, C>(weights, chunk.values, at, begin, end, value, width);
    for (; at < width; at += VF) value_block<E, R, 1>(weights, chunk.values, at, begin, end, value, width);
}

// Not inlined: each is some ten kernels, and has several callers. Few rows take more columns at once: that many independent chains keep the multipliers busy.
template <class E>
__attribute__((noinline)) static void all_scores(const Tile &tile, const Chunk<E> &chunk, int begin, int end) {
    constexpr int WIDE = GROUPS < 8 ? GROUPS : 8, HALF = GROUPS < 4 ? GROUPS : 4;
    int64_t row = 0;
    for (; row + 6 <= tile.rows; row += 6)
        score_groups<E, 6, 2>(tile.q + row * tile.size, tile.size, chunk, begin, end, tile.scores + row * CHUNK);
    const float *q = tile.q + row * tile.size;
    float *scores = tile.scores + row * CHUNK;
    switch (tile.rows - row) {
        case 5: return score_groups<E, 5, 2>(q, tile.size, chunk, begin, end, scores);
        case 4: return score_groups<E, 4, 2>(q, tile.size, chunk, begin, end, scores);
        case 3: return score_groups<E, 3, HALF>(q, tile.size, chunk, begin, end, scores);
        case 2: return score_groups<E, 2, HALF>(q, tile.size, chunk, begin, end, scores);
        case 1: return score_groups<E, 1, WIDE>(q, tile.size, chunk, begin, end, scores);
        default: return;
    }
}

template <class E>
__attribute__((noinline)) static void all_values(const Tile &tile, const Chunk<E> &chunk, int begin, int end, float *value) {
    int64_t row = 0;
    for (; row + 6 <= tile.rows; row += 6)
        value_columns<E, 6, 2>(tile.scores + row * CHUNK, chunk, begin, end, value + row * tile.width, tile.width);
    const float *weights = tile.scores + row * CHUNK;
    value += row * tile.width;
    switch (tile.rows - row) {
        case 5: return value_columns<E, 5, 2>(weights, chunk, begin, end, value, tile.width);
        case 4: return value_columns<E, 4, 2>(weights, chunk, begin, end, value, tile.width);
        case 3: return value_columns<E, 3, 4>(weights, chunk, begin, end, value, tile.width);
        case 2: return value_columns<E, 2, 4>(weights, chunk, begin, end, value, tile.width);
        case 1: return value_columns<E, 1, 8>(weights, chunk, begin, end, value, tile.width);
        default: return;
    }
}

static inline void scale_row(float *value, int64_t width, float factor) {
    vf f = vf_set(factor);
    for (int64_t i = 0; i < width; i += VF) vf_store(value + i, vf_mul(vf_load(value + i), f));
}

// From scores to weights of one row, its sums brought along. `scale`: NULL, or what the values of each key are to be
// multiplied with. Keys outside of from .. to - 1 are hidden.
__attribute__((noinline)) static void weigh_row(float *scores, int from, int to, float cap, const float *key_scale, const float *value_scale,
                             float *most, float *weight, float *value, int64_t width) {
    for (int g = 0; g < GROUPS && (key_scale || cap > 0.0f); ++g) {
        vf s = vf_load(scores + g * VF);
        if (key_scale) s = vf_mul(s, vf_load(key_scale + g * VF));
        if (cap > 0.0f) s = vf_mul(vf_set(cap), vf_tanh(vf_div(s, vf_set(cap))));
        vf_store(scores + g * VF, s);
    }
    for (int t = 0; t < from; ++t) scores[t] = -INFINITY;
    for (int t = to; t < CHUNK; ++t) scores[t] = -INFINITY;
    vf top = vf_set(*most);
    for (int g = 0; g < GROUPS; ++g) top = vf_max(top, vf_load(scores + g * VF));
    float now = vf_top(top);
    if (now == -INFINITY) {
        for (int t = 0; t < CHUNK; ++t) scores[t] = 0.0f;
        return;
    }
    float factor = exp1(*most - now);
    vf sum = vf_zero(), shift = vf_set(now);
    for (int g = 0; g < GROUPS; ++g) {
        vf p = vf_exp(vf_sub(vf_load(scores + g * VF), shift));
        sum = vf_add(sum, p);
        vf_store(scores + g * VF, value_scale ? vf_mul(p, vf_load(value_scale + g * VF)) : p);
    }
    *weight = *weight * factor + vf_sum(sum);
    *most = now;
    if (factor != 1.0f) scale_row(value, width, factor);
}

// The same of row `r` of a tile, for the chunk at `at` of which from .. to - 1 are there.
static inline void weigh(const Tile &tile, int64_t r, int64_t at, int from, int to, const float *key_scale,
                         const float *value_scale, const Sums &sums) {
    int first = static_cast<int>(smaller(larger(tile.first[r] - at, from), CHUNK));
    int last = static_cast<int>(larger(smaller(tile.last[r] + 1 - at, to), 0));
    if (last < first) last = first;
    weigh_row(tile.scores + r * CHUNK, first, last, tile.cap, key_scale, value_scale, sums.most + r, sums.weight + r,
              sums.value + r * tile.width, tile.width);
}

static inline void clear(const Sums &sums, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; ++r) {
        sums.most[r] = -INFINITY;
        sums.weight[r] = 0.0f;
    }
    memset(sums.value, 0, static_cast<size_t>(rows * width) * sizeof(float));
}

// One span's sums into `all`. Both have memory for rows up to a multiple of VF.
static inline void merge(const Sums &all, const Sums &span, int64_t rows, int64_t width) {
    for (int64_t begin = 0; begin < rows; begin += VF) {
        const vf before = vf_load(all.most + begin), here = vf_load(span.most + begin), now = vf_max(before, here);
        float most[VF], own[VF], others[VF];
        vf_store(most, now);
        vf_store(own, vf_exp(vf_sub(before, now)));
        vf_store(others, vf_exp(vf_sub(here, now)));
        for (int64_t i = 0; i < VF && begin + i < rows; ++i) {
            const int64_t r = begin + i;
            if (span.most[r] == -INFINITY) continue;
            all.weight[r] = all.weight[r] * own[i] + span.weight[r] * others[i];
            all.most[r] = most[i];
            vf x = vf_set(own[i]), y = vf_set(others[i]);
            float *to = all.value + r * width;
            const float *from = span.value + r * width;
            for (int64_t j = 0; j < width; j += VF)
                vf_store(to + j, vf_fma(vf_load(from + j), y, vf_mul(vf_load(to + j), x)));
        }
    }
}

// Attention of a tile over the keys begin .. end - 1 of one span. `fetch(at, from, to, chunk)` says where the keys
// at + from .. at + to - 1 are. Keys that no row may see are not read.
template <class E, class Fetch>
static void attend_span(const Tile &tile, int64_t begin, int64_t end, const Sums &sums, const Fetch &fetch, Chunk<E> &chunk) {
    clear(sums, tile.rows, tile.width);
    for (int64_t at = begin / CHUNK * CHUNK; at < end; at += CHUNK) {
        int from = static_cast<int>(larger(begin - at, 0)), to = static_cast<int>(smaller(end - at, CHUNK));
        fetch(at, from, to, chunk);
        all_scores<E>(tile, chunk, from / VF, (to + VF - 1) / VF);
        for (int64_t r = 0; r < tile.rows; ++r)
            weigh(tile, r, at, from, to, E::scaled ? chunk.key_scale : nullptr, E::scaled ? chunk.value_scale : nullptr, sums);
        all_values<E>(tile, chunk, from, to, sums.value);
    }
}

VLLM_VARIANT_END

#endif
