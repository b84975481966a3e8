// Products with inputs rounded to eight bits, `--activation int8`: integer dot products of blocks of 32.
//
// A block of a weight is w = scale * u + offset with u in 0 .. 127 as bytes (or -127 .. 127, SIGNED), one of x is q * step with
// q in -127 .. 127. Then sum w x = step * scale * sum u q + offset * (step * sum q): the first sum is exact in integers, the
// second needs the block's sum of x alone. All blocks are in the order of the inputs.
#ifndef VLLM_CPU_INT8_H
#define VLLM_CPU_INT8_H

#include "formats.h"
#include "panels.h"

#ifdef __AVX2__

VLLM_VARIANT_BEGIN

// emit(block of the chunk, bytes, scale, offset): scale a vector, since Q6_K has two in a block.
//
// HEADS: blocks of 32 that begin with one or two halves. `numbers` are the bytes of one; `heads` the halves of COUNT of them as
// pairs, scale and what OFFSET times is the offset: those of four blocks are then converted at once.
template <int BYTES, int COUNT>
static VLLM_INLINE __m128i heads_at(const uint8_t *p) {
    int32_t head[4] = {};
    for (int i = 0; i < COUNT; ++i) memcpy(head + i, p + i * BYTES, 4);
    return _mm_setr_epi32(head[0], head[1], head[2], head[3]);
}

template <int WIDTH, bool WITH_MIN>
struct Nibble32x8 {
    static constexpr bool SIGNED = false, HEADS = true, MIN = WITH_MIN;
    static constexpr int BITS = WIDTH, BLOCKS = 1, HEAD = MIN ? 4 : 2, BYTES = HEAD + (BITS == 5 ? 4 : 0) + 16;
    static constexpr float OFFSET = MIN ? 1.0f : BITS == 5 ? -16.0f : -8.0f;
    static VLLM_INLINE __m256i numbers(const uint8_t *p) {
        __m128i qs = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p + BYTES - 16));
        __m256i both = _mm256_srlv_epi32(_mm256_broadcastsi128_si256(qs), _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
        __m256i u = _mm256_and_si256(both, _mm256_set1_epi8(15));
        if (BITS == 5) {
            uint32_t high;
            memcpy(&high, p + HEAD, 4);
            // Byte i gets bit i: its byte of `high` everywhere, then its own bit.
            __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(high)),
                                                _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
            __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201ull));
            __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
            u = _mm256_or_si256(u, _mm256_and_si256(set, _mm256_set1_epi8(16)));
        }
        return u;
    }
    template <int COUNT>
    static VLLM_INLINE __m128i heads(const uint8_t *p) {
        __m128i found = heads_at<BYTES, COUNT>(p);
        if (MIN) return found;
        return _mm_blend_epi16(found, _mm_slli_epi32(found, 16), 0xaa);
    }
    template <class Emit>
    static VLLM_INLINE void decode(const Row &row, int64_t chunk, Emit emit) {
        const uint8_t *p = row.data + chunk * BYTES;
        float d, m;
        if (MIN)
            halves_at(p, d, m);
        else
            d = half_at(p), m = d * OFFSET;
        emit(0, numbers(p), _mm256_set1_ps(d), m);
    }
};

struct Q8_0x8 {
    static constexpr int BITS = 8, BLOCKS = 1, BYTES = 34;
    static constexpr bool SIGNED = true, HEADS = true, MIN = false;
    static constexpr float OFFSET = 0.0f;
    static VLLM_INLINE __m256i numbers(const uint8_t *p) { return load32(p + 2); }
    template <int COUNT>
    static VLLM_INLINE __m128i heads(const uint8_t *p) {
        return _mm_and_si128(heads_at<BYTES, COUNT>(p), _mm_set1_epi32(0xffff));  // the other two bytes are numbers
    }
    template <class Emit>
    static VLLM_INLINE void decode(const Row &row, int64_t chunk, Emit emit) {
        const uint8_t *p = row.data + chunk * BYTES;
        emit(0, numbers(p), _mm256_set1_ps(half_at(p)), 0.0f);
    }
};

template <int WIDTH>
struct K45x8 {
    static constexpr int BITS = WIDTH, BLOCKS = 2;
    static constexpr bool SIGNED = false, HEADS = false;
    template <class Emit>
    static VLLM_INLINE void decode(const Row &row, int64_t chunk, Emit emit) {
        constexpr int BYTES = K45<BITS>::BYTES;
        const uint8_t *p = row.data + chunk / 4 * BYTES;
        int c = static_cast<int>(chunk % 4);
        float d, dmin, s0, s1, m0, m1;
        halves_at(p, d, dmin);
        k_scale(p + 4, 2 * c, s0, m0);
        k_scale(p + 4, 2 * c + 1, s1, m1);
        __m256i v = load32(p + BYTES - 128 + 32 * c), mask = _mm256_set1_epi8(15);
        __m256i low = _mm256_and_si256(v, mask), high = _mm256_and_si256(_mm256_srli_epi16(v, 4), mask);
        if (BITS == 5) {
            __m256i h = _mm256_srlv_epi32(load32(p + 16), _mm256_set1_epi32(2 * c)), one = _mm256_set1_epi8(1);
            low = _mm256_or_si256(low, _mm256_slli_epi16(_mm256_and_si256(h, one), 4));
            high = _mm256_or_si256(high, _mm256_slli_epi16(_mm256_and_si256(_mm256_srli_epi16(h, 1), one), 4));
        }
        emit(0, low, _mm256_set1_ps(d * s0), -dmin * m0);
        emit(1, high, _mm256_set1_ps(d * s1), -dmin * m1);
    }
};

// Numbers less 32 are signed: no offset is needed, which would have two values in a block.
struct Q6_Kx8 {
    static constexpr int BITS = 6, BLOCKS = 4;
    static constexpr bool SIGNED = true, HEADS = false;
    template <class Emit>
    static VLLM_INLINE void decode(const Row &row, int64_t chunk, Emit emit) {
        const uint8_t *p = row.data + chunk / 2 * 210;
        int half = static_cast<int>(chunk % 2);
        const uint8_t *ql = p + 64 * half, *qh = p + 128 + 32 * half;
        const int8_t *sc = reinterpret_cast<const int8_t *>(p + 192) + 8 * half;
        float d = half_at(p + 208);
        const __m256i low = load32(ql), high = load32(ql + 32), pairs = load32(qh);
        const __m256i mask = _mm256_set1_epi8(15), two = _mm256_set1_epi8(3);
        for (int quarter = 0; quarter < 4; ++quarter) {
            __m256i v = quarter & 1 ? high : low;
            __m256i nibble = _mm256_and_si256(quarter & 2 ? _mm256_srli_epi16(v, 4) : v, mask);
            __m256i pair = _mm256_and_si256(_mm256_srli_epi16(pairs, 2 * quarter), two);
            __m256i q = _mm256_sub_epi8(_mm256_or_si256(nibble, _mm256_slli_epi16(pair, 4)), _mm256_set1_epi8(32));
            __m256 scale = _mm256_setr_m128(_mm_set1_ps(d * sc[2 * quarter]), _mm_set1_ps(d * sc[2 * quarter + 1]));
            emit(quarter, q, scale, 0.0f);
        }
    }
};

struct Int8Channelx8 {
    static constexpr int BITS = 8, BLOCKS = 1;
    static constexpr bool SIGNED = true, HEADS = false;
    template <class Emit>
    static VLLM_INLINE void decode(const Row &row, int64_t chunk, Emit emit) {
        emit(0, load32(row.data + chunk * 32), _mm256_set1_ps(row.scale[0]), 0.0f);
    }
};

struct Int4Groupx8 {
    static constexpr int BITS = 4, BLOCKS = 1;
    static constexpr bool SIGNED = false, HEADS = false;
    template <class Emit>
    static VLLM_INLINE void decode(const Row &row, int64_t chunk, Emit emit) {
        int64_t g = chunk * 32 / row.group;
        __m128i qs = _mm_loadu_si128(reinterpret_cast<const __m128i *>(row.data + chunk * 16)), mask = _mm_set1_epi8(15);
        __m128i even = _mm_and_si128(qs, mask), odd = _mm_and_si128(_mm_srli_epi16(qs, 4), mask);
        __m256i u = _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
        float s = row.scale[g];
        emit(0, u, _mm256_set1_ps(s), -s * static_cast<float>(row.zero[g]));
    }
};

// Eight sums of four products of bytes.
template <bool SIGNED>
static VLLM_INLINE __m256i dot32(__m256i w, __m256i q) {
    __m256i u = SIGNED ? _mm256_sign_epi8(w, w) : w, x = SIGNED ? _mm256_sign_epi8(q, w) : q;
#ifdef VLLM_VNNI
    return _mm256_dpbusd_epi32(_mm256_setzero_si256(), u, x);
#else
    return _mm256_madd_epi16(_mm256_maddubs_epi16(u, x), _mm256_set1_epi16(1));
#endif
}

template <class Body>
static VLLM_INLINE bool with_format8(int32_t format, const Body &body) {
    switch (format) {
        case VLLM_Q4_0: body(Nibble32x8<4, false>{}); return true;
        case VLLM_Q4_1: body(Nibble32x8<4, true>{}); return true;
        case VLLM_Q5_0: body(Nibble32x8<5, false>{}); return true;
        case VLLM_Q5_1: body(Nibble32x8<5, true>{}); return true;
        case VLLM_Q8_0: body(Q8_0x8{}); return true;
        case VLLM_Q4_K: body(K45x8<4>{}); return true;
        case VLLM_Q5_K: body(K45x8<5>{}); return true;
        case VLLM_Q6_K: body(Q6_Kx8{}); return true;
        case VLLM_INT8_CHANNEL: body(Int8Channelx8{}); return true;
        case VLLM_INT4_GROUP: body(Int4Groupx8{}); return true;
        default: return false;
    }
}

VLLM_VARIANT_END

#endif

#endif
