"""``aiter.ops.cache``."""

from __future__ import annotations


def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    assert kv_cache_dtype == "auto"
    size = key_cache.shape[1]
    key_cache[slot_mapping // size, slot_mapping % size] = key
    value_cache[slot_mapping // size, slot_mapping % size] = value
