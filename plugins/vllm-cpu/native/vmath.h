// Exponentials and their kin on vectors of float, and integer vectors of the same width. Errors are a few units in the last
// place; NaN stays NaN.
#ifndef VLLM_CPU_VMATH_H
#define VLLM_CPU_VMATH_H

#include "simd.h"

VLLM_VARIANT_BEGIN

typedef int32_t vi __attribute__((vector_size(VF * 4)));

static inline vi vi_set(int32_t x) { return vi{} + x; }
static inline vi vi_of(vf x) { return reinterpret_cast<vi>(x); }
static inline vf vf_of(vi x) { return reinterpret_cast<vf>(x); }
static inline vi vi_less(vf a, vf b) { return reinterpret_cast<vi>(a < b); }
// `a` where the mask is set, else `b`.
static inline vf vf_select(vi mask, vf a, vf b) { return vf_of((vi_of(a) & mask) | (vi_of(b) & ~mask)); }
static inline vf vf_abs(vf x) { return vf_of(vi_of(x) & vi_set(0x7fffffff)); }
static inline float vf_first(vf x) {
    float value;
    memcpy(&value, &x, 4);
    return value;
}

constexpr float LOWEST_EXPONENT = -87.33f;

// e^x; 0 below LOWEST_EXPONENT, e^88 above 88. The polynomial is that of Cephes' expf.
static inline vf vf_exp(vf x) {
    // The second operand passes where one is NaN.
    vf c = vf_max(vf_set(LOWEST_EXPONENT), vf_min(vf_set(88.0f), x));
    const vf magic = vf_set(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which is in the low bits
    vf t = vf_fma(c, vf_set(1.44269504088896341f), magic);
    vf n = vf_sub(t, magic);
    vf r = vf_fma(n, vf_set(-0.693359375f), c);
    r = vf_fma(n, vf_set(2.12194440e-4f), r);
    vf p = vf_set(1.9875691500e-4f);
    p = vf_fma(p, r, vf_set(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set(5.0000001201e-1f));
    p = vf_add(vf_fma(vf_mul(p, r), r, r), vf_set(1.0f));
    vi scale = (vi_of(t) << 23) + vi_set(0x3f800000);
    vf value = vf_mul(p, vf_of(scale));
    return vf_of(vi_of(value) & ~vi_less(x, vf_set(LOWEST_EXPONENT)));
}

static inline float exp1(float x) { return vf_first(vf_exp(vf_set(x))); }

#if defined(VLLM_AVX512)
// 2^x, for what is rounded to bfloat16: its error is 3e-6 of the number.
static inline vf vf_power_of_two(vf x) {
    const vf r = _mm512_reduce_ps(x, 0x09);  // what is above the next integer below
    vf p = vf_fma(vf_set(1.353416791e-2f), r, vf_set(5.201146062e-2f));  // the best of this degree between 0 and 1
    p = vf_fma(p, r, vf_set(2.414427569e-1f));
    p = vf_fma(p, r, vf_set(6.930038345e-1f));
    p = vf_fma(p, r, vf_set(1.000002593f));
    return _mm512_scalef_ps(p, x);
}
#endif

static inline vf vf_tanh(vf x) {
    vf a = vf_abs(x), z = vf_mul(x, x);
    vf p = vf_set(-5.70498872745e-3f);
    p = vf_fma(p, z, vf_set(2.06390887954e-2f));
    p = vf_fma(p, z, vf_set(-5.37397155531e-2f));
    p = vf_fma(p, z, vf_set(1.33314422036e-1f));
    p = vf_fma(p, z, vf_set(-3.33332819422e-1f));
    vf small = vf_fma(vf_mul(p, z), x, x);
    vf e = vf_exp(vf_add(a, a));
    vf large = vf_sub(vf_set(1.0f), vf_div(vf_set(2.0f), vf_add(e, vf_set(1.0f))));
    large = vf_of(vi_of(large) | (vi_of(x) & vi_set(INT32_MIN)));
    return vf_select(vi_less(a, vf_set(0.625f)), small, large);
}

// Abramowitz and Stegun 7.1.26: within 1.5e-7.
static inline vf vf_erfc_abs(vf x) {
    vf a = vf_abs(x);
    vf t = vf_div(vf_set(1.0f), vf_fma(a, vf_set(0.3275911f), vf_set(1.0f)));
    vf p = vf_set(1.061405429f);
    p = vf_fma(p, t, vf_set(-1.453152027f));
    p = vf_fma(p, t, vf_set(1.421413741f));
    p = vf_fma(p, t, vf_set(-0.284496736f));
    p = vf_fma(p, t, vf_set(0.254829592f));
    return vf_mul(vf_mul(p, t), vf_exp(vf_sub(vf_zero(), vf_mul(a, a))));
}

static inline vf vf_activate(vf x, int64_t kind) {
    switch (kind) {
        case VLLM_SILU: return vf_div(x, vf_add(vf_set(1.0f), vf_exp(vf_sub(vf_zero(), x))));
        case VLLM_GELU: {
            // Of a negative x the tail itself: 1 + erf would leave what was rounded.
            vf tail = vf_erfc_abs(vf_mul(x, vf_set(0.70710678118654752f)));
            vf both = vf_select(vi_less(x, vf_zero()), tail, vf_sub(vf_set(2.0f), tail));
            return vf_mul(vf_mul(vf_set(0.5f), x), both);
        }
        case VLLM_GELU_TANH: {
            vf cube = vf_mul(vf_mul(x, x), x);
            vf inner = vf_mul(vf_set(0.79788456080286536f), vf_fma(vf_set(0.044715f), cube, x));
            return vf_mul(vf_mul(vf_set(0.5f), x), vf_add(vf_set(1.0f), vf_tanh(inner)));
        }
        default: return vf_select(vi_less(x, vf_zero()), vf_zero(), x);
    }
}

// The first n < VF numbers; the others are `rest`.
static inline vf vf_load_part(const float *p, int64_t n, float rest) {
    float all[VF];
    for (int i = 0; i < VF; ++i) all[i] = i < n ? p[i] : rest;
    return vf_load(all);
}

static inline void vf_store_part(float *p, vf v, int64_t n) {
    float all[VF];
    vf_store(all, v);
    for (int i = 0; i < n; ++i) p[i] = all[i];
}

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

VLLM_VARIANT_END

#endif
