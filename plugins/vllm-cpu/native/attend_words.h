// Attention of a tile of 16-bit queries by integer products of words: attend.h's spans and chunks. Where an instruction adds
// two products of words, it does twice the work of one on floats.
//
// Queries, keys, values and weights are rounded to WEIGHT_MOST or VALUE_MOST steps each: of a query, of a key, of a value, of
// a row's weights in a chunk. Sums of products are exact in 32 bits, and float beyond. That is finer than bfloat16, and about
// what float16 keeps.
#ifndef VLLM_CPU_ATTEND_WORDS_H
#define VLLM_CPU_ATTEND_WORDS_H

#include "attend.h"

VLLM_VARIANT_BEGIN

// Fewer rows of a tile than this are faster by attend.h, which makes no panels.
constexpr int64_t LEAST_ROWS_WORDS = 24;
constexpr int64_t TILE_ROWS_WORDS = 256;  // queries times query heads of a KV head: what pays for a chunk's panels

#if defined(__AVX2__) || defined(VLLM_IMITATED)
#define VLLM_WORDS

constexpr int PART = 64;                // numbers of D whose products are summed in 32 bits; as many keys as a chunk has
constexpr float WEIGHT_MOST = 4095.0f;  // of queries and weights
constexpr float VALUE_MOST = 8191.0f;   // of keys and values: 64 * 4095 * 8191 < 2^31
constexpr int PAIRED = 2 * VF;          // keys whose values are taken together: the first VF of them with the others
static_assert(CHUNK == PART, "sums over a chunk's keys stay within 32 bits");

template <int N>
struct Number {
    static constexpr int VALUE = N;
};

// sums + a[0] * b[0] + a[1] * b[1], of the two words of each lane.
static inline vi add_dots(vi sums, vi a, vi b) {
#if defined(VLLM_VNNI)
    typedef __m512i W;
    return reinterpret_cast<vi>(_mm512_dpwssd_epi32(reinterpret_cast<W>(sums), reinterpret_cast<W>(a), reinterpret_cast<W>(b)));
#else
    return sums + reinterpret_cast<vi>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#endif
}

static inline vi two_words(const void *at) {
    int32_t bits;
    memcpy(&bits, at, 4);
    return vi_set(bits);
}

static inline vi vi_load(const int32_t *p) {
    vi v;
    memcpy(&v, p, sizeof(v));
    return v;
}

static inline void vi_store(int32_t *p, vi v) { memcpy(p, &v, sizeof(v)); }

// The nearest integers of x * factor, as words in the low halves of the lanes; what is above them is anything.
static inline vi words_of(vf x, vf factor) { return vi_of(vf_fma(x, factor, vf_set(12582912.0f))); }  // 1.5 * 2^23

static inline vi pairs_of(vi low, vi high) { return (low & vi_set(0xffff)) | (high << 16); }

// Larger magnitude in each lane, as bits: NaN is above all.
static inline vi larger_bits(vi top, vf x) {
    const vi bits = vi_of(x) & vi_set(0x7fffffff);
    return bits > top ? bits : top;
}

static inline bool any_above(vf a, vf b) {
#if defined(VLLM_AVX512)
    return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0;
#else
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0;
#endif
}

// What numbers up to `top` are multiplied with to reach `most`, and the step it makes of one; nothing of what is as good as zero.
// What is not finite makes the step so, and with it every product.
static inline void steps_of(vi top, float most, vf *inverse, vf *step) {
    const vf largest = vf_of(top);
    *step = vf_mul(largest, vf_set(1.0f / most));
    *inverse = vf_of(vi_of(vf_div(vf_set(most), largest)) & ~vi_less(largest, vf_set(1e-30f)));
}

// The largest magnitude of all lanes; what is not finite comes out as infinite.
static inline vi greatest(vi top) {
    const vi infinite = vi_set(0x7f800000);
    return vi_of(vf_set(vf_top(vf_of(top > infinite ? infinite : top))));
}

// A chunk's panels: keys [GROUPS, D / 2, VF] pairs of neighbouring numbers of D, values [CHUNK / 2, D] pairs of keys that lie VF
// apart; and what one of a key, and of a value, stands for.
struct Words {
    int32_t *keys;
    int32_t *values;
    alignas(64) float key_step[CHUNK];
    alignas(64) float value_step[CHUNK];
    static int64_t numbers(int64_t size) { return CHUNK * size; }
    Words(int32_t *memory, int64_t size) : keys(memory), values(memory + CHUNK / 2 * size) {}
};

// Rows of queries as words [rows, D], and what one of each stands for times the scale.
static inline void words_of_query(const float *q, int64_t size, float scale, uint16_t *to, float *step) {
    vi top = vi_set(0);
    for (int64_t i = 0; i < size; i += VF) top = larger_bits(top, vf_load(q + i));
    vf inverse, one;
    steps_of(greatest(top), WEIGHT_MOST, &inverse, &one);
    *step = vf_first(one) * scale;
    for (int64_t i = 0; i < size; i += VF) {
        typedef int16_t vw __attribute__((vector_size(VF * 2)));
        const vw words = __builtin_convertvector(words_of(vf_load(q + i), inverse), vw);
        memcpy(to + i, &words, sizeof(words));
    }
}

// Panels of a chunk's keys from .. to - 1. Others of the same PAIRED are zero: their slots may hold anything.
template <class E>
__attribute__((noinline)) static void make_words(const Chunk<E> &chunk, int from, int to, int64_t size, Words &words) {
    const int begin = from / PAIRED * PAIRED, end = (to + PAIRED - 1) / PAIRED * PAIRED;
    for (int g = begin / VF; g < end / VF; ++g) {
        int32_t *keys = words.keys + g * VF * (size / 2);
        if (g < from / VF || g * VF >= to) {
            memset(keys, 0, static_cast<size_t>(size / 2) * VF * 4);
            vf_store(words.key_step + g * VF, vf_zero());
            continue;
        }
        const typename E::T *row = chunk.keys[g];
        vi top = vi_set(0);
        for (int64_t i = 0; i < size; ++i) top = larger_bits(top, E::load(row + i * chunk.stride));
        vf inverse, step;
        steps_of(top, VALUE_MOST, &inverse, &step);
        vf_store(words.key_step + g * VF, step);
        for (int64_t i = 0; i < size; i += 2, row += 2 * chunk.stride)
            vi_store(keys + i / 2 * VF, pairs_of(words_of(E::load(row), inverse), words_of(E::load(row + chunk.stride), inverse)));
    }
    for (int t = begin; t < end; t += (t + 1) % VF ? 1 : VF + 1) {
        vf inverse[2];
        for (int half = 0; half < 2; ++half) {
            const int key = t + half * VF;
            vf step = inverse[half] = vf_zero();
            if (key >= from && key < to) {
                vi top = vi_set(0);
                for (int64_t i = 0; i < size; i += VF) top = larger_bits(top, E::load(chunk.values[key] + i));
                steps_of(greatest(top), VALUE_MOST, &inverse[half], &step);
            }
            words.value_step[key] = vf_first(step);
        }
        const bool even = t >= from && t < to, odd = t + VF >= from && t + VF < to;
        int32_t *values = words.values + (t / PAIRED * VF + t % VF) * size;
        for (int64_t i = 0; i < size; i += VF) {
            const vi low = even ? words_of(E::load(chunk.values[t] + i), inverse[0]) : vi_set(0);
            const vi high = odd ? words_of(E::load(chunk.values[t + VF] + i), inverse[1]) : vi_set(0);
            vi_store(values + i, pairs_of(low, high));
        }
    }
}

// scores[r][g * VF ..] = products of R rows of words and G groups of keys, before they are multiplied with their steps.
template <int R, int G>
static inline void score_words(const uint16_t *q, const int32_t *keys, int64_t size, float *scores) {
    for (int64_t part = 0; part < size; part += PART) {
        vi sum[R][G];
        for (int r = 0; r < R; ++r)
            for (int g = 0; g < G; ++g) sum[r][g] = vi_set(0);
        const int64_t end = smaller(size, part + PART) / 2;
        for (int64_t i = part / 2; i < end; ++i) {
            vi k[G];
            for (int g = 0; g < G; ++g) k[g] = vi_load(keys + (g * (size / 2) + i) * VF);
            for (int r = 0; r < R; ++r) {
                const vi two = two_words(q + r * size + 2 * i);
                for (int g = 0; g < G; ++g) sum[r][g] = add_dots(sum[r][g], two, k[g]);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int g = 0; g < G; ++g) {
                const vf found = __builtin_convertvector(sum[r][g], vf);
                float *to = scores + r * CHUNK + g * VF;
                vf_store(to, part ? vf_add(vf_load(to), found) : found);
            }
    }
}

// value[r] = value[r] * factors[r] + units[r] * products of R rows of weights, pairs [CHUNK / 2], with values of the steps
// begin .. end - 1, C vectors of D at a time.
template <int R, int C>
static inline void value_words(const int32_t *weights, const int32_t *values, int begin, int end, int64_t size,
                               const float *factors, const float *units, float *value) {
    for (int64_t at = 0; at < size; at += C * VF) {
        vi sum[R][C];
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) sum[r][c] = vi_set(0);
        for (int s = begin; s < end; ++s) {
            vi v[C];
            for (int c = 0; c < C; ++c) v[c] = vi_load(values + s * size + at + c * VF);
            for (int r = 0; r < R; ++r) {
                const vi two = two_words(weights + r * (CHUNK / 2) + s);
                for (int c = 0; c < C; ++c) sum[r][c] = add_dots(sum[r][c], two, v[c]);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) {
                float *to = value + r * size + at + c * VF;
                const vf found = vf_mul(__builtin_convertvector(sum[r][c], vf), vf_set(units[r]));
                vf_store(to, vf_fma(vf_load(to), vf_set(factors[r]), found));
            }
    }
}

// 2^x of x <= 0, no less than 2^-126; 1 of 0. Its error is 3e-06 of the number.
static inline vf power_of_two(vf x) {
    const vf magic = vf_set(12582912.0f), low = vf_max(vf_set(-126.0f), x);  // the second operand passes where one is NaN
    const vf t = vf_add(low, magic), r = vf_sub(low, vf_sub(t, magic));
    vf p = vf_set(9.582853169e-03f);  // the best of this degree between -1/2 and 1/2 that is 1 at 0
    p = vf_fma(p, r, vf_set(5.590642504e-02f));
    p = vf_fma(p, r, vf_set(2.402409861e-01f));
    p = vf_fma(p, r, vf_set(6.931241934e-01f));
    p = vf_fma(p, r, vf_set(1.0f));
    return vf_mul(p, vf_of((vi_of(t) << 23) + vi_set(0x3f800000)));
}

static inline vi lanes_from(int first) {
    alignas(64) static constexpr int32_t LANES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return vi_load(LANES) + vi_set(first);
}

// From products to weights of one row: of the keys first .. last of those from `base` on, PAIRS * PAIRED. Steps are those of
// the keys from there on. Its sums are brought along, its values by `factor`; `unit` is what one of the weights stands for.
template <int PAIRS>
static inline void weigh_words(const float *scores, int base, int first, int last, float step, float cap, const float *key_step,
                               const float *value_step, float *most, float *weight, int32_t *pairs, float *factor, float *unit) {
    constexpr int VECTORS = 2 * PAIRS;
    constexpr float LOG2_E = 1.44269504088896341f;
    const bool whole = first <= base && last >= base + VECTORS * VF - 1;
    const auto seen = [&](int v) __attribute__((always_inline)) {
        const vi lanes = lanes_from(base + v * VF);
        return vi(lanes >= vi_set(first)) & vi(lanes <= vi_set(last));
    };
    vf x[VECTORS], top = vf_set(-INFINITY);
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
        x[v] = vf_mul(vf_load(scores + v * VF), vf_mul(vf_load(key_step + v * VF), vf_set(step)));
        if (cap > 0.0f) x[v] = vf_mul(vf_set(cap), vf_tanh(vf_div(x[v], vf_set(cap))));
        if (!whole) x[v] = vf_select(seen(v), x[v], vf_set(-INFINITY));
        top = vf_max(top, x[v]);
    }
    float now = *most, shift = now;
    *factor = 1.0f;
    if (any_above(top, vf_set(now)) || now == -INFINITY) {
        now = vf_top(top), shift = now > -3.4e38f ? now : -3.4e38f;  // a row that has seen nothing yet takes any finite number
        *factor = vf_first(power_of_two(vf_set((*most - shift) * LOG2_E)));
    }
    vf sum = vf_zero(), highest = vf_set(1e-30f);
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
        vf p = power_of_two(vf_fma(x[v], vf_set(LOG2_E), vf_set(-shift * LOG2_E)));
        x[v] = vf_mul(p, vf_load(value_step + v * VF));
        if (!whole) p = vf_of(vi_of(p) & seen(v)), x[v] = vf_of(vi_of(x[v]) & seen(v));
        sum = vf_add(sum, p);
        highest = vf_max(highest, x[v]);
    }
    const float highest_one = vf_top(highest);
    const vf inverse = vf_set(WEIGHT_MOST / highest_one);
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v += 2)
        vi_store(pairs + v / 2 * VF, pairs_of(words_of(x[v], inverse), words_of(x[v + 1], inverse)));
    *unit = highest_one * (1.0f / WEIGHT_MOST);
    *weight = *weight * *factor + vf_sum(sum);
    *most = now;
}

// Rows row .. row + R - 1 of a tile over a chunk at `at` whose panels are there, keys from .. to - 1.
template <int R>
static inline void attend_rows_words(const Tile &tile, int64_t row, int64_t at, int from, int to, const Words &words,
                                     const Sums &sums) {
    const int64_t size = tile.size;
    // Rows come in the order of their positions.
    const int low = static_cast<int>(larger(from, smaller(tile.first[row] - at, CHUNK)));
    const int high = static_cast<int>(smaller(to, larger(tile.last[row + R - 1] + 1 - at, 0)));
    if (low >= high) return;
    const int base = low / PAIRED * PAIRED, pairs = (high - base + PAIRED - 1) / PAIRED;
    constexpr int MOST = CHUNK / PAIRED;
    alignas(64) float scores[R * CHUNK], factors[R], units[R];
    alignas(64) int32_t weights[R * (CHUNK / 2)];
    for (int g = 0; g < 2 * pairs; g += 2)
        score_words<R, 2>(tile.narrow + row * size, words.keys + (base + g * VF) * (size / 2), size, scores + g * VF);
    for (int r = 0; r < R; ++r) {
        const int first = static_cast<int>(larger(from, smaller(tile.first[row + r] - at, CHUNK)));
        const int last = static_cast<int>(smaller(to - 1, larger(tile.last[row + r] - at, -1)));
        auto weigh = [&](auto count) __attribute__((always_inline)) {
            weigh_words<decltype(count)::VALUE>(scores + r * CHUNK, base, first, last, tile.steps[row + r], tile.cap,
                                                words.key_step + base, words.value_step + base, sums.most + row + r,
                                                sums.weight + row + r, weights + r * (CHUNK / 2), factors + r, units + r);
        };
        switch (pairs) {
            case 1: weigh(Number<1>{}); break;
            case 2: weigh(Number<2>{}); break;
            case 3: weigh(Number<(MOST < 3 ? MOST : 3)>{}); break;
            default: weigh(Number<MOST>{}); break;
        }
    }
    constexpr int WIDE = 2;
    float *value = sums.value + row * tile.width;
    const int32_t *values = words.values + base / 2 * size;
    if (size % (WIDE * VF) == 0)
        value_words<R, WIDE>(weights, values, 0, pairs * VF, size, factors, units, value);
    else
        value_words<R, 1>(weights, values, 0, pairs * VF, size, factors, units, value);
}

// attend_span for queries of words [rows, D], D a multiple of VF; `memory` has room for Words::numbers(D).
template <class E, class Fetch>
static void attend_span_words(const Tile &tile, int64_t begin, int64_t end, const Sums &sums, const Fetch &fetch, Chunk<E> &chunk,
                              int32_t *memory) {
    Words words(memory, tile.size);
    clear(sums, tile.rows, tile.width);
    for (int64_t at = begin / CHUNK * CHUNK; at < end; at += CHUNK) {
        const int from = static_cast<int>(larger(begin - at, 0)), to = static_cast<int>(smaller(end - at, CHUNK));
        fetch(at, from, to, chunk);
        make_words<E>(chunk, from, to, tile.size, words);
        int64_t row = 0;
        for (; row + 6 <= tile.rows; row += 6) attend_rows_words<6>(tile, row, at, from, to, words, sums);
        for (; row + 2 <= tile.rows; row += 2) attend_rows_words<2>(tile, row, at, from, to, words, sums);
        for (; row < tile.rows; ++row) attend_rows_words<1>(tile, row, at, from, to, words, sums);
    }
}

#endif

VLLM_VARIANT_END

#endif
