// Products whose weights pass through panels: PANEL_COLUMNS rows of the weight at a time, transposed so that each lane of a
// vector is a column of the product. Integer ones (gemm8.cpp) and those of bfloat16 (gemm16.cpp; tiles16.cpp by AMX).
#ifndef VLLM_CPU_PANELS_H
#define VLLM_CPU_PANELS_H

#include "linear.h"

VLLM_VARIANT_BEGIN

constexpr int64_t PANEL_COLUMNS = 16;

// A few rows of x in eight bits: q [rows, k], facts float [rows, k / 32, 2]: the step of a block and its sum. `halves`: NULL where
// no format takes it, or q with the first halves of each four blocks before their second ones; what is left of k is nothing.
struct Inputs8 {
    const int8_t *q;
    const int8_t *halves;
    const float *facts;
    int64_t k;
    int64_t rows;
};

// Many rows, in groups of four, the last one filled up: q [groups, k / 4, 4 rows, 4 numbers of K]; `wide` the same in 16 bits,
// [groups, k / 2, 4, 2], where a format takes it; facts [groups, k / 32, FACTS8]: steps of the four rows, sums of their blocks,
// of first halves, of second halves.
struct Rows8 {
    const uint8_t *q;
    const uint8_t *wide;
    const float *facts;
    int64_t k;
    int64_t rows;
};

constexpr int64_t FACTS8 = 16;

// For the tiles of AMX groups are of sixteen rows: q [groups, k / 32, 16 rows, 32 numbers], facts [groups, k / 32, 4, 16].
constexpr int64_t TILE_ROWS8 = 16, TILE_FACTS8 = 4 * TILE_ROWS8;

// Where a group's numbers and facts begin.
struct Group8 {
    const uint8_t *numbers;
    const float *facts;
};

// Rows of x in bfloat16, zeros from K to kp, a multiple of 32. [rows, kp], `stride` numbers from row to row; or, where turns_x16,
// tiles of AMX [rows / 16 up, kp / 32, 16 pairs of K, 16 rows, 2]. `rest`: NULL, or the last rows where they are no sixteen, after
// which there is memory; there may be anything in it.
struct Inputs16 {
    const uint16_t *x;
    int64_t kp;
    int64_t rows;
    int64_t stride;
    const uint16_t *rest;
    // Sixteen rows from `row` on, a multiple of that.
    const uint16_t *sixteen(int64_t row) const { return rest && row + 16 > rows ? rest : x + row * stride; }
};

bool reads_int8(const vllm_matrix &w);
// Rows of x to their places: one of a few rows, a group of many (`wide` NULL where no format takes it), row `row` of a tile.
void quantise_row(const float *x, int64_t k, int8_t *q, float *facts);
void quantise_group(const float *const *x, int64_t k, uint8_t *q, uint8_t *wide, float *facts);
void quantise_tile_row(const float *x, int64_t k, int64_t row, uint8_t *q, float *facts);
bool takes_halves8(int32_t format);
void split_halves(const int8_t *q, int64_t k, int8_t *out);
bool multiply_vector8(const vllm_matrix &w, const Inputs8 &in, int64_t n0, int64_t n1, float *out, int64_t stride);
bool takes_wide8(int32_t format);
bool takes_tiles8();
bool multiply_columns8(const Columns &one, const Rows8 &in, const Output &output);

// products [rows, PANEL_COLUMNS] = activation(products) * factors, biases added to both before.
void gate_panel(const Columns &one, float *products, float *factors, int64_t rows);

// A row's products of a panel to where they go.
static inline void finish(const Output &output, int64_t row, int64_t column, float *products, int64_t count) {
    if (count == PANEL_COLUMNS && output.dtype == VLLM_FLOAT32 && !output.bias) {
        float *to = reinterpret_cast<float *>(output.data) + row * output.stride + column;
        for (int i = 0; i < PANEL_COLUMNS; i += VF) {
            vf value = vf_load(products + i);
            vf_store(to + i, output.add ? vf_add(value, vf_load(to + i)) : value);
        }
        return;
    }
    store(output, row, column, products, count);
}

#ifdef __AVX2__

// Eight vectors of eight dwords: dword j of vector i to place i of vector j.
static inline void transpose8(__m256i *rows) {
    __m256 r[8], t[8];
    for (int i = 0; i < 8; ++i) r[i] = _mm256_castsi256_ps(rows[i]);
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
        rows[i] = _mm256_castps_si256(_mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        rows[i + 4] = _mm256_castps_si256(_mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}

#endif

// Whether this CPU multiplies bfloat16 with such a weight.
bool multiplies16(const vllm_matrix &w);
bool multiply_columns16(const Columns &one, const Inputs16 &in, const Output &output);
// `rows` rows of products [rows, PANEL_COLUMNS], of which `count` columns are there, to where they go.
void finish_block16(const Output &output, int64_t row, int64_t rows, int64_t column, float *products, int64_t count);

// The same by tiles: each of `list` has as many columns as two panels have, or as one has with its gate.
bool takes_tiles16();
bool multiply_tiles16(const Columns *list, int64_t count, const Inputs16 &in, const Output &output);
// How many of a list are unpacked together.
int64_t pairs_together16(int64_t kp);
static inline bool turns_x16(int64_t rows) { return rows <= 128; }
void turn_tiles16(uint16_t *tiles, int64_t count);

// The op by panels. `rounds`: whether this call's inputs are rounded to eight bits; `is_bfloat16`: whether its inputs are
// bfloat16, on a CPU that multiplies them with its weights (normed inputs are rounded to it, as the op's decomposition does).
bool rounds(const vllm_linear_call &call);
bool multiply_int8(const vllm_linear_call &call, const char *x, int64_t x_stride, int64_t rows, const Output &output);
bool is_bfloat16(const vllm_linear_call &call);
bool multiply_bfloat16(const vllm_linear_call &call, const char *x, int64_t x_stride, int64_t rows, const Output &output);

VLLM_VARIANT_END

#endif
