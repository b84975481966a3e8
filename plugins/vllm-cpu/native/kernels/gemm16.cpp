// Products of many rows of bfloat16 with weights of it, by AVX-512 BF16: for CPUs without tiles (tiles16.cpp).
#include "linear.h"
#include "panels.h"
#include "processor.h"
#include "threads.h"
#include "tiles.h"

VLLM_VARIANT_BEGIN

#if defined(VLLM_AVX512) && defined(VLLM_AMX)

namespace {

constexpr int COLUMNS = PANEL_COLUMNS;
constexpr int ROWS = 16;  // what the registers hold

// Sixteen rows of the weight as [k / 2, columns, 2], zeros from K to kp. The last row stands for those that are not there.
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

}  // namespace

VLLM_TARGET("avx512bf16") void finish_block16(const Output &output, int64_t row, int64_t rows, int64_t column,
                                                  float *products, int64_t count) {
    for (int64_t m = 0; m < rows; ++m, products += COLUMNS) {
        if (count < COLUMNS || output.dtype != VLLM_BFLOAT16 || output.bias) {
            finish(output, row + m, column, products, count);
            continue;
        }
        uint16_t *to = reinterpret_cast<uint16_t *>(output.data) + (row + m) * output.stride + column;
        __m512 sum = _mm512_loadu_ps(products);
        if (output.add) sum = _mm512_add_ps(sum, vf_load_bf16(to));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(sum)));
    }
}

bool multiplies16(const vllm_matrix &w) {
    if (w.format == VLLM_ROWS_BFLOAT16) return cpu_has_avx512bf16();
    return takes_tiles16() && reads_int8(w);
}

bool multiply_columns16(const Columns &one, const Inputs16 &in, const Output &output) {
    const int64_t size = in.kp * COLUMNS;
    uint16_t *panel = static_cast<uint16_t *>(scratch(2, static_cast<size_t>(size * (one.gated ? 4 : 2))));
    if (!panel) return false;
    unpack(*one.w, one.n, one.count, in.kp, panel);
    if (one.gated) unpack(*one.gated, one.gated_n, one.count, in.kp, panel + size);
    alignas(64) float products[ROWS * COLUMNS], factors[ROWS * COLUMNS];
    for (int64_t m0 = 0; m0 < in.rows; m0 += ROWS) {
        const int64_t count = in.rows - m0 < ROWS ? in.rows - m0 : ROWS;
        const uint16_t *lines[ROWS];
        for (int64_t m = 0; m < ROWS; ++m) lines[m] = in.x + (m0 + (m < count ? m : 0)) * in.stride;
        multiply_vectors(lines, panel, in.kp, products);
        if (one.gated) {
            multiply_vectors(lines, panel + size, in.kp, factors);
            gate_panel(one, products, factors, ROWS);
        }
        finish_block16(output, m0, count, one.column, products, one.count);
    }
    return true;
}

#else

void finish_block16(const Output &, int64_t, int64_t, int64_t, float *, int64_t) {}
bool multiplies16(const vllm_matrix &) { return false; }
bool multiply_columns16(const Columns &, const Inputs16 &, const Output &) { return false; }

#endif

VLLM_VARIANT_END
