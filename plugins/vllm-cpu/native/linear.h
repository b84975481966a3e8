// The parts of `linear`: what each file of it offers to the others.
#ifndef VLLM_CPU_LINEAR_H
#define VLLM_CPU_LINEAR_H

#include "simd.h"

VLLM_VARIANT_BEGIN

// Rows of x in float, in the order of a format, zeros up to `kp`, the format's K rounded up to vectors.
struct Inputs {
    const float *x;
    int64_t kp;
    int64_t rows;
};

// What happens to products before they are stored: bias, sum with what is there, dtype.
struct Output {
    char *data;
    int64_t stride;  // elements
    int32_t dtype;
    int32_t add;
    const float *bias;  // by column
};

// Some neighbouring columns of a product: rows n .. n + count - 1 of `w`, the output's columns from `column` on. `gated`:
// NULL, or a matrix of the same format whose rows from gated_n on are multiplied with the activation of those of `w`; then
// the biases of both are here.
struct Columns {
    const vllm_matrix *w;
    int64_t n, count, column;
    const vllm_matrix *gated;
    int64_t gated_n, activation;
    const float *bias, *gated_bias;
};

// Most rows for which weights are decoded straight into the sums.
constexpr int64_t VECTOR_ROWS = 4;
// Ranges of columns a thread then: memory serves one core before another, and the last range is waited for.
constexpr int64_t VECTOR_RANGES = 8;

// Columns n0 .. n1 of the product for up to VECTOR_ROWS rows, to out [rows, n1 - n0] of `stride`.
bool multiply_vector(const vllm_matrix &w, const Inputs &in, int64_t n0, int64_t n1, float *out, int64_t stride);

// Columns for any number of rows, gated where they are. Uses scratch slots 2 and 3.
bool multiply_tile(const Columns &one, const Inputs &in, const Output &output);

// out float [k] = row of x, normed where the call says so.
void plain_row(const vllm_linear_call &call, const char *x, float *out);

// Where there is a gate: float [rows, n] for whole rows of products, in scratch slot 4, as `target`; then out = gated rows.
float *wide_rows(const vllm_linear_call &call, int64_t rows, const Output &output, Output &target);
void gate_rows(const vllm_linear_call &call, const float *wide, int64_t rows, const Output &output);

// out [count] = activation(g) * u.
void gate_row(int64_t activation, const float *g, const float *u, int64_t count, float *out);

// Store `count` products of row `row` from column `column` on.
void store(const Output &output, int64_t row, int64_t column, float *products, int64_t count);

VLLM_VARIANT_END

#endif
