// Tiles of AMX: their shapes, and the instructions that only functions compiled for them may use. Who calls these asks the CPU.
#ifndef VLLM_CPU_TILES_H
#define VLLM_CPU_TILES_H

#include "simd.h"

#ifdef VLLM_IMITATED
#include "amx_imitated.h"
#define VLLM_TARGET(instructions)
#else
#define VLLM_TARGET(instructions) __attribute__((target(instructions)))
#endif

VLLM_VARIANT_BEGIN

constexpr int TILE_SIDE = 16;  // rows of a tile, and its columns of 32 bits

// A tile's shape. Tiles 0 to 3 are sums; `a` that of the left factors, 4 and 5, and `b` that of the right ones, 6 and 7.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {TILE_SIDE, TILE_SIDE, TILE_SIDE, TILE_SIDE, TILE_SIDE, TILE_SIDE, TILE_SIDE, TILE_SIDE};
    // Products over `bytes` bytes of K.
    explicit TileConfig(int bytes) {
        row_bytes[4] = row_bytes[5] = static_cast<uint16_t>(bytes);
        rows[6] = rows[7] = static_cast<uint8_t>(bytes / 4);
    }
    // For the instruction: compilers think that it reads the first eight bytes alone, and leave the others unwritten.
    const void *written() const {
        __asm__ __volatile__("" : : "r"(this) : "memory");
        return this;
    }
};

#if defined(VLLM_AVX512) && defined(VLLM_AMX)

// Rows of four numbers of 32 bits: `at` of rows 0, 4, 8 and 12 below `from`.
static inline __m512 fourths(const float *from) {
    __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(from));
    v = _mm512_insertf32x4(v, _mm_loadu_ps(from + 4 * TILE_SIDE), 1);
    v = _mm512_insertf32x4(v, _mm_loadu_ps(from + 8 * TILE_SIDE), 2);
    return _mm512_insertf32x4(v, _mm_loadu_ps(from + 12 * TILE_SIDE), 3);
}

// A tile of 16 by 16 numbers of 32 bits, transposed where it is.
static inline void turn_tile(float *tile) {
    __m512d turned[TILE_SIDE];
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
        const float *from = tile + 4 * q;
        const __m512 a = fourths(from), b = fourths(from + TILE_SIDE), c = fourths(from + 2 * TILE_SIDE), d = fourths(from + 3 * TILE_SIDE);
        const __m512d ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b)), cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
        const __m512d ab2 = _mm512_castps_pd(_mm512_unpackhi_ps(a, b)), cd2 = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
        turned[4 * q] = _mm512_unpacklo_pd(ab, cd), turned[4 * q + 1] = _mm512_unpackhi_pd(ab, cd);
        turned[4 * q + 2] = _mm512_unpacklo_pd(ab2, cd2), turned[4 * q + 3] = _mm512_unpackhi_pd(ab2, cd2);
    }
    for (int i = 0; i < TILE_SIDE; ++i) _mm512_storeu_ps(tile + i * TILE_SIDE, _mm512_castpd_ps(turned[i]));
}

#endif

VLLM_VARIANT_END

#endif
