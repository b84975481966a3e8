// gated_activation, activation, soft_cap, add. Oracle: vllm_core.ops.activation, vllm_core.ops.norm.
#include "threads.h"
#include "vmath.h"

VLLM_VARIANT_BEGIN

constexpr int64_t PIECE = 1024;  // numbers widened at once, on the stack

static const char *at(const void *base, int64_t element, int32_t dtype) {
    return static_cast<const char *>(base) + element * item_bytes(dtype);
}

// out[i] = f(a[i], b[i]) for i in 0 .. n - 1; the rest of the last vector is computed and dropped.
template <class F>
static void apply(float *out, const float *a, const float *b, int64_t n, const F &f) {
    int64_t i = 0;
    for (; i + VF <= n; i += VF) vf_store(out + i, f(vf_load(a + i), vf_load(b + i)));
    if (i < n) vf_store_part(out + i, f(vf_load_part(a + i, n - i, 0.0f), vf_load_part(b + i, n - i, 0.0f)), n - i);
}

// out = f(x, second) over rows, in pieces. `second` is elements further in x (y NULL), or y.
template <class F>
static int32_t over_rows(const vllm_elementwise_args *a, int64_t second, const F &f) {
    const int32_t dtype = static_cast<int32_t>(a->dtype);
    if (!is_float(dtype)) return VLLM_UNSUPPORTED;
    if (a->rows < 0 || a->size < 0) return VLLM_INVALID;
    const int64_t pieces = (a->size + PIECE - 1) / PIECE;
    parallel_ranges(a->rows * pieces, 24, [&](int64_t begin, int64_t end) {
        alignas(64) float x[PIECE], y[PIECE];
        for (int64_t task = begin; task < end; ++task) {
            int64_t row = task / pieces, first = task % pieces * PIECE, n = smaller(PIECE, a->size - first);
            widen(x, at(a->x, row * a->x_stride + first, dtype), dtype, n);
            const float *other = x;
            if (a->y || second) {
                const char *from = a->y ? at(a->y, row * a->y_stride + first, dtype)
                                        : at(a->x, row * a->x_stride + second + first, dtype);
                widen(y, from, dtype, n);
                other = y;
            }
            apply(x, x, other, n, f);
            narrow(const_cast<char *>(at(a->out, row * a->out_stride + first, dtype)), x, dtype, n);
        }
    });
    return VLLM_OK;
}

int32_t gated_activation(const vllm_elementwise_args *a) {
    const int64_t kind = a->kind;
    if (kind < VLLM_SILU || kind > VLLM_RELU || a->y) return VLLM_INVALID;
    return over_rows(a, a->size, [=](vf gate, vf up) { return vf_mul(vf_activate(gate, kind), up); });
}

int32_t activation(const vllm_elementwise_args *a) {
    const int64_t kind = a->kind;
    if (kind < VLLM_SILU || kind > VLLM_RELU || a->y) return VLLM_INVALID;
    return over_rows(a, 0, [=](vf x, vf) { return vf_activate(x, kind); });
}

int32_t soft_cap(const vllm_elementwise_args *a) {
    if (!(a->cap > 0) || a->y) return VLLM_INVALID;
    const vf cap = vf_set(static_cast<float>(a->cap));
    return over_rows(a, 0, [=](vf x, vf) { return vf_mul(cap, vf_tanh(vf_div(x, cap))); });
}

int32_t add(const vllm_elementwise_args *a) {
    if (!a->y && a->rows) return VLLM_INVALID;
    return over_rows(a, 0, [](vf x, vf y) { return vf_add(x, y); });
}

VLLM_VARIANT_END
