// Vectors of float of the variant's width: `vf`, VF numbers wide. One source for AVX-512, AVX2, NEON and any other CPU.
//
// VLLM_IMITATED: the code for AVX-512 on a CPU without it, its instructions imitated (tests/native), for tests of what is computed.
#ifndef VLLM_CPU_SIMD_H
#define VLLM_CPU_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "variant.h"

#if defined(VLLM_IMITATED)
#include "avx512_imitated.h"
#elif defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) || defined(VLLM_IMITATED)
#define VLLM_AVX512
#endif
#if defined(__AVX512VNNI__) || defined(VLLM_IMITATED)
#define VLLM_VNNI
#endif

VLLM_VARIANT_BEGIN

// --- scalars ---------------------------------------------------------------------------------------------------------

static inline float from_bf16(uint16_t bits) {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

// Round to nearest, ties to even; NaN stays NaN.
static inline uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#ifdef __F16C__
static inline float from_f16(uint16_t bits) { return _cvtsh_ss(bits); }
static inline uint16_t to_f16(float value) { return static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT)); }
#elif defined(__aarch64__)
static inline float from_f16(uint16_t bits) {
    __fp16 half;
    memcpy(&half, &bits, 2);
    return half;
}
static inline uint16_t to_f16(float value) {
    __fp16 half = static_cast<__fp16>(value);
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
}
#else
static inline float from_f16(uint16_t bits) {
    uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16, rest = static_cast<uint32_t>(bits & 0x7fffu) << 13;
    float value = 0.0f;
    if (rest >= 0x0f800000u) {
        rest += 0x70000000u;  // infinity, NaN
        memcpy(&value, &rest, 4);
    } else {
        memcpy(&value, &rest, 4);
        value *= 0x1p112f;  // subnormal halves come out right: the product is exact
    }
    uint32_t all;
    memcpy(&all, &value, 4);
    all |= sign;
    memcpy(&value, &all, 4);
    return value;
}
static inline uint16_t to_f16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((rest >> 13) & 0x3ffu));
    if (rest >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (rest < 0x38800000u) {  // subnormal: let the adder round
        float tiny;
        memcpy(&tiny, &rest, 4);
        tiny += 0.5f;
        memcpy(&rest, &tiny, 4);
        return static_cast<uint16_t>(sign | (rest - 0x3f000000u));
    }
    rest += 0xc8000fffu + ((rest >> 13) & 1u);
    return static_cast<uint16_t>(sign | (rest >> 13));
}
#endif

// --- vectors ---------------------------------------------------------------------------------------------------------

#if defined(VLLM_AVX512)

constexpr int VF = 16;
typedef __m512 vf;
static inline vf vf_zero() { return _mm512_setzero_ps(); }
static inline vf vf_set(float x) { return _mm512_set1_ps(x); }
static inline vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void vf_store(float *p, vf v) { _mm512_storeu_ps(p, v); }
static inline vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
static inline float vf_sum(vf v) { return _mm512_reduce_add_ps(v); }
static inline float vf_top(vf v) { return _mm512_reduce_max_ps(v); }
static inline vf vf_load_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))), 16));
}
static inline vf vf_load_f16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
static inline vf vf_load_i8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
}

#elif defined(__AVX2__)

constexpr int VF = 8;
typedef __m256 vf;
static inline vf vf_zero() { return _mm256_setzero_ps(); }
static inline vf vf_set(float x) { return _mm256_set1_ps(x); }
static inline vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void vf_store(float *p, vf v) { _mm256_storeu_ps(p, v); }
static inline vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }  // a * b + c
static inline float vf_sum(vf v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline float vf_top(vf v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
static inline vf vf_load_bf16(const uint16_t *p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))), 16));
}
static inline vf vf_load_f16(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}
static inline vf vf_load_i8(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
}

#elif defined(__aarch64__)

constexpr int VF = 4;
typedef float32x4_t vf;
static inline vf vf_zero() { return vdupq_n_f32(0.0f); }
static inline vf vf_set(float x) { return vdupq_n_f32(x); }
static inline vf vf_load(const float *p) { return vld1q_f32(p); }
static inline void vf_store(float *p, vf v) { vst1q_f32(p, v); }
static inline vf vf_add(vf a, vf b) { return vaddq_f32(a, b); }
static inline vf vf_sub(vf a, vf b) { return vsubq_f32(a, b); }
static inline vf vf_mul(vf a, vf b) { return vmulq_f32(a, b); }
static inline vf vf_div(vf a, vf b) { return vdivq_f32(a, b); }
// The second operand passes where one is NaN, as on other machines.
static inline vf vf_max(vf a, vf b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline vf vf_min(vf a, vf b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }  // a * b + c
static inline float vf_sum(vf v) {
    float32x2_t s = vadd_f32(vget_low_f32(v), vget_high_f32(v));
    return vget_lane_f32(vpadd_f32(s, s), 0);
}
static inline float vf_top(vf v) { return vmaxvq_f32(v); }
static inline vf vf_load_bf16(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
static inline vf vf_load_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
static inline vf vf_load_i8(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}

#else

// The compiler's own vectors, of a width that every CPU has registers for.
constexpr int VF = 4;
typedef float vf __attribute__((vector_size(16)));
static inline vf vf_zero() { return vf{0, 0, 0, 0}; }
static inline vf vf_set(float x) { return vf{x, x, x, x}; }
static inline vf vf_load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof(v));
    return v;
}
static inline void vf_store(float *p, vf v) { memcpy(p, &v, sizeof(v)); }
static inline vf vf_add(vf a, vf b) { return a + b; }
static inline vf vf_sub(vf a, vf b) { return a - b; }
static inline vf vf_mul(vf a, vf b) { return a * b; }
static inline vf vf_div(vf a, vf b) { return a / b; }
static inline vf vf_max(vf a, vf b) {
    for (int i = 0; i < VF; ++i) a[i] = a[i] > b[i] ? a[i] : b[i];
    return a;
}
static inline vf vf_min(vf a, vf b) {
    for (int i = 0; i < VF; ++i) a[i] = a[i] < b[i] ? a[i] : b[i];
    return a;
}
static inline vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
static inline float vf_sum(vf v) { return (v[0] + v[2]) + (v[1] + v[3]); }
static inline float vf_top(vf v) {
    float x = v[0] > v[1] ? v[0] : v[1], y = v[2] > v[3] ? v[2] : v[3];
    return x > y ? x : y;
}
static inline vf vf_load_bf16(const uint16_t *p) {
    return vf{from_bf16(p[0]), from_bf16(p[1]), from_bf16(p[2]), from_bf16(p[3])};
}
static inline vf vf_load_f16(const uint16_t *p) {
    return vf{from_f16(p[0]), from_f16(p[1]), from_f16(p[2]), from_f16(p[3])};
}
static inline vf vf_load_i8(const int8_t *p) {
    return vf{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]), static_cast<float>(p[3])};
}

#endif

#ifdef __AVX2__
static inline void sum4(float *out, __m256 a, __m256 b, __m256 c, __m256 d) {
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}
#endif

// Sums of four vectors, in one order for all kernels: results do not depend on which of them ran.
static inline void vf_sum4(float *out, vf a, vf b, vf c, vf d) {
#if defined(VLLM_AVX512)
    sum4(out, _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)),
         _mm256_add_ps(_mm512_castps512_ps256(b), _mm512_extractf32x8_ps(b, 1)),
         _mm256_add_ps(_mm512_castps512_ps256(c), _mm512_extractf32x8_ps(c, 1)),
         _mm256_add_ps(_mm512_castps512_ps256(d), _mm512_extractf32x8_ps(d, 1)));
#elif defined(__AVX2__)
    sum4(out, a, b, c, d);
#else
    out[0] = vf_sum(a), out[1] = vf_sum(b), out[2] = vf_sum(c), out[3] = vf_sum(d);
#endif
}

// --- rows of any dtype -------------------------------------------------------------------------------------------------

static inline int64_t item_bytes(int32_t dtype) { return dtype == VLLM_FLOAT32 || dtype == VLLM_INT32 ? 4 : dtype == VLLM_INT64 ? 8 : 2; }

static inline bool is_float(int32_t dtype) {
    return dtype == VLLM_FLOAT32 || dtype == VLLM_BFLOAT16 || dtype == VLLM_FLOAT16;
}

// out float [n] = in [n] of a float dtype.
static inline void widen(float *out, const void *in, int32_t dtype, int64_t n) {
    if (dtype == VLLM_FLOAT32) {
        memcpy(out, in, static_cast<size_t>(n) * 4);
        return;
    }
    const uint16_t *p = static_cast<const uint16_t *>(in);
    int64_t i = 0;
    if (dtype == VLLM_BFLOAT16) {
        for (; i + VF <= n; i += VF) vf_store(out + i, vf_load_bf16(p + i));
        for (; i < n; ++i) out[i] = from_bf16(p[i]);
    } else {
        for (; i + VF <= n; i += VF) vf_store(out + i, vf_load_f16(p + i));
        for (; i < n; ++i) out[i] = from_f16(p[i]);
    }
}

#ifdef __AVX2__
static inline __m128i eight_bf16(__m256 v) {
    const __m256i bits = _mm256_castps_si256(v), high = _mm256_srli_epi32(bits, 16);
    const __m256i half = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(high, _mm256_set1_epi32(1)));
    const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40)), is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i words = _mm256_blendv_epi8(_mm256_srli_epi32(_mm256_add_epi32(bits, half), 16), quiet, is_nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
#endif

// out [n] of a float dtype = in float [n], rounded to nearest.
static inline void narrow(void *out, const float *in, int32_t dtype, int64_t n) {
    if (dtype == VLLM_FLOAT32) {
        memcpy(out, in, static_cast<size_t>(n) * 4);
        return;
    }
    uint16_t *p = static_cast<uint16_t *>(out);
    int64_t i = 0;
    if (dtype == VLLM_BFLOAT16) {
#ifdef __AVX2__
        for (; i + 8 <= n; i += 8) _mm_storeu_si128(reinterpret_cast<__m128i *>(p + i), eight_bf16(_mm256_loadu_ps(in + i)));
#endif
        for (; i < n; ++i) p[i] = to_bf16(in[i]);
        return;
    }
#ifdef __AVX2__
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i *>(p + i), _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; ++i) p[i] = to_f16(in[i]);
}

VLLM_VARIANT_END

#endif
