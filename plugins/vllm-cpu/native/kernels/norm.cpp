// rms_norm, add_rms_norm, layer_norm. A row's sum is taken in one order, whatever else is in the batch.
// Oracle: vllm_core.ops.norm.
#include "norm.h"
#include "threads.h"

VLLM_VARIANT_BEGIN

static int32_t check(const vllm_norm_args *a) {
    if (!is_float(static_cast<int32_t>(a->dtype))) return VLLM_UNSUPPORTED;
    return a->outer < 0 || a->inner < 1 || a->size < 1 ? VLLM_INVALID : VLLM_OK;
}

// Rows together in one task: some ten microseconds of work, or it is not worth a thread.
static int64_t grain(int64_t size) { return larger(1, 65536 / size); }

static char *row_of(const void *base, int64_t stride, int64_t outer, int64_t inner, const vllm_norm_args *a) {
    int64_t at = outer * stride + inner * a->size;
    return static_cast<char *>(const_cast<void *>(base)) + at * item_bytes(static_cast<int32_t>(a->dtype));
}

int32_t rms_norm(const vllm_norm_args *a) {
    if (int32_t status = check(a)) return status;
    const int32_t dtype = static_cast<int32_t>(a->dtype);
    parallel_ranges(a->outer * a->inner, grain(a->size), [&](int64_t begin, int64_t end) {
        float *wide = static_cast<float *>(scratch(2, static_cast<size_t>(a->size) * 4));
        for (int64_t row = begin; row < end; ++row) {
            int64_t outer = row / a->inner, inner = row % a->inner;
            widen(wide, row_of(a->x, a->x_stride, outer, inner, a), dtype, a->size);
            rms_row(wide, wide, a->weight, a->size, static_cast<float>(a->eps));
            narrow(row_of(a->out, a->out_stride, outer, inner, a), wide, dtype, a->size);
        }
    });
    return VLLM_OK;
}

int32_t add_rms_norm(const vllm_norm_args *a) {
    if (int32_t status = check(a)) return status;
    if (a->inner != 1) return VLLM_INVALID;
    const int32_t dtype = static_cast<int32_t>(a->dtype);
    parallel_ranges(a->outer, grain(a->size), [&](int64_t begin, int64_t end) {
        float *sum = static_cast<float *>(scratch(2, static_cast<size_t>(a->size) * 8)), *x = sum + a->size;
        for (int64_t row = begin; row < end; ++row) {
            char *residual = row_of(a->residual, a->size, row, 0, a);
            widen(sum, residual, dtype, a->size);
            widen(x, row_of(a->x, a->x_stride, row, 0, a), dtype, a->size);
            for (int64_t i = 0; i < a->size; ++i) sum[i] += x[i];
            narrow(residual, sum, dtype, a->size);
            widen(sum, residual, dtype, a->size);  // the norm is that of the residual as it was rounded
            rms_row(sum, sum, a->weight, a->size, static_cast<float>(a->eps));
            narrow(row_of(a->out, a->out_stride, row, 0, a), sum, dtype, a->size);
        }
    });
    return VLLM_OK;
}

int32_t layer_norm(const vllm_norm_args *a) {
    if (int32_t status = check(a)) return status;
    const int32_t dtype = static_cast<int32_t>(a->dtype);
    parallel_ranges(a->outer * a->inner, grain(a->size), [&](int64_t begin, int64_t end) {
        float *wide = static_cast<float *>(scratch(2, static_cast<size_t>(a->size) * 4));
        for (int64_t row = begin; row < end; ++row) {
            int64_t outer = row / a->inner, inner = row % a->inner;
            widen(wide, row_of(a->x, a->x_stride, outer, inner, a), dtype, a->size);
            layer_row(wide, a->weight, a->bias, a->size, static_cast<float>(a->eps));
            narrow(row_of(a->out, a->out_stride, outer, inner, a), wide, dtype, a->size);
        }
    });
    return VLLM_OK;
}

VLLM_VARIANT_END
