// The tiles of AMX as far as the kernels use them, imitated: eight tiles a thread, products of bfloat16 in float, of bytes in
// integers.
#ifndef VLLM_TESTS_AMX_IMITATED_H
#define VLLM_TESTS_AMX_IMITATED_H

#include <stdint.h>
#include <string.h>

namespace {

struct ImitatedTiles {
    uint16_t row_bytes[8];
    uint8_t rows[8];
    uint8_t data[8][16][64];
};

thread_local ImitatedTiles imitated;

inline float imitated_float(const uint8_t *at) {
    uint16_t bits;
    memcpy(&bits, at, 2);
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

// The 64 bytes of LDTILECFG: palette, start row, 14 reserved, 16 row lengths in bytes, 16 numbers of rows.
inline void imitated_tile_loadconfig(const void *config) {
    const uint8_t *bytes = static_cast<const uint8_t *>(config);
    memset(&imitated, 0, sizeof(imitated));
    if (bytes[0] != 1) return;
    memcpy(imitated.row_bytes, bytes + 16, sizeof(imitated.row_bytes));
    memcpy(imitated.rows, bytes + 48, sizeof(imitated.rows));
}

inline void imitated_tile_release() { memset(&imitated, 0, sizeof(imitated)); }
inline void imitated_tile_zero(int tile) { memset(imitated.data[tile], 0, sizeof(imitated.data[tile])); }

inline void imitated_tile_loadd(int tile, const void *base, int64_t stride) {
    imitated_tile_zero(tile);
    for (int row = 0; row < imitated.rows[tile]; ++row)
        memcpy(imitated.data[tile][row], static_cast<const char *>(base) + row * stride, imitated.row_bytes[tile]);
}

inline void imitated_tile_stored(int tile, void *base, int64_t stride) {
    for (int row = 0; row < imitated.rows[tile]; ++row)
        memcpy(static_cast<char *>(base) + row * stride, imitated.data[tile][row], imitated.row_bytes[tile]);
}

// sums [M, N] += a [M, K pairs] times b [K pairs, N], pairs of bfloat16.
inline void imitated_tile_dpbf16ps(int sums, int a, int b) {
    for (int m = 0; m < imitated.rows[sums]; ++m)
        for (int k = 0; k < imitated.row_bytes[a] / 4; ++k)
            for (int n = 0; n < imitated.row_bytes[sums] / 4; ++n) {
                float sum;
                memcpy(&sum, imitated.data[sums][m] + 4 * n, 4);
                for (int half = 0; half < 2; ++half)
                    sum += imitated_float(imitated.data[a][m] + 4 * k + 2 * half) *
                           imitated_float(imitated.data[b][k] + 4 * n + 2 * half);
                memcpy(imitated.data[sums][m] + 4 * n, &sum, 4);
            }
}

// sums [M, N] += a [M, K groups] times b [K groups, N], groups of four signed bytes.
inline void imitated_tile_dpbssd(int sums, int a, int b) {
    for (int m = 0; m < imitated.rows[sums]; ++m)
        for (int k = 0; k < imitated.row_bytes[a] / 4; ++k)
            for (int n = 0; n < imitated.row_bytes[sums] / 4; ++n) {
                int32_t sum;
                memcpy(&sum, imitated.data[sums][m] + 4 * n, 4);
                for (int i = 0; i < 4; ++i)
                    sum += static_cast<int8_t>(imitated.data[a][m][4 * k + i]) * static_cast<int8_t>(imitated.data[b][k][4 * n + i]);
                memcpy(imitated.data[sums][m] + 4 * n, &sum, 4);
            }
}

}  // namespace

// The compilers' headers have these names, too.
#undef _tile_loadconfig
#define _tile_loadconfig imitated_tile_loadconfig
#undef _tile_release
#define _tile_release imitated_tile_release
#undef _tile_zero
#define _tile_zero imitated_tile_zero
#undef _tile_loadd
#define _tile_loadd imitated_tile_loadd
#undef _tile_stream_loadd
#define _tile_stream_loadd imitated_tile_loadd
#undef _tile_stored
#define _tile_stored imitated_tile_stored
#undef _tile_dpbf16ps
#define _tile_dpbf16ps imitated_tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_dpbssd imitated_tile_dpbssd

#endif
