// kv_layout, kv_write, kv_copy, kv_export, kv_import. Oracle: vllm_core.ops.attention.
#include "kv.h"
#include "threads.h"

VLLM_VARIANT_BEGIN

int32_t kv_layout(vllm_kv *kv) {
    if (kv->num_heads < 1 || kv->head_size < 1 || kv->tokens_per_block < 1) return VLLM_INVALID;
    return with_element(kv->dtype, [&](auto element) -> int32_t {
        typedef decltype(element) E;
        int64_t numbers = 2 * kv->num_heads * kv->head_size * kv->tokens_per_block;
        kv->block_bytes = E::scaled ? scale_offset(kv) + 2 * kv->num_heads * kv->tokens_per_block * 4
                                    : numbers * static_cast<int64_t>(sizeof(typename E::T));
        return VLLM_OK;
    });
}

static bool are_blocks(const int64_t *blocks, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; ++i)
        if (blocks[i] < 0 || blocks[i] >= limit) return false;
    return true;
}

int32_t kv_write(const vllm_kv_write_args *a) {
    const vllm_kv *kv = a->kv;
    const int32_t dtype = static_cast<int32_t>(a->dtype);
    if (!is_float(dtype)) return VLLM_UNSUPPORTED;
    if (!are_blocks(a->slot_mapping, a->tokens, kv->num_blocks * kv->tokens_per_block)) return VLLM_INVALID;
    const int64_t item = item_bytes(dtype), size = kv->head_size, row = kv->num_heads * size;
    return with_element(kv->dtype, [&](auto element) -> int32_t {
        typedef decltype(element) E;
        parallel_ranges(a->tokens, larger(1, 24576 / row), [&](int64_t begin, int64_t end) {
            float *k = static_cast<float *>(scratch(2, static_cast<size_t>(row) * 8)), *v = k + row;
            for (int64_t t = begin; t < end; ++t) {
                widen(k, static_cast<const char *>(a->k) + t * a->k_stride * item, dtype, row);
                widen(v, static_cast<const char *>(a->v) + t * a->v_stride * item, dtype, row);
                int64_t block = a->slot_mapping[t] / kv->tokens_per_block, offset = a->slot_mapping[t] % kv->tokens_per_block;
                for (int64_t head = 0; head < kv->num_heads; ++head)
                    put_token<E>(Plane<E>(kv, block, head), offset, kv->tokens_per_block, size, k + head * size,
                                 v + head * size);
            }
        });
        return VLLM_OK;
    });
}

int32_t kv_copy(const vllm_kv_blocks_args *a) {
    const vllm_kv *kv = a->kv;
    if (!are_blocks(a->source, a->count, kv->num_blocks) || !are_blocks(a->target, a->count, kv->num_blocks)) return VLLM_INVALID;
    char *blocks = static_cast<char *>(kv->blocks);
    parallel_ranges(a->count, larger(1, 65536 / kv->block_bytes), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            memcpy(blocks + a->target[i] * kv->block_bytes, blocks + a->source[i] * kv->block_bytes,
                   static_cast<size_t>(kv->block_bytes));
    });
    return VLLM_OK;
}

// body(plane, keys, values) for each block and head: keys and values float [tokens_per_block, heads, D], at the head.
template <class E, class Body>
static void over_planes(const vllm_kv_blocks_args *a, const int64_t *blocks, const Body &body) {
    const vllm_kv *kv = a->kv;
    const int64_t half = kv->tokens_per_block * kv->num_heads * kv->head_size;
    parallel_ranges(a->count, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            for (int64_t head = 0; head < kv->num_heads; ++head) {
                float *keys = a->blocks + 2 * i * half + head * kv->head_size;
                body(Plane<E>(kv, blocks[i], head), keys, keys + half);
            }
    });
}

int32_t kv_export(const vllm_kv_blocks_args *a) {
    const vllm_kv *kv = a->kv;
    if (!are_blocks(a->source, a->count, kv->num_blocks)) return VLLM_INVALID;
    const int64_t size = kv->head_size, row = kv->num_heads * size, tokens = kv->tokens_per_block;
    return with_element(kv->dtype, [&](auto element) -> int32_t {
        typedef decltype(element) E;
        over_planes<E>(a, a->source, [&](const Plane<E> &plane, float *keys, float *values) {
            for (int64_t t = 0; t < tokens; ++t)
                for (int64_t i = 0; i < size; ++i) {
                    float key = E::get(plane.keys[i * tokens + t]), value = E::get(plane.values[t * size + i]);
                    keys[t * row + i] = E::scaled ? key * plane.key_scale[t] : key;
                    values[t * row + i] = E::scaled ? value * plane.value_scale[t] : value;
                }
        });
        return VLLM_OK;
    });
}

int32_t kv_import(const vllm_kv_blocks_args *a) {
    const vllm_kv *kv = a->kv;
    if (!are_blocks(a->target, a->count, kv->num_blocks)) return VLLM_INVALID;
    const int64_t row = kv->num_heads * kv->head_size, tokens = kv->tokens_per_block;
    return with_element(kv->dtype, [&](auto element) -> int32_t {
        typedef decltype(element) E;
        over_planes<E>(a, a->target, [&](const Plane<E> &plane, const float *keys, const float *values) {
            for (int64_t t = 0; t < tokens; ++t)
                put_token<E>(plane, t, tokens, kv->head_size, keys + t * row, values + t * row);
        });
        return VLLM_OK;
    });
}

VLLM_VARIANT_END
