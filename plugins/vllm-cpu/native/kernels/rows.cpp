// gather_rows, pool. Oracle: vllm_core.ops.embedding, vllm_core.ops.pooling.
#include "norm.h"
#include "threads.h"

VLLM_VARIANT_BEGIN

int32_t gather_rows(const vllm_rows_args *a) {
    const int32_t dtype = static_cast<int32_t>(a->dtype);
    if (!is_float(dtype)) return VLLM_UNSUPPORTED;
    const int64_t item = item_bytes(dtype);
    for (int64_t i = 0; i < a->count; ++i)
        if (a->index[i] < 0 || a->index[i] >= a->rows) return VLLM_INVALID;
    parallel_ranges(a->count, larger(1, 65536 / larger(1, a->size)), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            memcpy(static_cast<char *>(a->out) + i * a->out_stride * item,
                   static_cast<const char *>(a->x) + a->index[i] * a->x_stride * item, static_cast<size_t>(a->size * item));
    });
    return VLLM_OK;
}

enum { POOL_MEAN = 0, POOL_FIRST = 1, POOL_LAST = 2 };

static void pool_row(const vllm_rows_args *a, int64_t row, float *wide) {
    const int32_t dtype = static_cast<int32_t>(a->dtype);
    const int64_t item = item_bytes(dtype), begin = a->query_start[row], end = a->query_start[row + 1];
    float *out = static_cast<float *>(a->out) + row * a->out_stride;
    const char *x = static_cast<const char *>(a->x);
    if (a->kind == POOL_MEAN) {
        for (int64_t i = 0; i < a->size; ++i) out[i] = 0.0f;
        for (int64_t t = begin; t < end; ++t) {
            widen(wide, x + t * a->x_stride * item, dtype, a->size);
            for (int64_t i = 0; i < a->size; ++i) out[i] += wide[i];
        }
        float count = static_cast<float>(larger(1, end - begin));
        for (int64_t i = 0; i < a->size; ++i) out[i] /= count;
    } else {
        widen(out, x + (a->kind == POOL_FIRST ? begin : end - 1) * a->x_stride * item, dtype, a->size);
    }
    if (a->normalize) {
        float norm = sqrtf(squares(out, a->size, 0.0f));
        if (norm < 1e-12f) norm = 1e-12f;
        for (int64_t i = 0; i < a->size; ++i) out[i] /= norm;
    }
}

int32_t pool(const vllm_rows_args *a) {
    if (!is_float(static_cast<int32_t>(a->dtype))) return VLLM_UNSUPPORTED;
    if (a->kind < POOL_MEAN || a->kind > POOL_LAST || a->size < 1) return VLLM_INVALID;
    for (int64_t i = 0; i < a->count; ++i) {
        int64_t begin = a->query_start[i], end = a->query_start[i + 1];
        if (begin < 0 || end < begin || end > a->rows || (a->kind != POOL_MEAN && begin == end)) return VLLM_INVALID;
    }
    parallel_ranges(a->count, larger(1, 4096 / a->size), [&](int64_t begin, int64_t end) {
        float *wide = static_cast<float *>(scratch(2, static_cast<size_t>(a->size) * 4));
        for (int64_t row = begin; row < end; ++row) pool_row(a, row, wide);
    });
    return VLLM_OK;
}

VLLM_VARIANT_END
