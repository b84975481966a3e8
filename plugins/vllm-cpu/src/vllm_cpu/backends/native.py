"""Offers of the native library's kernels but linear's: what the loaded library lists, families only whole."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_core.api import Offer
from vllm_cpu import native
from vllm_cpu.native_kv import KV_DTYPES, kv_layout

PROVIDER = "vllm-cpu-native"
PRIORITY = 10
"""Above the kernels on torch and numpy, which serve where there is no library, or it lacks an op."""

_DTYPES = frozenset({"float32", "bfloat16", "float16"})
_MODULES = {
    "native_norm": ("rms_norm", "add_rms_norm", "layer_norm"),
    "native_rows": ("gated_activation", "activation", "soft_cap", "add", "gather_rows", "pool"),
    "native_attention": ("rotary_embedding", "encoder_attention"),
    "native_sampling": ("log_probabilities", "grammar_mask"),
}
_TAIL = {"native_sampling": ("sample", "logit_adjust")}
_BATCH = ("batch_update", "build_step", "advance")
_KV = ("kv_layout", "kv_write", "paged_attention", "kv_copy", "kv_export", "kv_import")
_FUSED_KV = "qk_norm_rope_kv_write"


def offers() -> Sequence[Offer]:
    """What the loaded library has; nothing without a library."""
    there = native.load().ops
    made = [_offer(module, name) for module, names in _MODULES.items() for name in names if name in there]
    made += [_offer(module, name, plain=True) for module, names in _TAIL.items() for name in names if name in there]
    if there.issuperset(_BATCH):
        made.append(Offer(provider=PROVIDER, priority=PRIORITY, ops={name: _entry("native_batch", name) for name in _BATCH}))
    if there.issuperset(_KV):
        names = ["kv_bind", *_KV[1:], *([_FUSED_KV] if _FUSED_KV in there else [])]
        made.append(
            Offer(
                provider=PROVIDER,
                priority=PRIORITY,
                ops={name: _entry("native_attention", name) for name in names},
                dtypes=_DTYPES,
                kv_dtypes=frozenset(KV_DTYPES),
                features=frozenset({"sliding_window", "soft_cap", "sinks", "interleaved"}),
                kv_layout=kv_layout,
            )
        )
    return made


def has_kv() -> bool:
    """Whether the loaded library keeps the KV cache."""
    return native.load().ops.issuperset(_KV)


def _offer(module: str, name: str, *, plain: bool = False) -> Offer:
    features = frozenset({"interleaved"}) if name == "rotary_embedding" else frozenset[str]()
    ops, dtypes = {name: _entry(module, name)}, None if plain else _DTYPES
    return Offer(provider=PROVIDER, priority=PRIORITY, ops=ops, dtypes=dtypes, features=features)


def _entry(module: str, name: str) -> str:
    return f"vllm_cpu.ops.{module}:{name}"
