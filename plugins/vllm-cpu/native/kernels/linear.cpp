// `linear` and `embedding`: inputs made ready once, products shared out among the threads, results stored.
//
//   section map: inputs (norm, widening, order); outputs (gate, bias, add); the op; embedding
#include "linear.h"

#include "formats.h"
#include "panels.h"
#include "threads.h"
#include "vmath.h"

#include <atomic>

VLLM_VARIANT_BEGIN

// --- inputs --------------------------------------------------------------------------------------------------------------

void plain_row(const vllm_linear_call &call, const char *x, float *out) {
    int64_t k = call.k;
    widen(out, x, call.x_dtype, k);
    if (!call.norm) return;
    vf squares = vf_zero();
    int64_t i = 0;
    for (; i + VF <= k; i += VF) squares = vf_fma(vf_load(out + i), vf_load(out + i), squares);
    float sum = vf_sum(squares);
    for (; i < k; ++i) sum += out[i] * out[i];
    float factor = 1.0f / sqrtf(sum / static_cast<float>(k) + static_cast<float>(call.eps));
    vf wide = vf_set(factor);
    const char *norm = static_cast<const char *>(call.norm);
    if (call.norm_dtype == VLLM_FLOAT32) {
        const float *w = reinterpret_cast<const float *>(norm);
        for (i = 0; i + VF <= k; i += VF) vf_store(out + i, vf_mul(vf_mul(vf_load(out + i), wide), vf_load(w + i)));
        for (; i < k; ++i) out[i] = out[i] * factor * w[i];
        return;
    }
    const uint16_t *w = reinterpret_cast<const uint16_t *>(norm);
    for (i = 0; i < k; ++i) out[i] = out[i] * factor * (call.norm_dtype == VLLM_BFLOAT16 ? from_bf16(w[i]) : from_f16(w[i]));
}

namespace {

struct Order {
    int chunk;
    bool natural;
    int16_t place[128];
};

bool order_of(int32_t format, Order &order) {
    return with_format(format, [&](auto known) {
        using Format = decltype(known);
        order.chunk = Format::CHUNK;
        order.natural = true;
        for (int i = 0; i < Format::CHUNK; ++i) {
            order.place[i] = static_cast<int16_t>(Format::order(i));
            order.natural = order.natural && order.place[i] == i;
        }
    });
}

bool same_order(const Order &a, const Order &b) {
    if (a.natural && b.natural) return true;
    return a.chunk == b.chunk && !memcmp(a.place, b.place, sizeof(a.place[0]) * static_cast<size_t>(a.chunk));
}

int64_t padded(int64_t k) { return (k + VF - 1) / VF * VF; }

// Rows of x as `plain` [rows, k] in a format's order, or `plain` itself.
void arrange_row(int32_t format, const Order &order, const float *plain, int64_t k, int64_t kp, float *out) {
    if (order.natural) {
        memcpy(out, plain, static_cast<size_t>(k) * 4);
        for (int64_t i = k; i < kp; ++i) out[i] = 0.0f;
        return;
    }
    with_format(format, [&](auto known) {
        using Format = decltype(known);
        if constexpr (Format::order(1) != 1)
            for (int64_t c = 0; c < k; c += Format::CHUNK) Format::arrange(plain + c, out + c);
    });
}

}  // namespace

// --- outputs -------------------------------------------------------------------------------------------------------------

float *wide_rows(const vllm_linear_call &call, int64_t rows, const Output &output, Output &target) {
    float *wide = static_cast<float *>(scratch(4, static_cast<size_t>(rows * call.n) * 4));
    if (wide) target = Output{reinterpret_cast<char *>(wide), call.n, VLLM_FLOAT32, 0, output.bias};
    return wide;
}

void gate_row(int64_t activation, const float *g, const float *u, int64_t count, float *out) {
    int64_t i = 0;
    for (; i + VF <= count; i += VF) vf_store(out + i, vf_mul(vf_activate(vf_load(g + i), activation), vf_load(u + i)));
    for (; i < count; ++i) out[i] = vf_first(vf_activate(vf_set(g[i]), activation)) * u[i];
}

void gate_rows(const vllm_linear_call &call, const float *wide, int64_t rows, const Output &output) {
    int64_t half = call.n / 2;
    // A few rows are done before another thread would have begun.
    parallel_ranges(rows * half, rows <= VECTOR_ROWS ? rows * half : 512, [&](int64_t begin, int64_t end) {
        float buffer[512];
        for (int64_t at = begin; at < end;) {
            int64_t row = at / half, column = at % half;
            int64_t count = end - at < half - column ? end - at : half - column;
            if (count > 512) count = 512;
            const float *g = wide + row * call.n + column, *u = g + half;
            gate_row(call.gate - 1, g, u, count, buffer);
            narrow(output.data + (row * output.stride + column) * item_bytes(output.dtype), buffer, output.dtype, count);
            at += count;
        }
    });
}

void store(const Output &output, int64_t row, int64_t column, float *products, int64_t count) {
    char *out = output.data + (row * output.stride + column) * item_bytes(output.dtype);
    if (output.bias)
        for (int64_t i = 0; i < count; ++i) products[i] += output.bias[column + i];
    if (output.dtype == VLLM_FLOAT32) {
        float *to = reinterpret_cast<float *>(out);
        int64_t i = 0;
        for (; i + VF <= count; i += VF) {
            vf value = vf_load(products + i);
            vf_store(to + i, output.add ? vf_add(value, vf_load(to + i)) : value);
        }
        for (; i < count; ++i) to[i] = output.add ? products[i] + to[i] : products[i];
        return;
    }
    if (!output.add) {
        narrow(out, products, output.dtype, count);
        return;
    }
    float there[64];
    for (int64_t i = 0; i < count; i += 64) {
        int64_t part = count - i < 64 ? count - i : 64;
        char *at = out + i * item_bytes(output.dtype);
        widen(there, at, output.dtype, part);
        for (int64_t j = 0; j < part; ++j) there[j] += products[i + j];
        narrow(at, there, output.dtype, part);
    }
}

namespace {

// --- the op --------------------------------------------------------------------------------------------------------------

bool usable(const vllm_matrix &w, int64_t k) {
    if (w.k != k || w.n < 0) return false;
    Order order;
    if (!order_of(w.format, order)) return false;
    if (w.format == VLLM_INT4_GROUP) return w.group > 0 && w.group % 32 == 0 && k % w.group == 0;
    if (order.chunk <= VF) return true;
    int block = w.format >= VLLM_Q2_K && w.format <= VLLM_Q6_K ? 256 : 32;
    return k % block == 0;
}

// Columns of a tile: few enough that it stays in the second cache, many enough that x is not read too often.
int64_t tile_columns(int64_t n, int64_t kp) {
    int64_t columns = 96 * 1024 / (kp > 0 ? kp : 1) / 4 * 4;
    int64_t share = (n + num_threads() * 2 - 1) / (num_threads() * 2);
    share = (share + 3) / 4 * 4;
    columns = columns > 64 ? 64 : columns;
    columns = columns > share ? share : columns;
    return columns < 4 ? 4 : columns;
}

// Whether gate and what is gated can share tiles.
bool gates_in_tiles(const vllm_linear_call &call, int64_t rows) {
    if (!call.gate || rows <= VECTOR_ROWS) return false;
    const vllm_matrix *parts = call.parts;
    return call.num_parts == 1 || (call.num_parts == 2 && parts[0].n == parts[1].n && parts[0].format == parts[1].format);
}

bool multiply_gated(const vllm_linear_call &call, const Inputs &in, const Output &output) {
    const int64_t half = call.n / 2, columns = tile_columns(half, in.kp) <= 8 ? 4 : tile_columns(half, in.kp) / 8 * 4;
    const vllm_matrix *gated = call.parts + (call.num_parts - 1);
    const float *bias = static_cast<const float *>(call.bias);
    Output to = output;
    to.bias = nullptr;
    std::atomic<bool> done{true};
    parallel((half + columns - 1) / columns, [&](int64_t task) {
        const int64_t n = task * columns, count = n + columns < half ? columns : half - n;
        const int64_t gated_n = call.num_parts == 1 ? half + n : n;
        const Columns one{call.parts, n, count, n, gated, gated_n, call.gate - 1, bias ? bias + n : nullptr,
                          bias ? bias + half + n : nullptr};
        if (!multiply_tile(one, in, to)) done = false;
    });
    return done;
}

void multiply_part(const vllm_matrix &w, const Inputs &in, const Output &output, int64_t first) {
    if (in.rows > VECTOR_ROWS) {
        int64_t columns = tile_columns(w.n, in.kp);
        parallel((w.n + columns - 1) / columns, [&](int64_t task) {
            int64_t n = task * columns, count = n + columns < w.n ? columns : w.n - n;
            multiply_tile(Columns{&w, n, count, first + n, nullptr, 0, 0, nullptr, nullptr}, in, output);
        });
        return;
    }
    parallel_ranges(w.n, 16, [&](int64_t begin, int64_t end) {
        float products[VECTOR_ROWS * 64];
        for (int64_t n0 = begin; n0 < end; n0 += 64) {
            int64_t n1 = n0 + 64 < end ? n0 + 64 : end;
            multiply_vector(w, in, n0, n1, products, 64);
            for (int64_t m = 0; m < in.rows; ++m) store(output, m, first + n0, products + m * 64, n1 - n0);
        }
    }, VECTOR_RANGES);
}

}  // namespace

int32_t linear(const vllm_linear_call *given, void *out, int64_t out_stride, const void *x, int64_t x_stride, int64_t rows,
               void *) {
    const vllm_linear_call &call = *given;
    if (rows < 0 || call.k <= 0 || !is_float(call.x_dtype) || !is_float(call.out_dtype)) return VLLM_INVALID;
    if (call.norm && !is_float(call.norm_dtype)) return VLLM_INVALID;
    if (call.gate && (call.n % 2 || call.add)) return VLLM_INVALID;
    int64_t total = 0;
    for (int64_t p = 0; p < call.num_parts; ++p) {
        if (!usable(call.parts[p], call.k)) return VLLM_UNSUPPORTED;
        total += call.parts[p].n;
    }
    if (total != call.n) return VLLM_INVALID;
    if (rows == 0) return VLLM_OK;

    const int64_t k = call.k, kp = padded(k), x_bytes = item_bytes(call.x_dtype);
    const char *source = static_cast<const char *>(x);
    Output output{static_cast<char *>(out), out_stride, call.out_dtype, call.add, static_cast<const float *>(call.bias)};
    // Where both are allowed, bfloat16 is the faster of the two for many rows, and rounds less.
    if (rows > VECTOR_ROWS && is_bfloat16(call))
        return multiply_bfloat16(call, source, x_stride, rows, output) ? VLLM_OK : VLLM_FAILED;
    if (rounds(call)) return multiply_int8(call, source, x_stride, rows, output) ? VLLM_OK : VLLM_FAILED;
    bool as_is = call.x_dtype == VLLM_FLOAT32 && !call.norm && x_stride == kp && kp == k;
    const float *plain = static_cast<const float *>(x);
    if (!as_is) {
        float *made = static_cast<float *>(scratch(0, static_cast<size_t>(rows * kp) * 4));
        if (!made) return VLLM_FAILED;
        parallel_ranges(rows, 8, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row) {
                plain_row(call, source + row * x_stride * x_bytes, made + row * kp);
                for (int64_t i = k; i < kp; ++i) made[row * kp + i] = 0.0f;
            }
        });
        plain = made;
    }
    Order held{};
    held.natural = true;
    const float *arranged = plain;
    // The rows in the order of a format; null where there is no memory.
    auto arrange = [&](int32_t format) {
        Order order;
        order_of(format, order);
        if (same_order(order, held)) return arranged;
        held = order;
        arranged = plain;
        if (order.natural) return arranged;
        float *made = static_cast<float *>(scratch(1, static_cast<size_t>(rows * kp) * 4));
        arranged = made;
        if (made)
            parallel_ranges(rows, 8, [&](int64_t begin, int64_t end) {
                for (int64_t row = begin; row < end; ++row) arrange_row(format, order, plain + row * kp, k, kp, made + row * kp);
            });
        return arranged;
    };
    if (gates_in_tiles(call, rows)) {
        if (!arrange(call.parts[0].format)) return VLLM_FAILED;
        return multiply_gated(call, Inputs{arranged, kp, rows}, output) ? VLLM_OK : VLLM_FAILED;
    }
    Output target = output;
    float *wide = call.gate ? wide_rows(call, rows, output, target) : nullptr;
    if (call.gate && !wide) return VLLM_FAILED;
    int64_t first = 0;
    for (int64_t p = 0; p < call.num_parts; ++p) {
        if (!arrange(call.parts[p].format)) return VLLM_FAILED;
        multiply_part(call.parts[p], Inputs{arranged, kp, rows}, target, first);
        first += call.parts[p].n;
    }
    if (call.gate) gate_rows(call, wide, rows, output);
    return VLLM_OK;
}

// --- embedding -------------------------------------------------------------------------------------------------------------

int32_t embedding(void *out, int64_t out_stride, int32_t out_dtype, const void *ids, int32_t ids_dtype, int64_t rows,
                  const vllm_matrix *table, int64_t first, double scale, void *) {
    const vllm_matrix &w = *table;
    Order order;
    if (!is_float(out_dtype) || (ids_dtype != VLLM_INT32 && ids_dtype != VLLM_INT64)) return VLLM_INVALID;
    if (!usable(w, w.k) || !order_of(w.format, order)) return VLLM_UNSUPPORTED;
    int64_t kp = padded(w.k);
    parallel_ranges(rows, 16, [&](int64_t begin, int64_t end) {
        float *buffer = static_cast<float *>(scratch(5, static_cast<size_t>(2 * kp) * 4));
        for (int64_t row = begin; row < end; ++row) {
            char *to = static_cast<char *>(out) + row * out_stride * item_bytes(out_dtype);
            int64_t id = ids_dtype == VLLM_INT32 ? static_cast<const int32_t *>(ids)[row] : static_cast<const int64_t *>(ids)[row];
            id -= first;
            if (id < 0 || id >= w.n) {
                memset(to, 0, static_cast<size_t>(w.k * item_bytes(out_dtype)));
                continue;
            }
            with_format(w.format, [&](auto format) {
                using Format = decltype(format);
                Row from = row_of(w, id);
                for (int64_t c = 0; c < (w.k + Format::CHUNK - 1) / Format::CHUNK; ++c)
                    Format::decode(from, c, [&](int i, vf value) { vf_store(buffer + c * Format::CHUNK + i * VF, value); });
            });
            float *ordered = buffer + kp, factor = static_cast<float>(scale);
            for (int64_t c = 0; c < w.k; c += order.chunk)
                for (int64_t i = 0; i < order.chunk && c + i < w.k; ++i) ordered[c + order.place[i]] = buffer[c + i] * factor;
            narrow(to, ordered, out_dtype, w.k);
        }
    });
    return VLLM_OK;
}

VLLM_VARIANT_END
