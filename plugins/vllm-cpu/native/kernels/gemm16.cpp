// Products of many rows where inputs and weights are bfloat16 and the CPU has instructions for them: AVX-512 BF16, or the tiles
// of AMX. Functions with these instructions are compiled for them; who calls them asks the CPU.
#include "linear.h"

#include "processor.h"
#include "panels.h"
#include "threads.h"

#ifdef VLLM_IMITATED
#include "amx_imitated.h"
#define VLLM_TARGET(instructions)
#else
#define VLLM_TARGET(instructions) __attribute__((target(instructions)))
#endif

VLLM_VARIANT_BEGIN

#if defined(VLLM_AVX512) && defined(VLLM_BF16)

namespace {

constexpr int COLUMNS = PANEL_COLUMNS;
constexpr int ROWS = 16;  // of a tile of AMX, and what the registers of AVX-512 hold
constexpr int TILES = 4;

// Sixteen rows of the weight as [k / 2, columns, 2], zeros from K to kp.
void unpack(const vllm_matrix &w, int64_t n, int64_t count, int64_t kp, uint16_t *panel) {
    const uint16_t *rows[COLUMNS];
    for (int64_t c = 0; c < COLUMNS; ++c)
        rows[c] = reinterpret_cast<const uint16_t *>(static_cast<const char *>(w.data) +
                                                     (n + (c < count ? c : count - 1)) * w.row_bytes);
    int64_t k = 0;
    for (; k + 16 <= w.k; k += 16)
        for (int64_t first = 0; first < COLUMNS; first += 8) {
            __m256i part[8];
            for (int r = 0; r < 8; ++r) part[r] = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(rows[first + r] + k));
            transpose8(part);
            for (int s = 0; s < 8; ++s)
                _mm256_storeu_si256(reinterpret_cast<__m256i *>(panel + ((k / 2 + s) * COLUMNS + first) * 2), part[s]);
        }
    for (; k < kp; ++k)
        for (int64_t c = 0; c < COLUMNS; ++c) panel[(k / 2 * COLUMNS + c) * 2 + k % 2] = k < w.k ? rows[c][k] : 0;
}

// out [ROWS, 16] = rows of x [.., kp] times the panel; `lines` are the rows.
VLLM_TARGET("avx512bf16") void multiply_vectors(const uint16_t *const *lines, const uint16_t *panel, int64_t kp, float *out) {
    __m512 sums[ROWS];
    for (int m = 0; m < ROWS; ++m) sums[m] = _mm512_setzero_ps();
    for (int64_t i = 0; i < kp; i += 2) {
        const __m512i w = _mm512_loadu_si512(panel + i * COLUMNS);
        for (int m = 0; m < ROWS; ++m) {
            int32_t pair;
            memcpy(&pair, lines[m] + i, 4);
            sums[m] = _mm512_dpbf16_ps(sums[m], reinterpret_cast<__m512bh>(w),
                                       reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)));
        }
    }
    for (int m = 0; m < ROWS; ++m) _mm512_storeu_ps(out + m * COLUMNS, sums[m]);
}

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {ROWS, ROWS, ROWS, ROWS, ROWS, ROWS, ROWS};
};

// out [TILES * ROWS, 16] of as many neighbouring rows, by tiles of 16 rows and 32 numbers of K: sums in tiles 0 to 3, since a
// chain of products in one waits for each, x in 4 and 5, weights in 6.
VLLM_TARGET("amx-tile,amx-bf16") void multiply_tiles(const uint16_t *x, const uint16_t *panel, int64_t kp, float *out) {
    const TileConfig config;
    const int64_t below = ROWS * kp;
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < kp; i += 32) {
        _tile_loadd(6, panel + i * COLUMNS, COLUMNS * 4);
        _tile_loadd(4, x + i, kp * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, x + i + below, kp * 2);
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(4, x + i + 2 * below, kp * 2);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(5, x + i + 3 * below, kp * 2);
        _tile_dpbf16ps(3, 5, 6);
    }
    _tile_stored(0, out, COLUMNS * 4);
    _tile_stored(1, out + ROWS * COLUMNS, COLUMNS * 4);
    _tile_stored(2, out + 2 * ROWS * COLUMNS, COLUMNS * 4);
    _tile_stored(3, out + 3 * ROWS * COLUMNS, COLUMNS * 4);
    _tile_release();
}

}  // namespace

bool multiplies16() { return cpu_has_avx512bf16(); }

bool multiply_columns16(const Columns &one, const Inputs16 &in, const Output &output) {
    uint16_t *panel = static_cast<uint16_t *>(scratch(2, static_cast<size_t>(in.kp * COLUMNS * 2)));
    if (!panel) return false;
    unpack(*one.w, one.n, one.count, in.kp, panel);
    alignas(64) float products[TILES * ROWS * COLUMNS];
    for (int64_t m0 = 0; m0 < in.rows;) {
        const bool tiles = cpu_has_amx() && m0 + TILES * ROWS <= in.rows;
        if (tiles) {
            multiply_tiles(in.x + m0 * in.kp, panel, in.kp, products);
        } else {
            const uint16_t *lines[ROWS];
            for (int64_t m = 0; m < ROWS; ++m) lines[m] = in.x + (m0 + m < in.rows ? m0 + m : in.rows - 1) * in.kp;
            multiply_vectors(lines, panel, in.kp, products);
        }
        const int64_t next = m0 + (tiles ? TILES : 1) * ROWS;
        for (int64_t m = m0; m < next && m < in.rows; ++m)
            store(output, m, one.column, products + (m - m0) * COLUMNS, one.count);
        m0 = next;
    }
    return true;
}

#else

bool multiplies16() { return false; }
bool multiply_columns16(const Columns &, const Inputs16 &, const Output &) { return false; }

#endif

VLLM_VARIANT_END
