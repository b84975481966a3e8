// Integer products of a few rows, each weight read once; gemm8.cpp has those of many. On CPUs without these instructions there
// are none, and `linear` stays exact.
#include "int8.h"

#include "linear.h"
#include "wide8.h"

VLLM_VARIANT_BEGIN

#ifdef __AVX2__

namespace {

// How far ahead of what is read memory is asked for. Rows are short, and a core's own guesses end with them.
constexpr int64_t AHEAD = 2048;

// M rows of x against NR of the weight.
template <class Format, int M, int NR>
VLLM_INLINE void block8(const vllm_matrix &w, const Inputs8 &in, int64_t n, int64_t count, float *out, int64_t stride) {
    Row rows[NR];
    for (int r = 0; r < NR; ++r) rows[r] = row_of(w, n + (r < count ? r : 0));
    __m256 sums[NR][M];
    float offsets[NR][M];
    for (int r = 0; r < NR; ++r)
        for (int m = 0; m < M; ++m) sums[r][m] = _mm256_setzero_ps(), offsets[r][m] = 0.0f;
    int64_t blocks = in.k / 32;
    int64_t bytes = w.row_bytes * 32 * Format::BLOCKS / w.k, ahead = NR * w.row_bytes + AHEAD / 2;  // as in gemv.cpp
    for (int64_t c = 0; c < blocks / Format::BLOCKS; ++c) {
        for (int64_t at = 0; at < NR * bytes; at += 64) __builtin_prefetch(rows[0].data + c * bytes * NR + ahead + at);
#pragma GCC unroll 4
        for (int r = 0; r < NR; ++r)
            Format::decode(rows[r], c, [&](int i, __m256i weight, __m256 scale, float offset) __attribute__((always_inline)) {
                int64_t at = c * Format::BLOCKS + i;
                for (int m = 0; m < M; ++m) {
                    __m256i q = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(in.q + m * in.k + at * 32));
                    __m256 dot = _mm256_cvtepi32_ps(dot32<Format::SIGNED>(weight, q));
                    __m256 both = _mm256_mul_ps(scale, _mm256_broadcast_ss(in.facts + (m * blocks + at) * 2));
                    sums[r][m] = _mm256_fmadd_ps(dot, both, sums[r][m]);
                    if (!Format::SIGNED) offsets[r][m] += offset * in.facts[(m * blocks + at) * 2 + 1];
                }
            });
    }
    for (int m = 0; m < M; ++m)
        for (int r = 0; r < NR && r < count; ++r) {
            __m128 s = _mm_add_ps(_mm256_castps256_ps128(sums[r][m]), _mm256_extractf128_ps(sums[r][m], 1));
            s = _mm_add_ps(s, _mm_movehl_ps(s, s));
            out[m * stride + r] = _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s))) + offsets[r][m];
        }
}

template <class Format, int M, int NR>
void range8(const vllm_matrix &w, const Inputs8 &in, int64_t n0, int64_t n1, float *out, int64_t stride) {
    for (int64_t n = n0; n < n1; n += NR)
        block8<Format, M, NR>(w, in, n, n1 - n < NR ? n1 - n : NR, out + (n - n0), stride);
}

// COUNT blocks of one row of the weight from `p` on.
template <class Format, int COUNT>
VLLM_INLINE void along_blocks(const uint8_t *p, const int8_t *q, const float *facts, __m256 sums[2], __m256 &offsets) {
    for (int at = 0; COUNT == 4 && at < COUNT * Format::BYTES; at += 64) __builtin_prefetch(p + AHEAD + at);
    const __m128i halves = Format::template heads<COUNT>(p);
    alignas(32) float factors[8];
    __m256 both;
    if (COUNT == 4) {
        both = _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_loadu_ps(facts));
    } else {
        both = _mm256_setr_ps(facts[0], facts[1], COUNT > 1 ? facts[2] : 0.0f, COUNT > 1 ? facts[3] : 0.0f, 0, 0, 0, 0);
        both = _mm256_mul_ps(_mm256_cvtph_ps(halves), both);
    }
    _mm256_store_ps(factors, both);
    if (Format::OFFSET != 0.0f) offsets = _mm256_add_ps(offsets, both);
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; ++i) {
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(q + i * 32));
        const __m256 dot = _mm256_cvtepi32_ps(dot32<Format::SIGNED>(Format::numbers(p + i * Format::BYTES), x));
        sums[i % 2] = _mm256_fmadd_ps(dot, _mm256_broadcast_ss(factors + 2 * i), sums[i % 2]);
    }
}

// The product of one row of x and one of the weight, as eight partial sums.
template <class Format>
VLLM_INLINE __m256 along_row(const uint8_t *p, const Inputs8 &in) {
    const int8_t *q = in.q;
    const float *facts = in.facts;
    __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()}, offsets = _mm256_setzero_ps();
    int64_t left = in.k / 32;
    for (; left >= 4; left -= 4, p += 4 * Format::BYTES, q += 128, facts += 8)
        along_blocks<Format, 4>(p, q, facts, sums, offsets);
    if (left >= 2) {
        along_blocks<Format, 2>(p, q, facts, sums, offsets);
        left -= 2, p += 2 * Format::BYTES, q += 64, facts += 4;
    }
    if (left) along_blocks<Format, 1>(p, q, facts, sums, offsets);
    const __m256 all = _mm256_add_ps(sums[0], sums[1]);
    if (Format::OFFSET == 0.0f) return all;
    // Every other number is one of the factors.
    return _mm256_fmadd_ps(_mm256_blend_ps(_mm256_setzero_ps(), offsets, 0xaa), _mm256_set1_ps(Format::OFFSET), all);
}

// One row of x against rows of the weight, one after the other, so that memory is read in one line.
template <class Format>
void along8(const vllm_matrix &w, const Inputs8 &in, int64_t n0, int64_t n1, float *out) {
    const uint8_t *p = static_cast<const uint8_t *>(w.data) + n0 * w.row_bytes;
    for (int64_t n = n0; n < n1; n += 4) {
        __m256 all[4];
        for (int r = 0; r < 4; ++r, p += w.row_bytes) all[r] = n + r < n1 ? along_row<Format>(p, in) : _mm256_setzero_ps();
        float totals[4];
        sum4(totals, all[0], all[1], all[2], all[3]);
        for (int64_t r = 0; r < 4 && n + r < n1; ++r) out[n + r - n0] = totals[r];
    }
}

#ifdef __AVX512VNNI__

// The sum of a row's products as sixteen partial ones.
template <class Wide>
VLLM_INLINE __m512 wide_total(const WideSums &found) {
    const __m512 all = _mm512_add_ps(found.sums[0], found.sums[1]);
    if (Wide::OFFSET == 0.0f) return all;
    return _mm512_fmadd_ps(_mm512_maskz_mov_ps(0xaaaa, found.offsets), _mm512_set1_ps(Wide::OFFSET), all);
}

// As along_row; what is left of two blocks at a time goes its way.
template <class Format, class Wide>
VLLM_INLINE __m512 wide_row(const uint8_t *p, const Inputs8 &in) {
    WideSums found{{_mm512_setzero_ps(), _mm512_setzero_ps()}, _mm512_setzero_ps()};
    const int64_t fours = in.k / 128, twos = in.k / 64;
    const int8_t *q = Wide::HALVES ? in.halves : in.q;
    for (int64_t i = 0; i < fours; ++i) wide_four<Wide>(p + i * 4 * Wide::BYTES, q + i * 128, in.facts + i * 8, found);
    if (twos % 2) wide_two<Wide>(p + fours * 4 * Wide::BYTES, in.q + fours * 128, in.facts + fours * 8, found);
    const __m512 all = wide_total<Wide>(found);
    if (in.k == twos * 64) return all;
    const Inputs8 rest{in.q + twos * 64, nullptr, in.facts + twos * 4, in.k - twos * 64, 1};
    return _mm512_add_ps(all, _mm512_zextps256_ps512(along_row<Format>(p + twos * 2 * Wide::BYTES, rest)));
}

template <class Wide>
VLLM_INLINE __m512 wide_row_k(const uint8_t *p, const Inputs8 &in) {
    WideSums found{{_mm512_setzero_ps(), _mm512_setzero_ps()}, _mm512_setzero_ps()};
    for (int64_t i = 0; i < in.k / 256; ++i, p += Wide::BYTES) {
        ask_ahead<Wide::BYTES>(p);
        Wide::add(p, in.q + i * 256, in.facts + i * 16, found);
    }
    return wide_total<Wide>(found);
}

// As along8, with any of the two above.
template <class Body>
VLLM_INLINE void along_wide(const vllm_matrix &w, int64_t n0, int64_t n1, float *out, const Body &row) {
    const uint8_t *p = static_cast<const uint8_t *>(w.data) + n0 * w.row_bytes;
    for (int64_t n = n0; n < n1; n += 4) {
        __m512 all[4];
        for (int r = 0; r < 4; ++r, p += w.row_bytes) all[r] = n + r < n1 ? row(p) : _mm512_setzero_ps();
        float totals[4];
        vf_sum4(totals, all[0], all[1], all[2], all[3]);
        for (int64_t r = 0; r < 4 && n + r < n1; ++r) out[n + r - n0] = totals[r];
    }
}

// False: the format has no kernel for AVX-512.
bool multiply_wide8(const vllm_matrix &w, const Inputs8 &in, int64_t n0, int64_t n1, float *out) {
    switch (w.format) {
        case VLLM_Q4_0:
            along_wide(w, n0, n1, out, [&](const uint8_t *p) { return wide_row<Nibble32x8<4, false>, WideQ4_0>(p, in); });
            return true;
        case VLLM_Q4_1:
            along_wide(w, n0, n1, out, [&](const uint8_t *p) { return wide_row<Nibble32x8<4, true>, WideQ4_1>(p, in); });
            return true;
        case VLLM_Q8_0:
            along_wide(w, n0, n1, out, [&](const uint8_t *p) { return wide_row<Q8_0x8, WideQ8_0>(p, in); });
            return true;
        case VLLM_Q4_K:
            along_wide(w, n0, n1, out, [&](const uint8_t *p) { return wide_row_k<WideK45<4>>(p, in); });
            return true;
        case VLLM_Q5_K:
            along_wide(w, n0, n1, out, [&](const uint8_t *p) { return wide_row_k<WideK45<5>>(p, in); });
            return true;
        case VLLM_Q6_K:
            along_wide(w, n0, n1, out, [&](const uint8_t *p) { return wide_row_k<WideQ6_K>(p, in); });
            return true;
        default: return false;
    }
}

#else

bool multiply_wide8(const vllm_matrix &, const Inputs8 &, int64_t, int64_t, float *) { return false; }

#endif

}  // namespace

bool reads_int8(const vllm_matrix &w) {
    return w.k % 32 == 0 && with_format8(w.format, [](auto) {});
}

namespace {

// A block of x: bytes, their step, the sums of both halves.
struct Block8 {
    __m256i numbers;
    float step, low, high;
};

VLLM_INLINE Block8 quantise(const float *x) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    // Compared as integers, which order magnitudes and keep NaN above all: the step is NaN then, and so is the product.
    __m256 v[4];
    __m256i top = _mm256_setzero_si256();
    for (int i = 0; i < 4; ++i) {
        v[i] = _mm256_loadu_ps(x + i * 8);
        top = _mm256_max_epi32(top, _mm256_and_si256(magnitude, _mm256_castps_si256(v[i])));
    }
    __m128i t = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
    t = _mm_max_epi32(t, _mm_shuffle_epi32(t, 0x4e));
    const float most = _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(t, _mm_shuffle_epi32(t, 0xb1))));
    const __m256 inverse = _mm256_set1_ps(most > 0.0f ? 127.0f / most : 0.0f);
    __m256i n[4];
    for (int i = 0; i < 4; ++i) n[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
    __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
    packed = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    // Sums of both halves: neighbouring lanes are added until one of each is left.
    __m256i total = _mm256_hadd_epi32(_mm256_add_epi32(n[0], n[1]), _mm256_add_epi32(n[2], n[3]));
    total = _mm256_hadd_epi32(total, total);
    const __m128i two = _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
    const float step = most / 127.0f;
    return Block8{packed, step, step * static_cast<float>(_mm_extract_epi32(two, 0)),
                  step * static_cast<float>(_mm_extract_epi32(two, 1))};
}

}  // namespace

void quantise_row(const float *x, int64_t k, int8_t *q, float *facts) {
    for (int64_t b = 0; b < k / 32; ++b) {
        const Block8 block = quantise(x + b * 32);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(q + b * 32), block.numbers);
        facts[2 * b] = block.step, facts[2 * b + 1] = block.low + block.high;
    }
}

namespace {

// Dword s of row m to place 4 * s + m of `to`.
VLLM_INLINE void place_rows(const __m256i rows[4], uint8_t *to) {
    const __m256i a = _mm256_unpacklo_epi32(rows[0], rows[1]), b = _mm256_unpacklo_epi32(rows[2], rows[3]);
    const __m256i c = _mm256_unpackhi_epi32(rows[0], rows[1]), d = _mm256_unpackhi_epi32(rows[2], rows[3]);
    // Steps 0 and 4, 1 and 5, 2 and 6, 3 and 7.
    const __m256i p0 = _mm256_unpacklo_epi64(a, b), p1 = _mm256_unpackhi_epi64(a, b);
    const __m256i p2 = _mm256_unpacklo_epi64(c, d), p3 = _mm256_unpackhi_epi64(c, d);
    __m256i *out = reinterpret_cast<__m256i *>(to);
    _mm256_storeu_si256(out, _mm256_permute2x128_si256(p0, p1, 0x20));
    _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(p2, p3, 0x20));
    _mm256_storeu_si256(out + 2, _mm256_permute2x128_si256(p0, p1, 0x31));
    _mm256_storeu_si256(out + 3, _mm256_permute2x128_si256(p2, p3, 0x31));
}

}  // namespace

void quantise_group(const float *const *x, int64_t k, uint8_t *q, uint8_t *wide, float *facts) {
    for (int64_t b = 0; b < k / 32; ++b, facts += FACTS8) {
        __m256i rows[4];
        for (int m = 0; m < 4; ++m) {
            const Block8 block = quantise(x[m] + b * 32);
            rows[m] = block.numbers;
            facts[m] = block.step, facts[4 + m] = block.low + block.high, facts[8 + m] = block.low, facts[12 + m] = block.high;
        }
        place_rows(rows, q + b * 128);
        for (int half = 0; wide && half < 2; ++half) {
            __m256i pairs[4];
            for (int m = 0; m < 4; ++m)
                pairs[m] = _mm256_cvtepi8_epi16(half ? _mm256_extracti128_si256(rows[m], 1) : _mm256_castsi256_si128(rows[m]));
            place_rows(pairs, wide + b * 256 + half * 128);
        }
    }
}

void quantise_tile_row(const float *x, int64_t k, int64_t row, uint8_t *q, float *facts) {
    q += row * 32, facts += row;
    for (int64_t b = 0; b < k / 32; ++b, q += TILE_ROWS8 * 32, facts += TILE_FACTS8) {
        const Block8 block = quantise(x + b * 32);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(q), block.numbers);
        facts[0] = block.step, facts[TILE_ROWS8] = block.low + block.high;
        facts[2 * TILE_ROWS8] = block.low, facts[3 * TILE_ROWS8] = block.high;
    }
}

bool takes_halves8(int32_t format) {
#ifdef __AVX512VNNI__
    return format == VLLM_Q4_0 || format == VLLM_Q4_1;
#else
    (void)format;
    return false;
#endif
}

void split_halves(const int8_t *q, int64_t k, int8_t *out) {
    for (int64_t b = 0; b + 4 <= k / 32; b += 4)
        for (int64_t i = 0; i < 4; ++i) {
            memcpy(out + b * 32 + i * 16, q + (b + i) * 32, 16);
            memcpy(out + b * 32 + 64 + i * 16, q + (b + i) * 32 + 16, 16);
        }
}

bool multiply_vector8(const vllm_matrix &w, const Inputs8 &in, int64_t n0, int64_t n1, float *out, int64_t stride) {
    return with_format8(w.format, [&](auto format) {
        using Format = decltype(format);
        int64_t blocks = in.k / 32, m = 0;
        for (; m < in.rows; m += 4) {
            Inputs8 part{in.q + m * in.k, in.halves ? in.halves + m * in.k : nullptr, in.facts + m * blocks * 2, in.k, in.rows - m};
            if (part.rows >= 4) {
                range8<Format, 4, 2>(w, part, n0, n1, out + m * stride, stride);
                continue;
            }
            for (int64_t rest = 0; rest < part.rows; ++rest) {
                Inputs8 one{part.q + rest * in.k, in.halves ? part.halves + rest * in.k : nullptr, part.facts + rest * blocks * 2, in.k, 1};
                float *to = out + (m + rest) * stride;
                if (multiply_wide8(w, one, n0, n1, to)) continue;
                if constexpr (Format::HEADS)
                    along8<Format>(w, one, n0, n1, to);
                else
                    range8<Format, 1, 4>(w, one, n0, n1, to, stride);
            }
        }
    });
}

#else

bool reads_int8(const vllm_matrix &) { return false; }
void quantise_row(const float *, int64_t, int8_t *, float *) {}
void quantise_group(const float *const *, int64_t, uint8_t *, uint8_t *, float *) {}
void quantise_tile_row(const float *, int64_t, int64_t, uint8_t *, float *) {}
bool takes_halves8(int32_t) { return false; }
void split_halves(const int8_t *, int64_t, int8_t *) {}
bool multiply_vector8(const vllm_matrix &, const Inputs8 &, int64_t, int64_t, float *, int64_t) { return false; }

#endif

VLLM_VARIANT_END
