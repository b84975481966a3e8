// rotary_embedding, and qk_norm_rope_kv_write: what happens to queries and keys between the product and attention, one pass
// over a token. Oracle: vllm_core.ops.rope, vllm_core.ops.attention.
#include "kv.h"
#include "norm.h"
#include "threads.h"

VLLM_VARIANT_BEGIN

// Rotate the first 2 * half numbers of a head.
static void rotate(float *x, const float *cos, const float *sin, int64_t half, bool interleaved) {
    if (interleaved) {
        for (int64_t i = 0; i < half; ++i) {
            float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cos[i] - b * sin[i];
            x[2 * i + 1] = b * cos[i] + a * sin[i];
        }
        return;
    }
    float *y = x + half;
    int64_t i = 0;
    for (; i + VF <= half; i += VF) {
        vf a = vf_load(x + i), b = vf_load(y + i), c = vf_load(cos + i), s = vf_load(sin + i);
        vf_store(x + i, vf_sub(vf_mul(a, c), vf_mul(b, s)));
        vf_store(y + i, vf_fma(b, c, vf_mul(a, s)));
    }
    for (; i < half; ++i) {
        float a = x[i], b = y[i];
        x[i] = a * cos[i] - b * sin[i];
        y[i] = b * cos[i] + a * sin[i];
    }
}

// Norm and rotation of all heads of one token, in float.
static void turn(const vllm_heads_args *a, float *x, int64_t heads, const float *weight, int64_t token) {
    const int64_t half = a->rotary / 2;
    const float *cos = a->cos_sin ? a->cos_sin + a->positions[token] * 2 * half : nullptr;
    for (int64_t head = 0; head < heads; ++head, x += a->head_size) {
        if (weight) rms_row(x, x, weight, a->head_size, static_cast<float>(a->eps));
        if (cos) rotate(x, cos, cos + half, half, a->interleaved != 0);
    }
}

// Both ops: `write(token, keys)` gets the finished keys, which have not been rounded to the dtype: the cache may be finer,
// and where it is coarser two roundings would miss the nearest number.
template <class Write>
static int32_t over_tokens(const vllm_heads_args *a, const float *q_weight, const float *k_weight, const Write &write) {
    const int32_t dtype = static_cast<int32_t>(a->dtype);
    if (!is_float(dtype)) return VLLM_UNSUPPORTED;
    if (a->rotary % 2 || a->rotary > a->head_size) return VLLM_INVALID;
    const int64_t item = item_bytes(dtype), q_row = a->q_heads * a->head_size, k_row = a->k_heads * a->head_size;
    const bool q_changes = q_weight || a->cos_sin, k_changes = k_weight || a->cos_sin;
    parallel_ranges(a->tokens, larger(1, 49152 / (q_row + k_row)), [&](int64_t begin, int64_t end) {
        float *wide = static_cast<float *>(scratch(2, static_cast<size_t>(q_row > k_row ? q_row : k_row) * 4));
        for (int64_t t = begin; t < end; ++t) {
            char *q = static_cast<char *>(a->q) + t * a->q_stride * item, *k = static_cast<char *>(a->k) + t * a->k_stride * item;
            if (q_changes) {
                widen(wide, q, dtype, q_row);
                turn(a, wide, a->q_heads, q_weight, t);
                narrow(q, wide, dtype, q_row);
            }
            widen(wide, k, dtype, k_row);
            if (k_changes) {
                turn(a, wide, a->k_heads, k_weight, t);
                narrow(k, wide, dtype, k_row);
            }
            write(t, wide);
        }
    });
    return VLLM_OK;
}

int32_t rotary_embedding(const vllm_heads_args *a) {
    if (!a->cos_sin) return VLLM_INVALID;
    return over_tokens(a, nullptr, nullptr, [](int64_t, const float *) {});
}

int32_t qk_norm_rope_kv_write(const vllm_heads_args *a) {
    const vllm_kv *kv = a->kv;
    if (kv->num_heads != a->k_heads || kv->head_size != a->head_size) return VLLM_INVALID;
    const int64_t limit = kv->num_blocks * kv->tokens_per_block, size = a->head_size, row = a->k_heads * size;
    for (int64_t t = 0; t < a->tokens; ++t)
        if (a->slot_mapping[t] < 0 || a->slot_mapping[t] >= limit) return VLLM_INVALID;
    const int32_t dtype = static_cast<int32_t>(a->dtype);
    return with_element(kv->dtype, [&](auto element) -> int32_t {
        typedef decltype(element) E;
        return over_tokens(a, a->q_weight, a->k_weight, [&](int64_t t, const float *k) {
            float *v = static_cast<float *>(scratch(3, static_cast<size_t>(row) * 4));
            widen(v, static_cast<const char *>(a->v) + t * a->v_stride * item_bytes(dtype), dtype, row);
            int64_t block = a->slot_mapping[t] / kv->tokens_per_block, offset = a->slot_mapping[t] % kv->tokens_per_block;
            for (int64_t head = 0; head < a->k_heads; ++head)
                put_token<E>(Plane<E>(kv, block, head), offset, kv->tokens_per_block, size, k + head * size, v + head * size);
        });
    });
}

VLLM_VARIANT_END
