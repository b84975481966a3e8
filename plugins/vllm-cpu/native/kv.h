// The paged KV cache's blocks, and the numbers in them.
//
// A block: keys [heads, D, tokens_per_block], values [heads, tokens_per_block, D]; with VLLM_KV_INT8 then float32 scales of
// keys, of values, each [heads, tokens_per_block]. Keys lie transposed so that a vector holds one element of neighbouring
// keys: scores of VF keys are a chain of fused multiply-adds each, without sums across a vector, and what unwritten slots
// hold touches nothing else.
#ifndef VLLM_CPU_KV_H
#define VLLM_CPU_KV_H

#include "vmath.h"

VLLM_VARIANT_BEGIN

// --- fp8 -----------------------------------------------------------------------------------------------------------------

// float to e4m3 / e5m2, to nearest even; beyond the largest number that one, NaN stays NaN.
static inline uint8_t to_fp8(float value, int mantissa, int bias, uint32_t most, uint8_t largest) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint8_t sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
    uint32_t rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return sign | 0x7fu;
    if (rest >= most) return sign | largest;
    if (rest < static_cast<uint32_t>(128 - bias) << 23) {  // below 2^(1 - bias): steps of 2^(1 - bias - mantissa)
        uint32_t scale = static_cast<uint32_t>(127 + bias + mantissa - 1) << 23;
        float absolute, factor;
        memcpy(&absolute, &rest, 4);
        memcpy(&factor, &scale, 4);
        return sign | static_cast<uint8_t>(lrintf(absolute * factor));
    }
    int shift = 23 - mantissa;
    rest += (1u << (shift - 1)) - 1u + ((rest >> shift) & 1u);
    return sign | static_cast<uint8_t>((rest >> shift) - (static_cast<uint32_t>(127 - bias) << mantissa));
}
static inline uint8_t to_e4m3(float x) { return to_fp8(x, 3, 7, 0x43e80000u, 0x7e); }   // 464, 448
static inline uint8_t to_e5m2(float x) { return to_fp8(x, 2, 15, 0x47700000u, 0x7b); }  // 61440, 57344
static inline float from_e4m3(uint8_t x) {
    if ((x & 0x7f) == 0x7f) return NAN;
    return from_f16(static_cast<uint16_t>((x & 0x80) << 8 | (x & 0x7f) << 7)) * 256.0f;
}
static inline float from_e5m2(uint8_t x) { return from_f16(static_cast<uint16_t>(x << 8)); }

#if defined(VLLM_AVX512)
static inline __m256i widen_u8(const uint8_t *p) { return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))); }
static inline vf vf_load_e5m2(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_slli_epi16(widen_u8(p), 8)); }
static inline vf vf_load_e4m3(const uint8_t *p) {
    __m256i x = widen_u8(p);
    __m256i half = _mm256_or_si256(_mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x80)), 8),
                                   _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7f)), 7));
    return vf_mul(_mm512_cvtph_ps(half), vf_set(256.0f));
}
#elif defined(__AVX2__)
static inline __m128i widen_u8(const uint8_t *p) { return _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))); }
static inline vf vf_load_e5m2(const uint8_t *p) { return _mm256_cvtph_ps(_mm_slli_epi16(widen_u8(p), 8)); }
static inline vf vf_load_e4m3(const uint8_t *p) {
    __m128i x = widen_u8(p);
    __m128i half = _mm_or_si128(_mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x80)), 8),
                                _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x7f)), 7));
    return vf_mul(_mm256_cvtph_ps(half), vf_set(256.0f));
}
#else
static inline vf vf_load_e5m2(const uint8_t *p) {
    return vf{from_e5m2(p[0]), from_e5m2(p[1]), from_e5m2(p[2]), from_e5m2(p[3])};
}
static inline vf vf_load_e4m3(const uint8_t *p) {
    return vf{from_e4m3(p[0]), from_e4m3(p[1]), from_e4m3(p[2]), from_e4m3(p[3])};
}
#endif

// --- elements: how a number is kept ----------------------------------------------------------------------------------------

struct Float32 {
    typedef float T;
    static constexpr bool scaled = false;
    static inline vf load(const T *p) { return vf_load(p); }
    static inline float get(T x) { return x; }
    static inline T put(float x) { return x; }
};
struct BFloat16 {
    typedef uint16_t T;
    static constexpr int32_t DTYPE = VLLM_BFLOAT16;
    static constexpr bool scaled = false;
    static inline vf load(const T *p) { return vf_load_bf16(p); }
    static inline float get(T x) { return from_bf16(x); }
    static inline T put(float x) { return to_bf16(x); }
};
struct Float16 {
    typedef uint16_t T;
    static constexpr int32_t DTYPE = VLLM_FLOAT16;
    static constexpr bool scaled = false;
    static inline vf load(const T *p) { return vf_load_f16(p); }
    static inline float get(T x) { return from_f16(x); }
    static inline T put(float x) { return to_f16(x); }
};
struct Int8 {
    typedef int8_t T;
    static constexpr bool scaled = true;
    static inline vf load(const T *p) { return vf_load_i8(p); }
    static inline float get(T x) { return static_cast<float>(x); }
    static inline T put(float x) { return static_cast<T>(lrintf(x)); }  // |x| <= 127 by its scale
};
struct E4M3 {
    typedef uint8_t T;
    static constexpr bool scaled = false;
    static inline vf load(const T *p) { return vf_load_e4m3(p); }
    static inline float get(T x) { return from_e4m3(x); }
    static inline T put(float x) { return to_e4m3(x); }
};
struct E5M2 {
    typedef uint8_t T;
    static constexpr bool scaled = false;
    static inline vf load(const T *p) { return vf_load_e5m2(p); }
    static inline float get(T x) { return from_e5m2(x); }
    static inline T put(float x) { return to_e5m2(x); }
};

// Calls body(Element{}) with the element of a KV dtype.
template <class Body>
static inline int32_t with_element(int64_t dtype, const Body &body) {
    switch (dtype) {
        case VLLM_FLOAT32: return body(Float32{});
        case VLLM_BFLOAT16: return body(BFloat16{});
        case VLLM_FLOAT16: return body(Float16{});
        case VLLM_KV_INT8: return body(Int8{});
        case VLLM_KV_FP8_E4M3: return body(E4M3{});
        case VLLM_KV_FP8_E5M2: return body(E5M2{});
        default: return VLLM_UNSUPPORTED;
    }
}

// --- places in a block -------------------------------------------------------------------------------------------------------

static inline int64_t scale_offset(const vllm_kv *kv) {
    return (2 * kv->num_heads * kv->head_size * kv->tokens_per_block + 3) / 4 * 4;  // of VLLM_KV_INT8: one byte a number
}

// One head of one block: keys [D, tokens_per_block], values [tokens_per_block, D], scales [tokens_per_block].
template <class E>
struct Plane {
    typename E::T *keys;
    typename E::T *values;
    float *key_scale;
    float *value_scale;

    Plane(const vllm_kv *kv, int64_t block, int64_t head) {
        char *base = static_cast<char *>(kv->blocks) + block * kv->block_bytes;
        int64_t plane = kv->head_size * kv->tokens_per_block;
        keys = reinterpret_cast<typename E::T *>(base) + head * plane;
        values = reinterpret_cast<typename E::T *>(base) + (kv->num_heads + head) * plane;
        key_scale = value_scale = nullptr;
        if (E::scaled) {
            key_scale = reinterpret_cast<float *>(base + scale_offset(kv)) + head * kv->tokens_per_block;
            value_scale = key_scale + kv->num_heads * kv->tokens_per_block;
        }
    }
};

// 1 / s for values that are stored as x / s, and s itself in `scale`: the largest becomes 127. NaN makes the scale NaN.
static inline float scale_of(const float *x, int64_t n, float *scale) {
    float most = 0.0f;
    bool bad = false;
    for (int64_t i = 0; i < n; ++i) {
        float a = fabsf(x[i]);
        bad |= a != a;
        most = a > most ? a : most;
    }
    bad |= most > 3e38f;
    *scale = bad ? NAN : most / 127.0f;
    return bad || !(most > 1e-36f) ? 0.0f : 127.0f / most;
}

// Store key and value [D] of one token at `offset` of a plane.
template <class E>
static inline void put_token(const Plane<E> &plane, int64_t offset, int64_t tokens_per_block, int64_t size, const float *k,
                             const float *v) {
    float key_factor = 1.0f, value_factor = 1.0f;
    if (E::scaled) {
        key_factor = scale_of(k, size, plane.key_scale + offset);
        value_factor = scale_of(v, size, plane.value_scale + offset);
    }
    typename E::T *column = plane.keys + offset, *row = plane.values + offset * size;
    if constexpr (sizeof(typename E::T) == 2) {
        narrow(row, v, E::DTYPE, size);
        typename E::T keys[64];
        for (int64_t begin = 0; begin < size; begin += 64) {
            const int64_t count = smaller(64, size - begin);
            narrow(keys, k + begin, E::DTYPE, count);
            for (int64_t i = 0; i < count; ++i) column[(begin + i) * tokens_per_block] = keys[i];
        }
        return;
    }
    for (int64_t i = 0; i < size; ++i) {
        float key = E::scaled ? (key_factor == 0.0f ? 0.0f : k[i] * key_factor) : k[i];
        column[i * tokens_per_block] = E::put(key);
    }
    for (int64_t i = 0; i < size; ++i) {
        float value = E::scaled ? (value_factor == 0.0f ? 0.0f : v[i] * value_factor) : v[i];
        row[i] = E::put(value);
    }
}

VLLM_VARIANT_END

#endif
