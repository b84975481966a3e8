// Products of many rows whose inputs are bfloat16, on a CPU that multiplies it: by AVX-512 BF16, or by the tiles of AMX. Weights
// are bfloat16, or of a packed format and rounded to it while a panel is made, as a model in bfloat16 has them.
#include "int8.h"

#include "linear.h"
#include "panels.h"
#include "processor.h"
#include "threads.h"
#include "tiles.h"

VLLM_VARIANT_BEGIN

#if defined(VLLM_AVX512) && defined(VLLM_AMX)

namespace {

constexpr int COLUMNS = PANEL_COLUMNS;
constexpr int ROWS = TILE_SIDE;  // also what the registers of AVX-512 hold
constexpr int TILES = 2;  // of rows

// Sixteen rows of the weight as [k / 2, columns, 2], zeros from K to kp. The last row stands for those that are not there.
void unpack_plain(const vllm_matrix &w, int64_t n, int64_t count, int64_t kp, uint16_t *panel) {
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

template <class Format>
VLLM_TARGET("avx512bf16") void unpack_packed(const vllm_matrix &w, int64_t n, int64_t count, uint16_t *panel) {
    constexpr int BLOCKS = Format::BLOCKS;
    Row rows[COLUMNS];
    for (int64_t c = 0; c < COLUMNS; ++c) rows[c] = row_of(w, n + (c < count ? c : count - 1));
    alignas(64) float numbers[BLOCKS][COLUMNS][32];
    for (int64_t c = 0; c < w.k / (32 * BLOCKS); ++c) {
        for (int r = 0; r < COLUMNS; ++r)
            Format::decode(rows[r], c, [&](int i, __m256i bytes, __m256 scale, float offset) __attribute__((always_inline)) {
                const __m512 whole = _mm512_set1_ps(offset);
                const float first = _mm256_cvtss_f32(scale);
                const float second = Format::BITS == 6 ? _mm_cvtss_f32(_mm256_extractf128_ps(scale, 1)) : first;
                const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
                const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
                _mm512_storeu_ps(numbers[i][r], _mm512_fmadd_ps(low, _mm512_set1_ps(first), whole));
                _mm512_storeu_ps(numbers[i][r] + 16, _mm512_fmadd_ps(high, _mm512_set1_ps(second), whole));
            });
        for (int i = 0; i < BLOCKS; ++i)
            for (int quarter = 0; quarter < 4; ++quarter) {
                const int half = quarter / 2, first = quarter % 2 * 8;
                __m256i part[8];
                for (int r = 0; r < 8; ++r)
                    part[r] = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(numbers[i][first + r] + 16 * half)));
                transpose8(part);
                uint16_t *to = panel + (((c * BLOCKS + i) * 16 + half * 8) * COLUMNS + first) * 2;
                for (int s = 0; s < 8; ++s) _mm256_storeu_si256(reinterpret_cast<__m256i *>(to + s * COLUMNS * 2), part[s]);
            }
    }
}

void unpack(const vllm_matrix &w, int64_t n, int64_t count, int64_t kp, uint16_t *panel) {
    if (w.format == VLLM_ROWS_BFLOAT16) return unpack_plain(w, n, count, kp, panel);
    with_format8(w.format, [&](auto format) { unpack_packed<decltype(format)>(w, n, count, panel); });
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

// Columns of the i-th panel.
int64_t columns_of(const Columns &one, int64_t i) {
    const int64_t left = one.count - i * COLUMNS;
    return left < COLUMNS ? left : COLUMNS;
}

// Two panels side by side, out [PANELS, TILES * ROWS, 16]: for neighbouring columns, or for a gate and what it gates.
constexpr int PANELS = 2, AREA = TILES * ROWS * COLUMNS;

// Products of COUNT * ROWS neighbouring rows with WIDTH panels, by tiles of 16 rows and 32 numbers of K: each tile that is loaded
// takes part in two products, since x and the weight come from the second cache.
template <int COUNT, int WIDTH>
VLLM_TARGET("amx-tile,amx-bf16") void multiply_tiles(const uint16_t *x, const uint16_t *panel, int64_t kp, float *out) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const uint16_t *second = panel + kp * COLUMNS, *below = x + ROWS * kp;
    for (int64_t i = 0; i < kp; i += 32) {
        _tile_loadd(6, panel + i * COLUMNS, COLUMNS * 4);
        _tile_loadd(4, x + i, kp * 2);
        _tile_dpbf16ps(0, 4, 6);
        if (COUNT > 1) {
            _tile_loadd(5, below + i, kp * 2);
            _tile_dpbf16ps(1, 5, 6);
        }
        if (WIDTH > 1) {
            _tile_loadd(7, second + i * COLUMNS, COLUMNS * 4);
            _tile_dpbf16ps(2, 4, 7);
            if (COUNT > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, out, COLUMNS * 4);
    if (COUNT > 1) _tile_stored(1, out + ROWS * COLUMNS, COLUMNS * 4);
    if (WIDTH > 1) _tile_stored(2, out + AREA, COLUMNS * 4);
    if (WIDTH > 1 && COUNT > 1) _tile_stored(3, out + AREA + ROWS * COLUMNS, COLUMNS * 4);
}

VLLM_TARGET("amx-tile") void begin_tiles() {
    const TileConfig config(64);
    _tile_loadconfig(config.written());
}

VLLM_TARGET("amx-tile") void end_tiles() { _tile_release(); }

// Products of rows m0 .. of x with one or two panels; how many rows they were. Rows are there up to a multiple of ROWS.
int64_t multiply(const Inputs16 &in, int64_t m0, const uint16_t *panel, int64_t width, float *out) {
    const uint16_t *x = in.x + m0 * in.kp;
    if (!cpu_has_amx()) {
        const uint16_t *lines[ROWS];
        for (int64_t m = 0; m < ROWS; ++m) lines[m] = x + m * in.kp;
        for (int64_t i = 0; i < width; ++i) multiply_vectors(lines, panel + i * in.kp * COLUMNS, in.kp, out + i * AREA);
        return ROWS;
    }
    const bool both = m0 + ROWS < in.rows;
    if (width > 1)
        both ? multiply_tiles<2, 2>(x, panel, in.kp, out) : multiply_tiles<1, 2>(x, panel, in.kp, out);
    else
        both ? multiply_tiles<2, 1>(x, panel, in.kp, out) : multiply_tiles<1, 1>(x, panel, in.kp, out);
    return both ? TILES * ROWS : ROWS;
}

// A row's products of a panel to where they go, bfloat16 in one piece.
VLLM_TARGET("avx512bf16") void finish16(const Output &output, int64_t row, int64_t column, float *products, int64_t count) {
    if (count < COLUMNS || output.dtype != VLLM_BFLOAT16 || output.bias) return finish(output, row, column, products, count);
    __m256i *to = reinterpret_cast<__m256i *>(reinterpret_cast<uint16_t *>(output.data) + row * output.stride + column);
    __m512 sum = _mm512_loadu_ps(products);
    if (output.add) sum = _mm512_add_ps(sum, vf_load_bf16(reinterpret_cast<const uint16_t *>(to)));
    _mm256_storeu_si256(to, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(sum)));
}

}  // namespace

bool multiplies16(const vllm_matrix &w) {
    if (w.format == VLLM_ROWS_BFLOAT16) return cpu_has_avx512bf16();
    return cpu_has_amx() && cpu_has_avx512bf16() && reads_int8(w);
}

bool multiply_columns16(const Columns &one, const Inputs16 &in, const Output &output) {
    const int64_t size = in.kp * COLUMNS, width = one.gated || one.count > COLUMNS ? PANELS : 1;
    uint16_t *panel = static_cast<uint16_t *>(scratch(2, static_cast<size_t>(size * 2 * width)));
    if (!panel) return false;
    if (one.gated) {
        unpack(*one.w, one.n, one.count, in.kp, panel);
        unpack(*one.gated, one.gated_n, one.count, in.kp, panel + size);
    } else {
        for (int64_t i = 0; i < width; ++i) unpack(*one.w, one.n + i * COLUMNS, columns_of(one, i), in.kp, panel + i * size);
    }
    alignas(64) float products[PANELS * AREA];
    if (cpu_has_amx()) begin_tiles();
    for (int64_t m0 = 0; m0 < in.rows;) {
        const int64_t count = multiply(in, m0, panel, width, products);
        if (one.gated) gate_panel(one, products, products + AREA, count);
        for (int64_t i = 0; i < (one.gated ? 1 : width); ++i)
            for (int64_t m = 0; m < count && m0 + m < in.rows; ++m)
                finish16(output, m0 + m, one.column + i * COLUMNS, products + i * AREA + m * COLUMNS, columns_of(one, i));
        m0 += count;
    }
    if (cpu_has_amx()) end_tiles();
    return true;
}

#else

bool multiplies16(const vllm_matrix &) { return false; }
bool multiply_columns16(const Columns &, const Inputs16 &, const Output &) { return false; }

#endif

VLLM_VARIANT_END
