/* Ops of native libraries: a plain C ABI. No C++ types, no Python objects.
 *
 * A library exports every function below. The loader checks vllm_ops_abi_version() and vllm_ops_abi_size() before
 * anything else, then that every symbol is there. Semantics of each op: vllm_core.api.ops and its reference.
 *
 * Functions return VLLM_OK or a status; they never throw, abort or keep a pointer after they return. `stream` is the
 * device's stream (NULL on hosts): work is queued there, outputs may be read after it. Tensors belong to the caller.
 */
#ifndef VLLM_OPS_H
#define VLLM_OPS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define VLLM_OPS_ABI_VERSION 1
#define VLLM_MAX_RANK 5

enum vllm_status {
    VLLM_OK = 0,
    VLLM_UNSUPPORTED = 1, /* this dtype, shape or stride has no kernel here */
    VLLM_INVALID = 2,     /* arguments contradict each other */
    VLLM_FAILED = 3       /* the device reported an error */
};

enum vllm_dtype { VLLM_FLOAT32 = 0, VLLM_BFLOAT16 = 1, VLLM_FLOAT16 = 2, VLLM_INT32 = 3, VLLM_INT64 = 4 };

/* Strides count elements. Entries from `rank` on are 0. */
typedef struct vllm_tensor {
    void *data;
    int64_t sizes[VLLM_MAX_RANK];
    int64_t strides[VLLM_MAX_RANK];
    int32_t rank;
    int32_t dtype;
} vllm_tensor;

/* VLLM_OPS_ABI_VERSION and sizeof(vllm_tensor) of the library's build. */
uint32_t vllm_ops_abi_version(void);
uint64_t vllm_ops_abi_size(void);

/* out, x [..., H]; weight float32 [H]. out may be x. */
int32_t vllm_rms_norm(const vllm_tensor *out, const vllm_tensor *x, const vllm_tensor *weight, double eps, void *stream);

/* out [T, N] = x [T, K] @ weight [N, K] transposed + bias [N]; bias may be NULL. */
int32_t vllm_linear(const vllm_tensor *out, const vllm_tensor *x, const vllm_tensor *weight, const vllm_tensor *bias,
                    void *stream);

/* keys, values [num_blocks, tokens_per_block, Hk, D], any strides; k, v [T, Hk, D]; slot_mapping int64 [T]. */
int32_t vllm_kv_write(const vllm_tensor *keys, const vllm_tensor *values, const vllm_tensor *k, const vllm_tensor *v,
                      const vllm_tensor *slot_mapping, void *stream);

/* out, q [T, Hq, D]; query_start int32 [S + 1], seq_lens int32 [S], block_table int32 [S, B]; window 0: all keys,
 * soft_cap 0: none. */
int32_t vllm_paged_attention(const vllm_tensor *out, const vllm_tensor *q, const vllm_tensor *keys,
                             const vllm_tensor *values, const vllm_tensor *query_start, const vllm_tensor *seq_lens,
                             const vllm_tensor *block_table, int64_t max_query_len, int64_t max_seq_len, double scale,
                             int64_t window, double soft_cap, void *stream);

#ifdef __cplusplus
}
#endif

#endif
