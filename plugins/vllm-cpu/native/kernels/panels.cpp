// `linear` by panels: inputs made ready in eight bits or in bfloat16, panels shared out among the threads.
#include "panels.h"

#include "threads.h"

#include <atomic>

VLLM_VARIANT_BEGIN

namespace {

// Columns of `call` in pieces of at most `width` that lie within one part, one of two where there is a gate.
int64_t panels_of(const vllm_linear_call &call, int64_t width) {
    int64_t count = 0;
    for (int64_t p = 0; p < call.num_parts; ++p) count += (call.parts[p].n + width - 1) / width;
    return count;
}

const vllm_matrix *part_at(const vllm_linear_call &call, int64_t &n) {
    const vllm_matrix *part = call.parts;
    for (; n >= part->n; ++part) n -= part->n;
    return part;
}

Columns panel_at(const vllm_linear_call &call, int64_t index, int64_t width) {
    int64_t first = 0;
    const vllm_matrix *part = call.parts;
    for (;; ++part) {
        int64_t own = (part->n + width - 1) / width;
        if (index < own) break;
        index -= own, first += part->n;
    }
    int64_t n = index * width, left = part->n - n;
    return Columns{part, n, left < width ? left : width, first + n, nullptr, 0, 0, nullptr, nullptr};
}

// Whether gate and what is gated can be multiplied side by side: pieces of one are pieces of the other.
bool gates_in_pieces(const vllm_linear_call &call) {
    const int64_t half = call.n / 2;
    if (call.num_parts == 1) return half % PANEL_COLUMNS == 0;
    return call.num_parts == 2 && call.parts[0].n == half && call.parts[0].format == call.parts[1].format;
}

// Most panels of a list.
constexpr int64_t LIST = 16;

// Panels of a call shared out among the threads in lists of `together` at most, each with its gate where they are `fused`, else
// of `width` columns; multiply(list, count, to) makes one list.
template <class Multiply>
bool multiply_panels(const vllm_linear_call &call, const Output &output, bool fused, int64_t width, int64_t together,
                     const Multiply &multiply) {
    const int64_t half = call.n / 2, count = panels_of(call, width) / (fused ? 2 : 1);
    const float *bias = static_cast<const float *>(call.bias);
    Output to = output;
    if (fused) to.bias = nullptr;
    std::atomic<bool> done{true};
    parallel((count + together - 1) / together, [&](int64_t task) {
        Columns list[LIST];
        int64_t size = 0;
        for (int64_t index = task * together; index < (task + 1) * together && index < count; ++index) {
            Columns &one = list[size++] = panel_at(call, index, width);
            if (fused) {
                one.gated_n = half + one.column;
                one.gated = part_at(call, one.gated_n);
                one.activation = call.gate - 1;
                if (bias) one.bias = bias + one.column, one.gated_bias = bias + half + one.column;
            }
        }
        if (!multiply(list, size, to)) done = false;
    });
    return done;
}

// The same, and the gate after all products where panels of the gate are none of what is gated. together(count): of that many.
template <class Together, class Multiply>
bool multiply_all(const vllm_linear_call &call, int64_t rows, const Output &output, int64_t width, const Together &together,
                  const Multiply &multiply) {
    if (call.gate && gates_in_pieces(call))
        return multiply_panels(call, output, true, PANEL_COLUMNS, together(panels_of(call, PANEL_COLUMNS) / 2), multiply);
    Output target = output;
    float *whole = call.gate ? wide_rows(call, rows, output, target) : nullptr;
    if (call.gate && !whole) return false;
    if (!multiply_panels(call, target, false, width, together(panels_of(call, width)), multiply)) return false;
    if (call.gate) gate_rows(call, whole, rows, output);
    return true;
}

// A panel a task keeps the threads even; panels of few rows are over before the next is handed out.
int64_t few_together(int64_t rows) { return rows < 32 ? 2 : 1; }

// At most `most` panels a task, about as many tasks for every thread, three or more.
int64_t even_together(int64_t count, int64_t most) {
    if (most > LIST) most = LIST;
    const int64_t share = (count + num_threads() - 1) / num_threads(), least = (share + most - 1) / most;
    const int64_t turns = least > 3 ? least : 3;
    return (share + turns - 1) / turns;
}

// Columns begin .. begin + count of all parts, for each row of x: out [rows, 64].
void few_columns(const vllm_linear_call &call, const Inputs8 &in, int64_t begin, int64_t count, float *out) {
    int64_t first = 0;
    for (int64_t p = 0; p < call.num_parts; first += call.parts[p++].n) {
        const vllm_matrix &w = call.parts[p];
        const int64_t from = begin > first ? begin - first : 0, end = begin + count - first, to = end < w.n ? end : w.n;
        if (from < to) multiply_vector8(w, in, from, to, out + (first + from - begin), 64);
    }
}

// Few rows: each weight is read once, all parts in one job, and where there is a gate a task has both halves of its columns.
void multiply_few8(const vllm_linear_call &call, const Inputs8 &in, const Output &output) {
    const int64_t columns = call.gate ? call.n / 2 : call.n;
    parallel_ranges(columns, 16, [&](int64_t begin, int64_t end) {
        float products[VECTOR_ROWS * 64], gates[VECTOR_ROWS * 64];
        for (int64_t n0 = begin; n0 < end; n0 += 64) {
            const int64_t count = n0 + 64 < end ? 64 : end - n0;
            few_columns(call, in, call.gate ? columns + n0 : n0, count, products);
            if (call.gate) few_columns(call, in, n0, count, gates);
            for (int64_t m = 0; m < in.rows; ++m) {
                float *row = products + m * 64, *gate = gates + m * 64;
                if (!call.gate) {
                    store(output, m, n0, row, count);
                    continue;
                }
                for (int64_t i = 0; output.bias && i < count; ++i)
                    gate[i] += output.bias[n0 + i], row[i] += output.bias[columns + n0 + i];
                gate_row(call.gate - 1, gate, row, count, gate);
                narrow(output.data + (m * output.stride + n0) * item_bytes(output.dtype), gate, output.dtype, count);
            }
        }
    }, VECTOR_RANGES);
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
        bool halves = false;
        for (int64_t p = 0; p < call.num_parts; ++p) halves = halves || takes_halves8(call.parts[p].format);
        char *memory = static_cast<char *>(scratch(1, static_cast<size_t>(rows * ((halves ? 2 : 1) * k + 8 * blocks))));
        float *plain = static_cast<float *>(scratch(5, static_cast<size_t>(k) * 4));
        if (!memory || !plain) return false;
        float *facts = reinterpret_cast<float *>(memory);
        int8_t *q = reinterpret_cast<int8_t *>(facts + rows * blocks * 2), *split = halves ? q + rows * k : nullptr;
        for (int64_t row = 0; row < rows; ++row) {
            plain_row(call, x + row * row_step, plain);
            quantise_row(plain, k, q + row * k, facts + row * blocks * 2);
            if (halves) split_halves(q + row * k, k, split + row * k);
        }
        multiply_few8(call, Inputs8{q, split, facts, k, rows}, output);
        return true;
    }
    bool takes_wide = false;
    for (int64_t p = 0; p < call.num_parts; ++p) takes_wide = takes_wide || takes_wide8(call.parts[p].format);
    const bool tiles = takes_tiles8();
    const int64_t group_rows = tiles ? TILE_ROWS8 : 4, groups = (rows + group_rows - 1) / group_rows, filled = groups * group_rows;
    char *memory = static_cast<char *>(scratch(1, static_cast<size_t>(filled * (k * (takes_wide ? 3 : 1) + blocks * FACTS8))));
    if (!memory) return false;
    float *facts = reinterpret_cast<float *>(memory);
    uint8_t *q = reinterpret_cast<uint8_t *>(facts + filled / 4 * blocks * FACTS8);
    uint8_t *wide = takes_wide ? q + filled * k : nullptr;
    std::atomic<bool> done{true};
    const bool as_is = call.x_dtype == VLLM_FLOAT32 && !call.norm;
    parallel_ranges(groups, tiles ? 1 : 2, [&](int64_t begin, int64_t end) {
        float *plain = static_cast<float *>(scratch(5, static_cast<size_t>(4 * k) * 4));
        // Row `row` of x in float, in place `at` of the four; the last one stands for those that are not there.
        auto line = [&](int64_t row, int64_t at) {
            const char *from = x + (row < rows ? row : rows - 1) * row_step;
            if (as_is) return reinterpret_cast<const float *>(from);
            plain_row(call, from, plain + at * k);
            return static_cast<const float *>(plain + at * k);
        };
        for (int64_t group = begin; plain && group < end; ++group) {
            if (tiles) {
                for (int64_t m = 0; m < TILE_ROWS8; ++m)
                    quantise_tile_row(line(group * TILE_ROWS8 + m, 0), k, m, q + group * TILE_ROWS8 * k,
                                      facts + group * blocks * TILE_FACTS8);
                continue;
            }
            const float *lines[4];
            for (int64_t m = 0; m < 4; ++m) lines[m] = line(4 * group + m, m);
            quantise_group(lines, k, q + group * k * 4, wide ? wide + group * k * 8 : nullptr, facts + group * blocks * FACTS8);
        }
        if (!plain) done = false;
    });
    if (!done) return false;
    const Rows8 in{q, wide, facts, k, rows};
    const auto together = [&](int64_t) { return few_together(rows); };
    return multiply_all(call, rows, output, PANEL_COLUMNS, together, [&](const Columns *list, int64_t count, const Output &to) {
        bool all = true;
        for (int64_t i = 0; i < count; ++i) all = multiply_columns8(list[i], in, to) && all;
        return all;
    });
}

void gate_panel(const Columns &one, float *products, float *factors, int64_t rows) {
    for (int64_t i = 0; one.bias && i < rows * PANEL_COLUMNS; ++i) {
        const int64_t column = i % PANEL_COLUMNS;
        if (column < one.count) products[i] += one.bias[column], factors[i] += one.gated_bias[column];
    }
    gate_row(one.activation, products, factors, rows * PANEL_COLUMNS, products);
}

bool is_bfloat16(const vllm_linear_call &call) {
    bool all = call.x_dtype == VLLM_BFLOAT16;
    for (int64_t p = 0; p < call.num_parts; ++p) all = all && multiplies16(call.parts[p]);
    return all;
}

// Rows begin .. end of x in bfloat16 and normed: [rows, kp], or tiles of sixteen rows, turned.
static bool make_rows16(const vllm_linear_call &call, const char *x, int64_t x_stride, int64_t begin, int64_t end, bool turned,
                        uint16_t *made) {
    constexpr int64_t SIDE = TILE_ROWS8;
    const int64_t k = call.k, kp = (k + 31) / 32 * 32;
    float *plain = static_cast<float *>(scratch(5, static_cast<size_t>(k) * 6));
    if (!plain) return false;
    uint16_t *normed = reinterpret_cast<uint16_t *>(plain + k);
    for (int64_t row = begin; row < end; ++row) {
        const char *from = x + row * x_stride * 2;
        uint16_t *to = turned ? made + row / SIDE * SIDE * kp + row % SIDE * 32 : made + row * kp;
        if (call.norm) {
            plain_row(call, from, plain);
            narrow(turned ? normed : to, plain, VLLM_BFLOAT16, k);
            from = reinterpret_cast<const char *>(normed);
        } else if (!turned) {
            memcpy(to, from, static_cast<size_t>(k) * 2);
        }
        if (!turned) memset(to + k, 0, static_cast<size_t>(kp - k) * 2);
        for (int64_t i = 0; turned && i < k; i += 32, to += SIDE * 32) {
            const int64_t count = k - i < 32 ? k - i : 32;
            if (count == 32) {
                memcpy(to, from + i * 2, 64);
                continue;
            }
            memcpy(to, from + i * 2, static_cast<size_t>(count) * 2);
            memset(to + count, 0, static_cast<size_t>(32 - count) * 2);
        }
    }
    return true;
}

bool multiply_bfloat16(const vllm_linear_call &call, const char *x, int64_t x_stride, int64_t rows, const Output &output) {
    constexpr int64_t SIDE = TILE_ROWS8;
    const int64_t k = call.k, kp = (k + 31) / 32 * 32, groups = (rows + SIDE - 1) / SIDE;
    const bool tiles = takes_tiles16(), turned = tiles && turns_x16(rows);
    Inputs16 in{reinterpret_cast<const uint16_t *>(x), kp, rows, x_stride, nullptr};
    std::atomic<bool> done{true};
    if (tiles && !turned && !call.norm && k == kp) {
        // Tiles take many rows from where they are.
        uint16_t *rest = static_cast<uint16_t *>(scratch(1, static_cast<size_t>(SIDE * x_stride) * 2));
        for (int64_t row = rows / SIDE * SIDE; rest && row < rows; ++row)
            memcpy(rest + row % SIDE * x_stride, in.x + row * x_stride, static_cast<size_t>(k) * 2);
        in.rest = rest;
        done = rest != nullptr;
    } else {
        uint16_t *made = static_cast<uint16_t *>(scratch(1, static_cast<size_t>(groups * SIDE * kp) * 2));
        in.x = made, in.stride = kp, done = made != nullptr;
        parallel_ranges(made ? groups : 0, 1, [&](int64_t begin, int64_t end) {
            const int64_t last = end * SIDE < rows ? end * SIDE : rows;
            if (!make_rows16(call, x, x_stride, begin * SIDE, last, turned, made)) done = false;
            if (turned) turn_tiles16(made + begin * SIDE * kp, (end - begin) * kp / 32);
        });
    }
    if (!done) return false;
    if (tiles) {
        const auto together = [&](int64_t count) { return even_together(count, pairs_together16(kp)); };
        return multiply_all(call, rows, output, 2 * PANEL_COLUMNS, together, [&](const Columns *list, int64_t count, const Output &to) {
            return multiply_tiles16(list, count, in, to);
        });
    }
    const auto together = [&](int64_t) { return few_together(rows); };
    return multiply_all(call, rows, output, PANEL_COLUMNS, together, [&](const Columns *list, int64_t count, const Output &to) {
        bool all = true;
        for (int64_t i = 0; i < count; ++i) all = multiply_columns16(list[i], in, to) && all;
        return all;
    });
}

VLLM_VARIANT_END
