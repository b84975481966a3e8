// `linear` by panels: inputs made ready in eight bits or in bfloat16, panels shared out among the threads.
#include "panels.h"

#include "threads.h"

#include <atomic>

VLLM_VARIANT_BEGIN

namespace {

// Columns of `call` in pieces of at most PANEL_COLUMNS that lie within one part, one of two where there is a gate.
int64_t panels_of(const vllm_linear_call &call) {
    int64_t count = 0;
    for (int64_t p = 0; p < call.num_parts; ++p) count += (call.parts[p].n + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
    return count;
}

const vllm_matrix *part_at(const vllm_linear_call &call, int64_t &n) {
    const vllm_matrix *part = call.parts;
    for (; n >= part->n; ++part) n -= part->n;
    return part;
}

Columns panel_at(const vllm_linear_call &call, int64_t index) {
    int64_t first = 0;
    const vllm_matrix *part = call.parts;
    for (;; ++part) {
        int64_t own = (part->n + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
        if (index < own) break;
        index -= own, first += part->n;
    }
    int64_t n = index * PANEL_COLUMNS, left = part->n - n;
    return Columns{part, n, left < PANEL_COLUMNS ? left : PANEL_COLUMNS, first + n, nullptr, 0, 0, nullptr, nullptr};
}

// Whether gate and what is gated can be multiplied side by side: pieces of one are pieces of the other.
bool gates_in_pieces(const vllm_linear_call &call) {
    const int64_t half = call.n / 2;
    if (call.num_parts == 1) return half % PANEL_COLUMNS == 0;
    return call.num_parts == 2 && call.parts[0].n == half && call.parts[0].format == call.parts[1].format;
}

// Products of many rows, gate included where `fused`.
bool multiply_panels8(const vllm_linear_call &call, const Rows8 &in, const Output &output, bool fused) {
    const int64_t half = call.n / 2, count = fused ? panels_of(call) / 2 : panels_of(call);
    const float *bias = static_cast<const float *>(call.bias);
    Output to = output;
    if (fused) to.bias = nullptr;
    // A panel a task keeps the threads even; panels of few rows are over before the next is handed out.
    const int64_t together = in.rows < 32 ? 2 : 1;
    std::atomic<bool> done{true};
    parallel((count + together - 1) / together, [&](int64_t task) {
        for (int64_t index = task * together; index < (task + 1) * together && index < count; ++index) {
            Columns one = panel_at(call, index);
            if (fused) {
                one.gated_n = half + one.column;
                one.gated = part_at(call, one.gated_n);
                one.activation = call.gate - 1;
                if (bias) one.bias = bias + one.column, one.gated_bias = bias + half + one.column;
            }
            if (!multiply_columns8(one, in, to)) done = false;
        }
    });
    return done;
}

// Few rows: each weight is read once.
void multiply_few8(const vllm_linear_call &call, const Inputs8 &in, const Output &output) {
    int64_t first = 0;
    for (int64_t p = 0; p < call.num_parts; ++p) {
        const vllm_matrix &w = call.parts[p];
        parallel_ranges(w.n, 16, [&](int64_t begin, int64_t end) {
            float products[VECTOR_ROWS * 64];
            for (int64_t n0 = begin; n0 < end; n0 += 64) {
                int64_t n1 = n0 + 64 < end ? n0 + 64 : end;
                multiply_vector8(w, in, n0, n1, products, 64);
                for (int64_t m = 0; m < in.rows; ++m) store(output, m, first + n0, products + m * 64, n1 - n0);
            }
        });
        first += w.n;
    }
}

}  // namespace

bool rounds(const vllm_linear_call &call) {
    bool all = call.activation == VLLM_INT8;
    for (int64_t p = 0; p < call.num_parts; ++p) all = all && reads_int8(call.parts[p]);
    return all;
}

bool multiply_int8(const vllm_linear_call &call, const char *x, int64_t x_stride, int64_t rows, const Output &output) {
    const int64_t k = call.k, blocks = k / 32, row_step = x_stride * item_bytes(call.x_dtype);
    if (rows <= VECTOR_ROWS) {
        char *memory = static_cast<char *>(scratch(1, static_cast<size_t>(rows * (k + 8 * blocks))));
        float *plain = static_cast<float *>(scratch(5, static_cast<size_t>(k) * 4));
        if (!memory || !plain) return false;
        float *facts = reinterpret_cast<float *>(memory);
        int8_t *q = reinterpret_cast<int8_t *>(facts + rows * blocks * 2);
        for (int64_t row = 0; row < rows; ++row) {
            plain_row(call, x + row * row_step, plain);
            quantise_row(plain, k, q + row * k, facts + row * blocks * 2);
        }
        Output target = output;
        float *whole = call.gate ? wide_rows(call, rows, output, target) : nullptr;
        if (call.gate && !whole) return false;
        multiply_few8(call, Inputs8{q, facts, k, rows}, target);
        if (call.gate) gate_rows(call, whole, rows, output);
        return true;
    }
    bool takes_wide = false;
    for (int64_t p = 0; p < call.num_parts; ++p) takes_wide = takes_wide || takes_wide8(call.parts[p].format);
    const int64_t filled = (rows + 3) / 4 * 4;
    char *memory = static_cast<char *>(scratch(1, static_cast<size_t>(filled * (k * (takes_wide ? 3 : 1) + blocks * FACTS8))));
    if (!memory) return false;
    float *facts = reinterpret_cast<float *>(memory);
    uint8_t *q = reinterpret_cast<uint8_t *>(facts + filled / 4 * blocks * FACTS8);
    uint8_t *wide = takes_wide ? q + filled * k : nullptr;
    std::atomic<bool> done{true};
    const bool as_is = call.x_dtype == VLLM_FLOAT32 && !call.norm;
    parallel_ranges(filled / 4, 2, [&](int64_t begin, int64_t end) {
        float *plain = static_cast<float *>(scratch(5, static_cast<size_t>(4 * k) * 4));
        for (int64_t group = begin; plain && group < end; ++group) {
            const float *lines[4];
            for (int64_t m = 0; m < 4; ++m) {
                const char *row = x + (4 * group + m < rows ? 4 * group + m : rows - 1) * row_step;
                lines[m] = as_is ? reinterpret_cast<const float *>(row) : plain + m * k;
                if (!as_is) plain_row(call, row, plain + m * k);
            }
            quantise_group(lines, k, q + group * k * 4, wide ? wide + group * k * 8 : nullptr, facts + group * blocks * FACTS8);
        }
        if (!plain) done = false;
    });
    if (!done) return false;
    const Rows8 in{q, wide, facts, k, rows};
    if (call.gate && gates_in_pieces(call)) return multiply_panels8(call, in, output, true);
    Output target = output;
    float *whole = call.gate ? wide_rows(call, rows, output, target) : nullptr;
    if ((call.gate && !whole) || !multiply_panels8(call, in, target, false)) return false;
    if (call.gate) gate_rows(call, whole, rows, output);
    return true;
}

bool is_bfloat16(const vllm_linear_call &call) {
    bool all = call.x_dtype == VLLM_BFLOAT16 && multiplies16();
    for (int64_t p = 0; p < call.num_parts; ++p) all = all && call.parts[p].format == VLLM_ROWS_BFLOAT16;
    return all;
}

bool multiply_bfloat16(const vllm_linear_call &call, const char *x, int64_t x_stride, int64_t rows, const Output &output) {
    const int64_t k = call.k, kp = (k + 31) / 32 * 32;
    uint16_t *made = static_cast<uint16_t *>(scratch(1, static_cast<size_t>(rows * kp) * 2));
    if (!made) return false;
    std::atomic<bool> done{true};
    parallel_ranges(rows, 8, [&](int64_t begin, int64_t end) {
        float *plain = static_cast<float *>(scratch(5, static_cast<size_t>(k) * 4));
        for (int64_t row = begin; plain && row < end; ++row) {
            plain_row(call, x + row * x_stride * 2, plain);
            narrow(made + row * kp, plain, VLLM_BFLOAT16, k);
            memset(made + row * kp + k, 0, static_cast<size_t>(kp - k) * 2);
        }
        if (!plain) done = false;
    });
    Output target = output;
    float *whole = call.gate ? wide_rows(call, rows, output, target) : nullptr;
    if (!done || (call.gate && !whole)) return false;
    const Inputs16 in{made, kp, rows};
    parallel(panels_of(call), [&](int64_t index) {
        if (!multiply_columns16(panel_at(call, index), in, target)) done = false;
    });
    if (done && call.gate) gate_rows(call, whole, rows, output);
    return done;
}

VLLM_VARIANT_END
