// AVX-512 on a CPU with AVX2: SIMDe, and what it lacks of what the kernels use.
#ifndef VLLM_TESTS_AVX512_IMITATED_H
#define VLLM_TESTS_AVX512_IMITATED_H

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

namespace {

struct Sixteen {
    float at[16];
};

inline Sixteen numbers_of(__m512 v) {
    Sixteen all;
    simde_mm512_storeu_ps(all.at, v);
    return all;
}

inline __m512 joined(__m256 low, __m256 high) {
    float all[16];
    _mm256_storeu_ps(all, low);
    _mm256_storeu_ps(all + 8, high);
    return simde_mm512_loadu_ps(all);
}

inline __m512i joined(__m256i low, __m256i high) {
    int32_t all[16];
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(all), low);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(all + 8), high);
    return simde_mm512_loadu_si512(all);
}

inline __m512 imitated_cvtepi32_ps(__m512i v) {
    int32_t all[16];
    simde_mm512_storeu_si512(all, v);
    const __m256i *half = reinterpret_cast<const __m256i *>(all);
    return joined(_mm256_cvtepi32_ps(_mm256_loadu_si256(half)), _mm256_cvtepi32_ps(_mm256_loadu_si256(half + 1)));
}

inline __m512i imitated_cvtepi8_epi32(__m128i v) {
    return joined(_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)));
}

inline __m512i imitated_cvtepu16_epi32(__m256i v) {
    return joined(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(v)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(v, 1)));
}

inline __m512 imitated_cvtph_ps(__m256i v) {
    return joined(_mm256_cvtph_ps(_mm256_castsi256_si128(v)), _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1)));
}

inline __m256 imitated_extractf32x8_ps(__m512 v, int half) { return _mm256_loadu_ps(numbers_of(v).at + 8 * half); }

// Sums as the compilers' headers take them: halves, until one number is left.
inline float imitated_reduce_add_ps(__m512 v) {
    Sixteen all = numbers_of(v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; ++i) all.at[i] += all.at[i + width];
    return all.at[0];
}

inline float imitated_reduce_max_ps(__m512 v) {
    Sixteen all = numbers_of(v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; ++i) all.at[i] = all.at[i] > all.at[i + width] ? all.at[i] : all.at[i + width];
    return all.at[0];
}

inline __m512i imitated_cvtepu8_epi16(__m256i v) {
    return joined(_mm256_cvtepu8_epi16(_mm256_castsi256_si128(v)), _mm256_cvtepu8_epi16(_mm256_extracti128_si256(v, 1)));
}

// To the nearest bfloat16, to the even one of two; NaN stays NaN.
inline uint16_t imitated_rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return static_cast<uint16_t>(bits >> 16 | 64);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline __m256i imitated_cvtneps_pbh(__m512 v) {
    const Sixteen all = numbers_of(v);
    uint16_t words[16];
    for (int i = 0; i < 16; ++i) words[i] = imitated_rounded(all.at[i]);
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(words));
}

inline __m512i imitated_cvtne2ps_pbh(__m512 high, __m512 low) {
    return joined(imitated_cvtneps_pbh(low), imitated_cvtneps_pbh(high));
}

inline __m512 imitated_dpbf16_ps(__m512 sums, __m512i a, __m512i b) {
    Sixteen all = numbers_of(sums);
    uint32_t x[16], y[16];
    simde_mm512_storeu_si512(x, a);
    simde_mm512_storeu_si512(y, b);
    for (int i = 0; i < 16; ++i)
        for (int half = 1; half >= 0; --half) {
            const uint32_t left = half ? x[i] & 0xffff0000u : x[i] << 16, right = half ? y[i] & 0xffff0000u : y[i] << 16;
            float p, q;
            memcpy(&p, &left, 4);
            memcpy(&q, &right, 4);
            all.at[i] += p * q;
        }
    return simde_mm512_loadu_ps(all.at);
}

// Quarters: two of `a`, then two of `b`.
inline __m512 imitated_shuffle_f32x4(__m512 a, __m512 b, int which) {
    const Sixteen from[2] = {numbers_of(a), numbers_of(b)};
    float all[16];
    for (int i = 0; i < 16; ++i) all[i] = from[i / 8].at[(which >> (i / 4 * 2) & 3) * 4 + i % 4];
    return simde_mm512_loadu_ps(all);
}

// Nearer than the instruction's.
inline __m512 imitated_rcp14_ps(__m512 v) {
    Sixteen all = numbers_of(v);
    for (float &x : all.at) x = 1.0f / x;
    return simde_mm512_loadu_ps(all.at);
}

// What is above the next integer below: of the instruction's modes that of 0x09.
inline __m512 imitated_reduce_ps(__m512 v, int) {
    Sixteen all = numbers_of(v);
    for (float &x : all.at) x = __builtin_isinf(x) ? 0.0f : x - __builtin_floorf(x);
    return simde_mm512_loadu_ps(all.at);
}

}  // namespace

#define __m512bh __m512i
#define __m256bh __m256i
#define _mm512_cvtepu8_epi16 imitated_cvtepu8_epi16
#define _mm512_cvtneps_pbh imitated_cvtneps_pbh
#define _mm512_cvtne2ps_pbh imitated_cvtne2ps_pbh
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps imitated_dpbf16_ps
#define _mm512_cvtepi32_ps imitated_cvtepi32_ps
#define _mm512_cvtepi8_epi32 imitated_cvtepi8_epi32
#define _mm512_cvtepu16_epi32 imitated_cvtepu16_epi32
#define _mm512_cvtph_ps imitated_cvtph_ps
#define _mm512_extractf32x8_ps imitated_extractf32x8_ps
#define _mm512_reduce_add_ps imitated_reduce_add_ps
#define _mm512_reduce_max_ps imitated_reduce_max_ps
#define _mm512_reduce_ps imitated_reduce_ps
#define _mm512_rcp14_ps imitated_rcp14_ps
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4 imitated_shuffle_f32x4

#endif
