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

VLLM_VARIANT_END

#endif
