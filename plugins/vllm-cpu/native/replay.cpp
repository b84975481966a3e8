// Calls of ops that were recorded, made one after the other: a decode step is one call into the library.
//
// Between two ops nothing is done but the next call, so the pool's threads, which spin for a while before they sleep, find its
// first tasks awake.
#include "vllm/ops.h"

namespace {

// One op's function and its arguments: the struct that it takes, or those below.
struct Recorded {
    const void *function;
    const void *arguments;
    int64_t kind;
};

enum { STRUCT = 0, LINEAR = 1, EMBEDDING = 2 };

struct LinearArguments {
    const vllm_linear_call *call;
    void *out;
    int64_t out_stride;
    const void *x;
    int64_t x_stride, rows;
    void *stream;
};

struct EmbeddingArguments {
    void *out;
    int64_t out_stride;
    int32_t out_dtype;
    const void *ids;
    int32_t ids_dtype;
    int64_t rows;
    const vllm_matrix *table;
    int64_t first;
    double scale;
    void *stream;
};

template <class Function>
Function *as(const void *function) {
    return reinterpret_cast<Function *>(reinterpret_cast<uintptr_t>(function));
}

int32_t call(const Recorded &one) {
    switch (one.kind) {
        case STRUCT: return as<int32_t(const void *)>(one.function)(one.arguments);
        case LINEAR: {
            const auto *a = static_cast<const LinearArguments *>(one.arguments);
            return as<decltype(vllm_linear)>(one.function)(a->call, a->out, a->out_stride, a->x, a->x_stride, a->rows,
                                                           a->stream);
        }
        case EMBEDDING: {
            const auto *a = static_cast<const EmbeddingArguments *>(one.arguments);
            return as<decltype(vllm_embedding)>(one.function)(a->out, a->out_stride, a->out_dtype, a->ids, a->ids_dtype,
                                                              a->rows, a->table, a->first, a->scale, a->stream);
        }
        default: return VLLM_INVALID;
    }
}

}  // namespace

// Returns how many calls were made without a failure; `status` is that of the one that failed.
extern "C" __attribute__((visibility("default"))) int64_t vllm_ops_replay(const Recorded *calls, int64_t count,
                                                                          int32_t *status) {
    *status = VLLM_OK;
    for (int64_t i = 0; i < count; ++i)
        if ((*status = call(calls[i])) != VLLM_OK) return i;
    return count;
}
