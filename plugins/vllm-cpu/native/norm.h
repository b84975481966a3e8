// Norms of one row of floats.
#ifndef VLLM_CPU_NORM_H
#define VLLM_CPU_NORM_H

#include "vmath.h"

VLLM_VARIANT_BEGIN

// Sum of (x - mean)^2, in four chains.
static inline float squares(const float *x, int64_t n, float mean) {
    vf m = vf_set(mean), sum[4] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};
    int64_t i = 0;
    for (; i + 4 * VF <= n; i += 4 * VF)
        for (int j = 0; j < 4; ++j) {
            vf d = vf_sub(vf_load(x + i + j * VF), m);
            sum[j] = vf_fma(d, d, sum[j]);
        }
    for (; i + VF <= n; i += VF) {
        vf d = vf_sub(vf_load(x + i), m);
        sum[0] = vf_fma(d, d, sum[0]);
    }
    if (i < n) {
        vf d = vf_sub(vf_load_part(x + i, n - i, mean), m);
        sum[0] = vf_fma(d, d, sum[0]);
    }
    return vf_sum(vf_add(vf_add(sum[0], sum[1]), vf_add(sum[2], sum[3])));
}

static inline float total(const float *x, int64_t n) {
    vf sum = vf_zero();
    int64_t i = 0;
    for (; i + VF <= n; i += VF) sum = vf_add(sum, vf_load(x + i));
    if (i < n) sum = vf_add(sum, vf_load_part(x + i, n - i, 0.0f));
    return vf_sum(sum);
}

// out = x / sqrt(mean(x^2) + eps) * weight; out may be x.
static inline void rms_row(float *out, const float *x, const float *weight, int64_t n, float eps) {
    float scale = 1.0f / sqrtf(squares(x, n, 0.0f) / static_cast<float>(n) + eps);
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

// x = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias.
static inline void layer_row(float *x, const float *weight, const float *bias, int64_t n, float eps) {
    float mean = total(x, n) / static_cast<float>(n);
    float scale = 1.0f / sqrtf(squares(x, n, mean) / static_cast<float>(n) + eps);
    for (int64_t i = 0; i < n; ++i) x[i] = (x[i] - mean) * scale * weight[i] + bias[i];
}

VLLM_VARIANT_END

#endif
