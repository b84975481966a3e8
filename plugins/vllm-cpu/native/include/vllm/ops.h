/* Ops of native libraries: a plain C ABI. No C++ types, no Python objects.
 *
 * A library exports vllm_ops_abi_version, vllm_ops_abi_size, vllm_ops_list, and the ops that it lists. The loader checks version
 * and size before anything else, then that every symbol is there. Semantics of each op: vllm_core.api.ops and its reference.
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

#define VLLM_OPS_ABI_VERSION 3

/* --- the library ------------------------------------------------------------------------------------------------- */

enum vllm_status {
    VLLM_OK = 0,
    VLLM_UNSUPPORTED = 1, /* this dtype, shape, stride or format has no kernel here */
    VLLM_INVALID = 2,     /* arguments contradict each other */
    VLLM_FAILED = 3       /* the device reported an error, or there is no memory */
};

enum vllm_dtype { VLLM_FLOAT32 = 0, VLLM_BFLOAT16 = 1, VLLM_FLOAT16 = 2, VLLM_INT32 = 3, VLLM_INT64 = 4 };

/* VLLM_OPS_ABI_VERSION and sizeof(vllm_linear_call) of the library's build. */
uint32_t vllm_ops_abi_version(void);
uint64_t vllm_ops_abi_size(void);

/* Which of its kernels the library uses on this CPU or device, for people to read, e.g. "avx2". */
const char *vllm_ops_variant(void);

/* Names of the ops that the library has, without `vllm_`, a space between them: "rms_norm linear". Each is a function below. */
const char *vllm_ops_list(void);

/* Use the kernels of this name from now on, for tests. VLLM_INVALID: there are none; VLLM_UNSUPPORTED: not on this CPU. */
int32_t vllm_ops_use(const char *variant);

/* Threads that an op may use at most, the caller's included; 0: as many as the process may run at once. */
int32_t vllm_ops_set_threads(int64_t count);

/* --- linear ------------------------------------------------------------------------------------------------------ */

/* How a matrix [n, k] is stored; the quantised ones are those of vllm_core.api.quant.FORMATS, by the same names. */
enum vllm_format {
    VLLM_ROWS_FLOAT32 = 0, /* plain rows */
    VLLM_ROWS_BFLOAT16 = 1,
    VLLM_ROWS_FLOAT16 = 2,
    VLLM_Q4_0 = 3,
    VLLM_Q4_1 = 4,
    VLLM_Q5_0 = 5,
    VLLM_Q5_1 = 6,
    VLLM_Q8_0 = 7,
    VLLM_Q2_K = 8,
    VLLM_Q3_K = 9,
    VLLM_Q4_K = 10,
    VLLM_Q5_K = 11,
    VLLM_Q6_K = 12,
    VLLM_INT8_CHANNEL = 13, /* scale float32 [n] */
    VLLM_INT4_GROUP = 14    /* scale float32 [n, k / group], zero uint8 [n, k / group] */
};

/* Row i begins at data + i * row_bytes. `scale` and `zero` are NULL where the format's data holds them. */
typedef struct vllm_matrix {
    const void *data;
    const void *scale;
    const void *zero;
    int64_t n;
    int64_t k;
    int64_t row_bytes;
    int32_t format;
    int32_t group;
} vllm_matrix;

enum vllm_gate { VLLM_GATE_NONE = 0, VLLM_GATE_SILU = 1, VLLM_GATE_GELU = 2, VLLM_GATE_GELU_TANH = 3 };
enum vllm_activation { VLLM_EXACT = 0, VLLM_INT8 = 1 };

/* What is constant at a call site of linear.
 *
 * The weight is `parts` stacked along n, each of the same k, n in all. norm: NULL, or float weights [k] of an RMS norm with
 * `eps` that x passes first. gate: rows 0 .. n / 2 of the weight are the gate, the others what is gated, and out has n / 2
 * columns. add: the product is added to out. bias: NULL, or float32 [n]. int8: x may be rounded to eight bits. */
typedef struct vllm_linear_call {
    const vllm_matrix *parts;
    int64_t num_parts;
    int64_t n;
    int64_t k;
    const void *bias;
    const void *norm;
    double eps;
    int32_t norm_dtype;
    int32_t gate;
    int32_t add;
    int32_t activation;
    int32_t x_dtype;
    int32_t out_dtype;
} vllm_linear_call;

/* out [rows, n or n / 2] = x [rows, k] @ weight transposed + bias; strides count elements from row to row. */
int32_t vllm_linear(const vllm_linear_call *call, void *out, int64_t out_stride, const void *x, int64_t x_stride,
                    int64_t rows, void *stream);

/* out [rows, k] = table[ids - first] * scale, zeros where there is no such row; ids int32 or int64 [rows]. */
int32_t vllm_embedding(void *out, int64_t out_stride, int32_t out_dtype, const void *ids, int32_t ids_dtype, int64_t rows,
                       const vllm_matrix *table, int64_t first, double scale, void *stream);

/* --- norm, rope, kv, attention, activation, batch, sampling ---------------------------------------------------------
 *
 * One struct an op: pointers, int64_t and double alone, so that its layout is the same everywhere. `dtype` is that of the
 * tensors of the model's dtype, one of the three floats. A `stride` counts elements from row to row of a tensor whose other
 * dimensions are contiguous; tensors without one are contiguous. `stream` is the device's, NULL on hosts. */

/* out, x [outer, inner, size]; weight, bias float32 [size]; residual [outer, size] for add_rms_norm, where inner is 1.
 * out may be x. bias is read by layer_norm alone. */
typedef struct vllm_norm_args {
    void *stream;
    void *out;
    const void *x;
    void *residual;
    const float *weight;
    const float *bias;
    int64_t outer, inner, size;
    int64_t out_stride, x_stride;
    int64_t dtype;
    double eps;
} vllm_norm_args;

int32_t vllm_rms_norm(const vllm_norm_args *args);
int32_t vllm_add_rms_norm(const vllm_norm_args *args);
int32_t vllm_layer_norm(const vllm_norm_args *args);

/* How keys and values are kept, beside the dtypes of activations. INT8 has scales in the block. */
enum vllm_kv_dtype { VLLM_KV_INT8 = 16, VLLM_KV_FP8_E4M3 = 17, VLLM_KV_FP8_E5M2 = 18 };

/* The blocks of one layer: num_blocks times block_bytes, of a layout that is the library's own. `dtype` is one of the
 * activations' or of vllm_kv_dtype. */
typedef struct vllm_kv {
    void *blocks;
    int64_t num_blocks, block_bytes;
    int64_t num_heads, head_size, tokens_per_block;
    int64_t dtype;
} vllm_kv;

/* Sets kv->block_bytes from heads, head size, tokens per block and dtype. VLLM_UNSUPPORTED: no such dtype. */
int32_t vllm_kv_layout(vllm_kv *kv);

/* k, v [tokens, heads, D]; slot_mapping int64 [tokens]: block * tokens_per_block + offset. */
typedef struct vllm_kv_write_args {
    void *stream;
    const vllm_kv *kv;
    const void *k;
    const void *v;
    const int64_t *slot_mapping;
    int64_t k_stride, v_stride;
    int64_t tokens;
    int64_t dtype;
} vllm_kv_write_args;

int32_t vllm_kv_write(const vllm_kv_write_args *args);

/* Whole blocks: source, target int64 [count]. `blocks` float32 [count, 2, tokens_per_block, heads, D], keys first; kv_export
 * reads the blocks of `source` into it, kv_import writes it to those of `target`. */
typedef struct vllm_kv_blocks_args {
    void *stream;
    const vllm_kv *kv;
    float *blocks;
    const int64_t *source;
    const int64_t *target;
    int64_t count;
} vllm_kv_blocks_args;

int32_t vllm_kv_copy(const vllm_kv_blocks_args *args);
int32_t vllm_kv_export(const vllm_kv_blocks_args *args);
int32_t vllm_kv_import(const vllm_kv_blocks_args *args);

/* q [tokens, q_heads, D], k [tokens, k_heads, D], both in place; positions int32 [tokens]; cos_sin float32
 * [positions, 2, rotary / 2]. rotary_embedding reads what is above the line; qk_norm_rope_kv_write all: q_weight, k_weight
 * float32 [D] or NULL, cos_sin or NULL, v [tokens, k_heads, D]. */
typedef struct vllm_heads_args {
    void *stream;
    void *q;
    void *k;
    const int32_t *positions;
    const float *cos_sin;
    int64_t q_stride, k_stride;
    int64_t tokens, q_heads, k_heads, head_size;
    int64_t rotary, interleaved;
    int64_t dtype;
    /* ---- */
    const void *v;
    const float *q_weight;
    const float *k_weight;
    const vllm_kv *kv;
    const int64_t *slot_mapping;
    int64_t v_stride;
    double eps;
} vllm_heads_args;

int32_t vllm_rotary_embedding(const vllm_heads_args *args);
int32_t vllm_qk_norm_rope_kv_write(const vllm_heads_args *args);

/* out, q [T, q_heads, D]; query_start int32 [rows + 1], seq_lens int32 [rows], block_table int32 [rows, table_stride].
 * window 0: all keys; soft_cap 0: none. Entries of the table wholly behind the window or beyond the sequence are not read.
 * sinks float32 [q_heads], or NULL: a logit of each head that takes part in its softmax and has no value. */
typedef struct vllm_attention_args {
    void *stream;
    void *out;
    const void *q;
    const vllm_kv *kv;
    const int32_t *query_start;
    const int32_t *seq_lens;
    const int32_t *block_table;
    int64_t out_stride, q_stride, table_stride;
    int64_t rows, q_heads;
    int64_t window;
    int64_t dtype;
    double scale, soft_cap;
    const float *sinks;
} vllm_attention_args;

int32_t vllm_paged_attention(const vllm_attention_args *args);

/* out, q [T, q_heads, D]; k, v [T, k_heads, D]; query_start int32 [rows + 1]. Every token of a row sees all of them. */
typedef struct vllm_encoder_args {
    void *stream;
    void *out;
    const void *q;
    const void *k;
    const void *v;
    const int32_t *query_start;
    int64_t out_stride, q_stride, k_stride, v_stride;
    int64_t rows, q_heads, k_heads, head_size;
    int64_t dtype;
    double scale;
} vllm_encoder_args;

int32_t vllm_encoder_attention(const vllm_encoder_args *args);

enum vllm_activation_kind { VLLM_SILU = 0, VLLM_GELU = 1, VLLM_GELU_TANH = 2, VLLM_RELU = 3 };

/* gated_activation: out [rows, size] = f(x[:, :size]) * x[:, size:], x [rows, 2 size]. activation: out = f(x), both
 * [rows, size]; out may be x. soft_cap: out = cap * tanh(x / cap). add: out = x + y. */
typedef struct vllm_elementwise_args {
    void *stream;
    void *out;
    const void *x;
    const void *y;
    int64_t out_stride, x_stride, y_stride;
    int64_t rows, size;
    int64_t kind;
    int64_t dtype;
    double cap;
} vllm_elementwise_args;

int32_t vllm_gated_activation(const vllm_elementwise_args *args);
int32_t vllm_activation(const vllm_elementwise_args *args);
int32_t vllm_soft_cap(const vllm_elementwise_args *args);
int32_t vllm_add(const vllm_elementwise_args *args);

/* gather_rows: out [count, size] = x[index], index int64 [count], x [rows, size]. pool: out float32 [count, size] from the
 * rows of x that int32 query_start [count + 1] bounds; kind 0 mean, 1 first, 2 last; divided by its L2 norm if `normalize`. */
typedef struct vllm_rows_args {
    void *stream;
    void *out;
    const void *x;
    const int64_t *index;
    const int32_t *query_start;
    int64_t out_stride, x_stride;
    int64_t count, rows, size;
    int64_t kind, normalize;
    int64_t dtype;
} vllm_rows_args;

int32_t vllm_gather_rows(const vllm_rows_args *args);
int32_t vllm_pool(const vllm_rows_args *args);

/* The batch state, vllm_core.api.batch.BatchState: num_slots + 1 rows each, of the widths named. Per KV group: a table and
 * its width, and its tokens per block. */
typedef struct vllm_state {
    int32_t *tokens;
    int32_t *computed;
    int32_t *params;
    int32_t *bias_ids;
    float *bias_values;
    int32_t *stop_ids;
    int32_t *bad_words;
    int32_t *const *tables;
    const int64_t *table_widths;
    const int64_t *tokens_per_block;
    int64_t num_groups, num_slots;
    int64_t tokens_width, bias_width, stop_width, bad_width;
} vllm_state;

/* `packed` is the step's difference, int32 [words], laid out by vllm_core.api.batch. VLLM_INVALID: it names a slot or a place
 * that the state does not have, or is too short. */
typedef struct vllm_update_args {
    void *stream;
    const vllm_state *state;
    const int32_t *packed;
    int64_t words;
} vllm_update_args;

int32_t vllm_batch_update(const vllm_update_args *args);

/* The fields of vllm_core.api.batch.StepInputs; slot_mapping and tables one pointer a group, table_columns their widths. */
typedef struct vllm_step {
    int32_t *token_ids;
    int32_t *positions;
    int32_t *slots;
    int32_t *query_start;
    int32_t *seq_lens;
    int64_t *sample_rows;
    int64_t *sample_slots;
    int32_t *sample_lengths;
    int64_t *const *slot_mapping;
    int32_t *const *tables;
    const int64_t *table_columns;
} vllm_step;

typedef struct vllm_build_args {
    void *stream;
    const vllm_state *state;
    const int32_t *packed;
    const vllm_step *step;
    int64_t words;
} vllm_build_args;

int32_t vllm_build_step(const vllm_build_args *args);

/* slots, seq_lens int32 [rows]; sample_slots int64 [sampled], tokens int32 [sampled]. */
typedef struct vllm_advance_args {
    void *stream;
    const vllm_state *state;
    const int32_t *slots;
    const int32_t *seq_lens;
    const int64_t *sample_slots;
    const int32_t *tokens;
    int64_t rows, sampled;
} vllm_advance_args;

int32_t vllm_advance(const vllm_advance_args *args);

/* logits float32 [rows, vocab]; slots int64 [rows], lengths int32 [rows]; features are bits of vllm_core.api.batch.F_*.
 * sample writes tokens int32 [rows] and nonfinite uint8 [rows]; logit_adjust changes the logits. */
typedef struct vllm_tail_args {
    void *stream;
    int32_t *tokens;
    uint8_t *nonfinite;
    float *logits;
    const vllm_state *state;
    const int64_t *slots;
    const int32_t *lengths;
    int64_t rows, vocab;
    int64_t features;
} vllm_tail_args;

int32_t vllm_sample(const vllm_tail_args *args);
int32_t vllm_logit_adjust(const vllm_tail_args *args);

/* log_probabilities: tokens int64 [rows]; chosen float32 [rows], rank int32 [rows], top_ids int32 [rows, k], top float32
 * [rows, k]. grammar_mask: mask int32 [masked, ceil(vocab / 32)], index int64 [masked] rows of the logits. */
typedef struct vllm_logits_args {
    void *stream;
    float *logits;
    const int64_t *tokens;
    float *chosen;
    int32_t *rank;
    int32_t *top_ids;
    float *top;
    const int32_t *mask;
    const int64_t *index;
    int64_t rows, vocab, k, masked;
} vllm_logits_args;

int32_t vllm_log_probabilities(const vllm_logits_args *args);
int32_t vllm_grammar_mask(const vllm_logits_args *args);

#ifdef __cplusplus
}
#endif

#endif
