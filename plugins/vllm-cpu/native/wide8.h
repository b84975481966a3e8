// One row of x in eight bits against one of a weight, 64 numbers at a time: integer dot products by AVX-512 VNNI.
//
// The scheme is that of int8.h. Numbers of a weight are bytes without a sign here, since the instruction takes one operand
// of each kind; what was taken from them is a share of the sum of x. Factors of four or eight blocks are made at once, and
// spread over the lanes that hold these blocks' sums.
#ifndef VLLM_CPU_WIDE8_H
#define VLLM_CPU_WIDE8_H

#include "int8.h"

#ifdef __AVX512VNNI__

VLLM_VARIANT_BEGIN

// How far ahead of what is read memory is asked for. Rows are short, and a core's own guesses end with them.
constexpr int64_t WIDE_AHEAD = 4096;

// Factors of a row's blocks times their sums: `sums` in any lane, offsets in the odd lanes of `offsets`.
struct WideSums {
    __m512 sums[2];
    __m512 offsets;
};

template <int BYTES>
static VLLM_INLINE void ask_ahead(const uint8_t *p) {
    for (int at = 0; at < BYTES; at += 64) __builtin_prefetch(p + WIDE_AHEAD + at);
}

static VLLM_INLINE __m512i low_nibbles(__m512i v, __m512i shifts) {
    return _mm512_and_si512(_mm512_srlv_epi32(v, shifts), _mm512_set1_epi8(15));
}

// Sixteen bytes of four blocks, the low nibbles of which are their first halves.
static VLLM_INLINE void split_nibbles(__m512i v, __m512i u[2]) {
    const __m512i mask = _mm512_set1_epi8(15);
    u[0] = _mm512_and_si512(v, mask), u[1] = _mm512_and_si512(_mm512_srli_epi16(v, 4), mask);
}

// Sixteen bytes of two blocks, each of them twice.
static VLLM_INLINE __m512i nibbles_in_order(__m512i v) {
    return low_nibbles(v, _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 0, 0, 0, 0, 4, 4, 4, 4));
}

static VLLM_INLINE __m512 dot64(__m512i u, const int8_t *q) {
    return _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), u, _mm512_loadu_si512(q)));
}

// Eight lanes of `first`, eight of `second`.
static VLLM_INLINE __m512i halves_of(int first, int second) {
    return _mm512_inserti64x4(_mm512_set1_epi32(first), _mm256_set1_epi32(second), 1);
}

// --- blocks of 32 ----------------------------------------------------------------------------------------------------------
//
// Two halves begin each block, its scale and what OFFSET times is the offset, or one that is both: `four` and `two` give those
// of four and two blocks as pairs. HALVES: the numbers of four blocks are two vectors, first halves of the blocks and second
// ones, to be multiplied with x that lies so; else they are in order, as those of two are.

struct WideQ4_1 {
    static constexpr int BYTES = 20;
    static constexpr bool HALVES = true;
    static constexpr float OFFSET = 1.0f;
    static VLLM_INLINE __m128i four(const uint8_t *p, __m512i u[2]) {
        const __m512i numbers = _mm512_setr_epi32(1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 14, 16, 17, 18, 19);
        const __m512i a = _mm512_loadu_si512(p), b = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p + 64)));
        split_nibbles(_mm512_permutex2var_epi32(a, numbers, b), u);
        return _mm512_castsi512_si128(_mm512_permutexvar_epi32(_mm512_zextsi128_si512(_mm_setr_epi32(0, 5, 10, 15)), a));
    }
    static VLLM_INLINE __m128i two(const uint8_t *p, __m512i &u) {
        const __m512i twice = _mm512_setr_epi32(1, 2, 3, 4, 1, 2, 3, 4, 6, 7, 8, 9, 6, 7, 8, 9);
        const __m512i a = _mm512_maskz_loadu_epi32(0x3ff, p);
        u = nibbles_in_order(_mm512_permutexvar_epi32(twice, a));
        return _mm512_castsi512_si128(_mm512_permutexvar_epi32(_mm512_zextsi128_si512(_mm_setr_epi32(0, 5, 0, 0)), a));
    }
};

// One half a block, given twice: eight of it are the offset.
struct WideQ4_0 {
    static constexpr int BYTES = 18;
    static constexpr bool HALVES = true;
    static constexpr float OFFSET = -8.0f;
    static VLLM_INLINE __m128i four(const uint8_t *p, __m512i u[2]) {
        // Words 1 to 8, 10 to 17, 19 to 26 and 28 to 35.
        const __m512i first = _mm512_broadcast_i32x4(_mm_setr_epi16(1, 2, 3, 4, 5, 6, 7, 8));
        const __m512i step = _mm512_setr_epi64(0, 0, NINES, NINES, 2 * NINES, 2 * NINES, 3 * NINES, 3 * NINES);
        const __m512i a = _mm512_loadu_si512(p), b = _mm512_castsi128_si512(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p + 64)));
        split_nibbles(_mm512_permutex2var_epi16(a, _mm512_add_epi16(first, step), b), u);
        const __m512i heads = _mm512_zextsi128_si512(_mm_setr_epi16(0, 0, 9, 9, 18, 18, 27, 27));
        return _mm512_castsi512_si128(_mm512_permutexvar_epi16(heads, a));
    }
    static VLLM_INLINE __m128i two(const uint8_t *p, __m512i &u) {
        // Words 1 to 8 twice, then 10 to 17 twice.
        const __m512i first = _mm512_broadcast_i32x4(_mm_setr_epi16(1, 2, 3, 4, 5, 6, 7, 8));
        const __m512i twice = _mm512_mask_add_epi16(first, 0xffff0000u, first, _mm512_set1_epi16(9));
        const __m512i a = _mm512_maskz_loadu_epi16(0x3ffff, p);
        u = nibbles_in_order(_mm512_permutexvar_epi16(twice, a));
        const __m512i heads = _mm512_zextsi128_si512(_mm_setr_epi16(0, 0, 9, 9, 0, 0, 0, 0));
        return _mm512_castsi512_si128(_mm512_permutexvar_epi16(heads, a));
    }

  private:
    static constexpr int64_t NINES = 0x0009000900090009;
};

struct WideQ8_0 {
    static constexpr int BYTES = 34;
    static constexpr bool HALVES = false;
    static constexpr float OFFSET = -128.0f;
    static VLLM_INLINE __m128i four(const uint8_t *p, __m512i u[2]) {
        u[0] = numbers(p), u[1] = numbers(p + 2 * BYTES);
        return twice(heads_at<BYTES, 4>(p));
    }
    static VLLM_INLINE __m128i two(const uint8_t *p, __m512i &u) {
        u = numbers(p);
        return twice(heads_at<BYTES, 2>(p));
    }

  private:
    static VLLM_INLINE __m512i numbers(const uint8_t *p) {
        const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(load32(p + 2)), load32(p + BYTES + 2), 1);
        return _mm512_xor_si512(both, _mm512_set1_epi8(-128));
    }
    static VLLM_INLINE __m128i twice(__m128i heads) { return _mm_blend_epi16(heads, _mm_slli_epi32(heads, 16), 0xaa); }
};

// Four blocks of a row. `q` as the format has it.
template <class Format>
static VLLM_INLINE void wide_four(const uint8_t *p, const int8_t *q, const float *facts, WideSums &to) {
    ask_ahead<4 * Format::BYTES>(p);
    __m512i u[2];
    const __m128i heads = Format::four(p, u);
    const __m512 both = _mm512_zextps256_ps512(_mm256_mul_ps(_mm256_cvtph_ps(heads), _mm256_loadu_ps(facts)));
    to.offsets = _mm512_add_ps(to.offsets, both);
    if (Format::HALVES) {
        const __m512i dots = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), u[0], _mm512_loadu_si512(q)), u[1],
                                                 _mm512_loadu_si512(q + 64));
        const __m512i places = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
        to.sums[0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), _mm512_permutexvar_ps(places, both), to.sums[0]);
        return;
    }
    to.sums[0] = _mm512_fmadd_ps(dot64(u[0], q), _mm512_permutexvar_ps(halves_of(0, 2), both), to.sums[0]);
    to.sums[1] = _mm512_fmadd_ps(dot64(u[1], q + 64), _mm512_permutexvar_ps(halves_of(4, 6), both), to.sums[1]);
}

// Two blocks of a row; numbers of x in order.
template <class Format>
static VLLM_INLINE void wide_two(const uint8_t *p, const int8_t *q, const float *facts, WideSums &to) {
    __m512i u;
    const __m128i heads = Format::two(p, u);
    const __m512 both = _mm512_zextps128_ps512(_mm_mul_ps(_mm_cvtph_ps(heads), _mm_loadu_ps(facts)));
    to.offsets = _mm512_add_ps(to.offsets, both);
    to.sums[1] = _mm512_fmadd_ps(dot64(u, q), _mm512_permutexvar_ps(halves_of(0, 2), both), to.sums[1]);
}

// --- blocks of 256: `add` takes one ----------------------------------------------------------------------------------------

template <int BITS>
struct WideK45 {
    static constexpr int BYTES = K45<BITS>::BYTES;
    static constexpr float OFFSET = -1.0f;
    static VLLM_INLINE void add(const uint8_t *p, const int8_t *q, const float *facts, WideSums &to) {
        // Eight scales and eight minima of six bits: of each four, then the low bits of the others, their high two above the first.
        uint32_t head, packed[3];
        memcpy(&head, p, 4);
        memcpy(packed, p + 4, 12);
        const uint32_t six = 0x3f3f3f3f, four = 0x0f0f0f0f, two = 0x03030303;
        const uint64_t high_scales = (packed[2] & four) | ((packed[0] >> 6 & two) << 4);
        const uint64_t high_minima = (packed[2] >> 4 & four) | ((packed[1] >> 6 & two) << 4);
        const __m128i scales = _mm_cvtsi64_si128(static_cast<int64_t>(high_scales << 32 | (packed[0] & six)));
        const __m128i minima = _mm_cvtsi64_si128(static_cast<int64_t>(high_minima << 32 | (packed[1] & six)));
        const __m512 each = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(scales, minima)));
        const __m128 steps = _mm_cvtph_ps(_mm_cvtsi32_si128(static_cast<int>(head)));
        const __m512 wide = _mm512_castpd_ps(_mm512_broadcastsd_pd(_mm_castps_pd(steps)));
        const __m512 both = _mm512_mul_ps(_mm512_mul_ps(each, wide), _mm512_loadu_ps(facts));
        to.offsets = _mm512_add_ps(to.offsets, both);
        const uint8_t *numbers = p + BYTES - 128;
        const __m512i bits = BITS == 5 ? _mm512_broadcast_i64x4(load32(p + 16)) : _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
            __m512i u = low_nibbles(_mm512_broadcast_i64x4(load32(numbers + 32 * c)), halves_of(0, 4));
            if (BITS == 5) {
                // Bit 2 c, in the upper half the next one, to where 16 is: within a byte, whatever its neighbours get.
                const __m512i bit = _mm512_rorv_epi32(bits, halves_of((2 * c - 4) & 31, (2 * c - 3) & 31));
                u = _mm512_ternarylogic_epi32(u, bit, _mm512_set1_epi8(16), 0xf8);  // u | (bit & 16)
            }
            const __m512 factor = _mm512_permutexvar_ps(halves_of(4 * c, 4 * c + 2), both);
            to.sums[c % 2] = _mm512_fmadd_ps(dot64(u, q + 64 * c), factor, to.sums[c % 2]);
        }
    }
};

// Scales are of 16 numbers, and the sum of x is known of 32: what was taken from the numbers is a dot product of its own.
struct WideQ6_K {
    static constexpr int BYTES = 210;
    static constexpr float OFFSET = 0.0f;
    static VLLM_INLINE void add(const uint8_t *p, const int8_t *q, const float *facts, WideSums &to) {
        const __m512i twice = _mm512_setr_epi32(0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14);
        const __m128i scales = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p + 192));
        const __m512 each = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(scales));
        const __m512 steps = _mm512_permutexvar_ps(twice, _mm512_loadu_ps(facts));
        const __m512 both = _mm512_mul_ps(_mm512_mul_ps(each, _mm512_set1_ps(half_at(p + 208))), steps);
        const __m512i quarters = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
            const __m512i v = _mm512_loadu_si512(p + 64 * (c / 2));
            const __m512i nibbles = low_nibbles(v, _mm512_set1_epi32(c % 2 * 4));
            const __m512i pairs = _mm512_broadcast_i64x4(load32(p + 128 + 32 * (c / 2)));
            // Bits 4 c to 4 c + 1 of a half, in the upper half the next two, to where 16 and 32 are.
            const __m512i pair = _mm512_rorv_epi32(pairs, c % 2 ? halves_of(0, 2) : halves_of(28, 30));
            const __m512i u = _mm512_ternarylogic_epi32(nibbles, pair, _mm512_set1_epi8(48), 0xf8);  // nibbles | (pair & 48)
            const __m512i x = _mm512_loadu_si512(q + 64 * c);
            const __m512i taken = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(32), x);
            const __m512i dot = _mm512_sub_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), u, x), taken);
            const __m512 factor = _mm512_permutexvar_ps(_mm512_add_epi32(quarters, _mm512_set1_epi32(4 * c)), both);
            to.sums[c % 2] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), factor, to.sums[c % 2]);
        }
    }
};

VLLM_VARIANT_END

#endif

#endif
