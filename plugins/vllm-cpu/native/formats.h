// Weight formats: how a chunk of a row becomes vectors of float. The one place that knows the bits of a format.
//
// `decode(row, chunk, emit)` calls emit(i, w) with the vectors of `chunk`, CHUNK / VF of them. Their numbers come in the
// order that costs nothing, `order(i)` being the place in the chunk of the i-th: products are taken with inputs laid out in
// the same order (`arrange`, of a chunk), so that no vector is ever put back. Every weight is the float that the format defines, rounded once; the
// sum over a row is one vector of partial sums, chunk by chunk, then `vf_sum4`: the same for any number of rows of x.
//
//   section map: rows of floats; blocks of 32 (GGUF's 4, 5 and 8 bits); blocks of 256 (K-quants); int8 and int4 of our own
#ifndef VLLM_CPU_FORMATS_H
#define VLLM_CPU_FORMATS_H

#include "simd.h"

#define VLLM_INLINE inline __attribute__((always_inline))

VLLM_VARIANT_BEGIN

// One row of a matrix.
struct Row {
    const uint8_t *data;
    const float *scale;
    const uint8_t *zero;
    int64_t k;
    int64_t group;
};

static VLLM_INLINE Row row_of(const vllm_matrix &w, int64_t n) {
    Row row{static_cast<const uint8_t *>(w.data) + n * w.row_bytes, nullptr, nullptr, w.k, w.group};
    int64_t scales = w.format == VLLM_INT4_GROUP ? w.k / w.group : 1;
    if (w.scale) row.scale = static_cast<const float *>(w.scale) + n * scales;
    if (w.zero) row.zero = static_cast<const uint8_t *>(w.zero) + n * scales;
    return row;
}

static VLLM_INLINE float half_at(const uint8_t *p) {
    uint16_t bits;
    memcpy(&bits, p, 2);
    return from_f16(bits);
}

// Two neighbouring halves.
static VLLM_INLINE void halves_at(const uint8_t *p, float &first, float &second) {
#ifdef __AVX2__
    int32_t bits;
    memcpy(&bits, p, 4);
    __m128 both = _mm_cvtph_ps(_mm_cvtsi32_si128(bits));
    first = _mm_cvtss_f32(both);
    second = _mm_cvtss_f32(_mm_movehdup_ps(both));
#else
    first = half_at(p);
    second = half_at(p + 2);
#endif
}

#if defined(__AVX2__)

// Two vectors of eight integers make one of sixteen floats, or one makes one of eight: emit w = q * scale + offset.
template <class Emit>
static VLLM_INLINE void emit_int(Emit &emit, int i, __m256i a, __m256i b, __m256 scale, __m256 offset) {
#if defined(VLLM_AVX512)
    __m512 q = _mm512_cvtepi32_ps(_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
    __m512 s = _mm512_insertf32x8(_mm512_castps256_ps512(scale), scale, 1);
    __m512 o = _mm512_insertf32x8(_mm512_castps256_ps512(offset), offset, 1);
    emit(i / 2, _mm512_fmadd_ps(q, s, o));
#else
    emit(i, _mm256_fmadd_ps(_mm256_cvtepi32_ps(a), scale, offset));
    emit(i + 1, _mm256_fmadd_ps(_mm256_cvtepi32_ps(b), scale, offset));
#endif
}

static VLLM_INLINE __m256i load16_twice(const uint8_t *p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}

static VLLM_INLINE __m256i load32(const uint8_t *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }

// Four vectors of four, `step` floats apart, transposed: vector e of the result goes to out + place(e).
template <class Place>
static VLLM_INLINE void transpose4(const float *in, int step, float *out, Place place) {
    __m128 t[4];
    for (int i = 0; i < 4; ++i) t[i] = _mm_loadu_ps(in + i * step);
    _MM_TRANSPOSE4_PS(t[0], t[1], t[2], t[3]);
    for (int e = 0; e < 4; ++e) _mm_storeu_ps(out + place(e), t[e]);
}

// Each fourth of 32 numbers to one vector: the order of K-quants.
static VLLM_INLINE void arrange_fourths(const float *in, float *out) {
    for (int h = 0; h < 2; ++h) transpose4(in + 16 * h, 4, out + 4 * h, [](int e) { return 8 * e; });
}

// Nibbles t = j and j + 4 of four dwords, j the call's number: 8 integers.
static VLLM_INLINE __m256i nibbles(__m256i twice, int j) {
    __m256i shift = _mm256_add_epi32(_mm256_setr_epi32(0, 0, 0, 0, 16, 16, 16, 16), _mm256_set1_epi32(4 * j));
    return _mm256_and_si256(_mm256_srlv_epi32(twice, shift), _mm256_set1_epi32(15));
}

#else

// Decoded in order by plain loops, which the compiler vectorises.
template <class Emit>
static VLLM_INLINE void emit_floats(Emit &emit, const float *values, int count) {
    for (int i = 0; i < count / VF; ++i) emit(i, vf_load(values + i * VF));
}

#endif

// --- rows of floats ----------------------------------------------------------------------------------------------------

template <int DTYPE>
struct Plain {
    static constexpr int CHUNK = VF;
    static constexpr int order(int i) { return i; }
    static VLLM_INLINE vf load(const uint8_t *p) {
        if (DTYPE == VLLM_FLOAT32) return vf_load(reinterpret_cast<const float *>(p));
        if (DTYPE == VLLM_BFLOAT16) return vf_load_bf16(reinterpret_cast<const uint16_t *>(p));
        return vf_load_f16(reinterpret_cast<const uint16_t *>(p));
    }
    template <class Emit>
    static VLLM_INLINE void decode(const Row &row, int64_t chunk, Emit emit) {
        constexpr int64_t bytes = DTYPE == VLLM_FLOAT32 ? 4 : 2;
        int64_t left = row.k - chunk * VF;
        const uint8_t *p = row.data + chunk * VF * bytes;
        if (__builtin_expect(left >= VF, 1)) {
            emit(0, load(p));
            return;
        }
        uint8_t rest[VF * 4] = {};
        memcpy(rest, p, static_cast<size_t>(left * bytes));
        emit(0, load(rest));
    }
};

// --- blocks of 32 --------------------------------------------------------------------------------------------------------

// Element of nibble t in dword l of a block whose low nibbles are its first half.
static constexpr int split_element(int l, int t) { return 4 * l + t / 2 + 16 * (t & 1); }

// BITS 4 or 5; MIN: w = d * q + m, else d * (q - 2^(BITS - 1)).
template <int BITS, bool MIN>
struct Nibble32 {
    static constexpr int CHUNK = 32;
    static constexpr int HEAD = MIN ? 4 : 2;
    static constexpr int BYTES = HEAD + (BITS == 5 ? 4 : 0) + 16;
    static constexpr int order(int i) {
#if defined(__AVX2__)
        int j = i / 8, lane = i % 8;
        return split_element(lane % 4, j + 4 * (lane / 4));
#else
        return i;
#endif
    }
#if defined(__AVX2__)
    static VLLM_INLINE void arrange(const float *in, float *out) {
        for (int half = 0; half < 2; ++half)
            transpose4(in + 16 * half, 4, out + 8 * half, [](int e) { return 16 * (e & 1) + 4 * (e >> 1); });
    }
#endif
    template <class Emit>
    static VLLM_INLINE void decode(const Row &row, int64_t chunk, Emit emit) {
        const uint8_t *p = row.data + chunk * BYTES;
        float d, m;
        if (MIN)
            halves_at(p, d, m);
        else
            d = half_at(p), m = -d * (BITS == 5 ? 16.0f : 8.0f);
        const uint8_t *qs = p + BYTES - 16;
        uint32_t high = 0;
        if (BITS == 5) memcpy(&high, p + HEAD, 4);
#if defined(__AVX2__)
        __m256i twice = load16_twice(qs);
        __m256 scale = _mm256_set1_ps(d), offset = _mm256_set1_ps(m);
        __m256i q[4];
        for (int j = 0; j < 4; ++j) {
            q[j] = nibbles(twice, j);
            if (BITS == 5) {
                __m256i at = _mm256_setr_epi32(split_element(0, j), split_element(1, j), split_element(2, j),
                                               split_element(3, j), split_element(0, j + 4), split_element(1, j + 4),
                                               split_element(2, j + 4), split_element(3, j + 4));
                __m256i bit = _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(high)), at);
                q[j] = _mm256_or_si256(q[j], _mm256_slli_epi32(_mm256_and_si256(bit, _mm256_set1_epi32(1)), 4));
            }
        }
        emit_int(emit, 0, q[0], q[1], scale, offset);
        emit_int(emit, 2, q[2], q[3], scale, offset);
#else
        float w[32];
        for (int i = 0; i < 16; ++i) {
            w[i] = d * static_cast<float>((qs[i] & 15) | ((high >> i & 1) << 4)) + m;
            w[i + 16] = d * static_cast<float>((qs[i] >> 4) | ((high >> (i + 16) & 1) << 4)) + m;
        }
        emit_floats(emit, w, 32);
#endif
    }
};

struct Q8_0 {
    static constexpr int CHUNK = 32;
    static constexpr int order(int i) { return i; }
    template <class Emit>
    static VLLM_INLINE void decode(const Row &row, int64_t chunk, Emit emit) {
        const uint8_t *p = row.data + chunk * 34;
        vf d = vf_set(half_at(p));
        for (int i = 0; i < 32 / VF; ++i)
            emit(i, vf_mul(d, vf_load_i8(reinterpret_cast<const int8_t *>(p + 2) + i * VF)));
    }
};

// --- blocks of 256 -------------------------------------------------------------------------------------------------------

// Scale and minimum of sub-block s: six bits each, packed into twelve bytes.
static VLLM_INLINE void k_scale(const uint8_t *p, int s, float &scale, float &min) {
    int sc = s < 4 ? p[s] & 63 : (p[s + 4] & 15) | (p[s - 4] >> 6 << 4);
    int mn = s < 4 ? p[s + 4] & 63 : (p[s + 4] >> 4) | (p[s] >> 6 << 4);
    scale = static_cast<float>(sc);
    min = static_cast<float>(mn);
}

// 64 numbers share 32 bytes: low nibbles are sub-block 2c, high ones 2c + 1. BITS 5 adds a bit for each from `qh`.
template <int BITS>
struct K45 {
    static constexpr int CHUNK = 64;
    static constexpr int BYTES = BITS == 4 ? 144 : 176;
    static constexpr int order(int i) {
#if defined(__AVX2__)
        int t = i / 8, lane = i % 8, j = t < 4 ? 2 * t : 2 * (t - 4) + 1;
        return 32 * (j & 1) + 4 * lane + j / 2;
#else
        return i;
#endif
    }
#if defined(__AVX2__)
    static VLLM_INLINE void arrange(const float *in, float *out) {
        for (int i = 0; i < CHUNK; i += 32) arrange_fourths(in + i, out + i);
    }
#endif
    template <class Emit>
    static VLLM_INLINE void decode(const Row &row, int64_t chunk, Emit emit) {
        const uint8_t *p = row.data + chunk / 4 * BYTES;
        int c = static_cast<int>(chunk % 4);
        float d, dmin, s0, s1, m0, m1;
        halves_at(p, d, dmin);
        k_scale(p + 4, 2 * c, s0, m0);
        k_scale(p + 4, 2 * c + 1, s1, m1);
        s0 *= d, s1 *= d, m0 *= -dmin, m1 *= -dmin;
        const uint8_t *qh = p + 16, *qs = p + BYTES - 128 + 32 * c;
#if defined(__AVX2__)
        __m256i v = load32(qs), h = _mm256_setzero_si256();
        if (BITS == 5) h = _mm256_srlv_epi32(load32(qh), _mm256_set1_epi32(2 * c));
        const __m256i mask = _mm256_set1_epi32(15), one = _mm256_set1_epi32(1);
        for (int sub = 0; sub < 2; ++sub) {
            __m256 scale = _mm256_set1_ps(sub ? s1 : s0), offset = _mm256_set1_ps(sub ? m1 : m0);
            __m256i q[4];
            for (int b = 0; b < 4; ++b) {
                q[b] = _mm256_and_si256(_mm256_srli_epi32(v, 8 * b + 4 * sub), mask);
                if (BITS == 5) {
                    __m256i bit = _mm256_and_si256(_mm256_srli_epi32(h, 8 * b + sub), one);
                    q[b] = _mm256_or_si256(q[b], _mm256_slli_epi32(bit, 4));
                }
            }
            emit_int(emit, 4 * sub, q[0], q[1], scale, offset);
            emit_int(emit, 4 * sub + 2, q[2], q[3], scale, offset);
        }
#else
        float w[64];
        for (int i = 0; i < 32; ++i) {
            int low = qs[i] & 15, high = qs[i] >> 4;
            if (BITS == 5) low |= (qh[i] >> (2 * c) & 1) << 4, high |= (qh[i] >> (2 * c + 1) & 1) << 4;
            w[i] = s0 * static_cast<float>(low) + m0;
            w[i + 32] = s1 * static_cast<float>(high) + m1;
        }
        emit_floats(emit, w, 64);
#endif
    }
};

// Halves of 128 numbers: 64 bytes of low nibbles, 32 of high pairs; a scale for each 16.
struct Q6_K {
    static constexpr int CHUNK = 128;
    static constexpr int order(int i) {
#if defined(__AVX2__)
        int quarter = i / 32, b = i / 8 % 4, lane = i % 8;
        return 32 * quarter + 4 * lane + b;
#else
        return i;
#endif
    }
#if defined(__AVX2__)
    static VLLM_INLINE void arrange(const float *in, float *out) {
        for (int i = 0; i < CHUNK; i += 32) arrange_fourths(in + i, out + i);
    }
#endif
    template <class Emit>
    static VLLM_INLINE void decode(const Row &row, int64_t chunk, Emit emit) {
        const uint8_t *p = row.data + chunk / 2 * 210;
        int half = static_cast<int>(chunk % 2);
        const uint8_t *ql = p + 64 * half, *qh = p + 128 + 32 * half;
        const int8_t *sc = reinterpret_cast<const int8_t *>(p + 192) + 8 * half;
        float d = half_at(p + 208);
#if defined(__AVX2__)
        const __m256i low = load32(ql), high = load32(ql + 32), pairs = load32(qh);
        const __m256i mask = _mm256_set1_epi32(15), two = _mm256_set1_epi32(3 << 4);
        for (int quarter = 0; quarter < 4; ++quarter) {
            float first = d * sc[2 * quarter], second = d * sc[2 * quarter + 1];
            __m256 scale = _mm256_setr_m128(_mm_set1_ps(first), _mm_set1_ps(second));
            __m256 offset = _mm256_mul_ps(scale, _mm256_set1_ps(-32.0f));
            __m256i v = quarter & 1 ? high : low, q[4];
            for (int b = 0; b < 4; ++b) {
                __m256i nibble = _mm256_and_si256(_mm256_srli_epi32(v, 8 * b + (quarter & 2 ? 4 : 0)), mask);
                int at = 8 * b + 2 * quarter;
                __m256i pair = at >= 4 ? _mm256_srli_epi32(pairs, at - 4) : _mm256_slli_epi32(pairs, 4 - at);
                q[b] = _mm256_or_si256(nibble, _mm256_and_si256(pair, two));
            }
            emit_int(emit, 4 * quarter, q[0], q[1], scale, offset);
            emit_int(emit, 4 * quarter + 2, q[2], q[3], scale, offset);
        }
#else
        float w[128];
        for (int quarter = 0; quarter < 4; ++quarter)
            for (int i = 0; i < 32; ++i) {
                int nibble = ql[i + 32 * (quarter & 1)] >> (quarter & 2 ? 4 : 0) & 15;
                int q = (nibble | (qh[i] >> (2 * quarter) & 3) << 4) - 32;
                w[32 * quarter + i] = d * sc[2 * quarter + i / 16] * static_cast<float>(q);
            }
        emit_floats(emit, w, 128);
#endif
    }
};

// --- int8 and int4 of our own ----------------------------------------------------------------------------------------------

struct Int8Channel {
    static constexpr int CHUNK = VF;
    static constexpr int order(int i) { return i; }
    template <class Emit>
    static VLLM_INLINE void decode(const Row &row, int64_t chunk, Emit emit) {
        const int8_t *p = reinterpret_cast<const int8_t *>(row.data) + chunk * VF;
        vf scale = vf_set(row.scale[0]);
        int64_t left = row.k - chunk * VF;
        if (__builtin_expect(left >= VF, 1)) {
            emit(0, vf_mul(scale, vf_load_i8(p)));
            return;
        }
        int8_t rest[VF] = {};
        memcpy(rest, p, static_cast<size_t>(left));
        emit(0, vf_mul(scale, vf_load_i8(rest)));
    }
};

// Groups are multiples of 32.
struct Int4Group {
    static constexpr int CHUNK = 32;
    static constexpr int order(int i) {
#if defined(__AVX2__)
        int j = i / 8, lane = i % 8;
        return 8 * (lane % 4) + j + 4 * (lane / 4);
#else
        return i;
#endif
    }
#if defined(__AVX2__)
    static VLLM_INLINE void arrange(const float *in, float *out) {
        for (int h = 0; h < 2; ++h) transpose4(in + 4 * h, 8, out + 4 * h, [](int e) { return 8 * e; });
    }
#endif
    template <class Emit>
    static VLLM_INLINE void decode(const Row &row, int64_t chunk, Emit emit) {
        const uint8_t *p = row.data + chunk * 16;
        int64_t g = chunk * 32 / row.group;
        float s = row.scale[g], m = -s * static_cast<float>(row.zero[g]);
#if defined(__AVX2__)
        __m256i twice = load16_twice(p);
        __m256 scale = _mm256_set1_ps(s), offset = _mm256_set1_ps(m);
        emit_int(emit, 0, nibbles(twice, 0), nibbles(twice, 1), scale, offset);
        emit_int(emit, 2, nibbles(twice, 2), nibbles(twice, 3), scale, offset);
#else
        float w[32];
        for (int i = 0; i < 16; ++i) {
            w[2 * i] = s * static_cast<float>(p[i] & 15) + m;
            w[2 * i + 1] = s * static_cast<float>(p[i] >> 4) + m;
        }
        emit_floats(emit, w, 32);
#endif
    }
};

// --- by number -------------------------------------------------------------------------------------------------------------

// body(Format{}) for the format of a matrix; false where it has no kernel.
template <class Body>
static VLLM_INLINE bool with_format(int32_t format, const Body &body) {
    switch (format) {
        case VLLM_ROWS_FLOAT32: body(Plain<VLLM_FLOAT32>{}); return true;
        case VLLM_ROWS_BFLOAT16: body(Plain<VLLM_BFLOAT16>{}); return true;
        case VLLM_ROWS_FLOAT16: body(Plain<VLLM_FLOAT16>{}); return true;
        case VLLM_Q4_0: body(Nibble32<4, false>{}); return true;
        case VLLM_Q4_1: body(Nibble32<4, true>{}); return true;
        case VLLM_Q5_0: body(Nibble32<5, false>{}); return true;
        case VLLM_Q5_1: body(Nibble32<5, true>{}); return true;
        case VLLM_Q8_0: body(Q8_0{}); return true;
        case VLLM_Q4_K: body(K45<4>{}); return true;
        case VLLM_Q5_K: body(K45<5>{}); return true;
        case VLLM_Q6_K: body(Q6_K{}); return true;
        case VLLM_INT8_CHANNEL: body(Int8Channel{}); return true;
        case VLLM_INT4_GROUP: body(Int4Group{}); return true;
        default: return false;
    }
}

VLLM_VARIANT_END

#endif
