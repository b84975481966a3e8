"""AITER's calls, as its releases 0.1.7 and newer declare them (`vllm_rocm.versions`): checked wrappers, arguments by name.

Sources: ``aiter/ops/triton/unified_attention.py``, ``aiter/ops/cache.py`` and ``aiter/ops/activation.py`` of the distribution
amd-aiter. `SIGNATURES` repeats what is relied on; a test compares it with the package where that is present.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor

from vllm_triton.ops.token_major import KV

UNIFIED_ATTENTION = "aiter.ops.triton.unified_attention"

SIGNATURES = {
    f"{UNIFIED_ATTENTION}:unified_attention": (
        "q",
        "k",
        "v",
        "out",
        "cu_seqlens_q",
        "max_seqlen_q",
        "seqused_k",
        "max_seqlen_k",
        "softmax_scale",
        "causal",
        "window_size",
        "block_table",
        "softcap",
        "q_descale",
        "k_descale",
        "v_descale",
        "alibi_slopes",
        "output_scale",
        "qq_bias",
        "sinks",
    ),
    "aiter.ops.cache:reshape_and_cache_flash": (
        "key",
        "value",
        "key_cache",
        "value_cache",
        "slot_mapping",
        "kv_cache_dtype",
        "k_scale",
        "v_scale",
    ),
    "aiter.ops.activation:silu_and_mul": ("out", "input"),
    "aiter.ops.activation:gelu_and_mul": ("out", "input"),
    "aiter.ops.activation:gelu_tanh_and_mul": ("out", "input"),
}
"""Parameters of each function in their order."""

_GATES = {"silu": "silu_and_mul", "gelu": "gelu_and_mul", "gelu_tanh": "gelu_tanh_and_mul"}


@cache
def vendor_call(module: str, name: str) -> Any:
    """A function of AITER's, imported when it is first called: it comes with ROCm alone."""
    return getattr(import_module(module), name)


def kv_write(kv: KV, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Store k and v [T,Hk,D] at ``block * tokens_per_block + offset``."""
    if k.shape[0]:
        vendor_call("aiter.ops.cache", "reshape_and_cache_flash")(
            k, v, kv.keys, kv.values, slot_mapping, "auto", kv.scale, kv.scale
        )


def paged_attention(
    out: Tensor,
    q: Tensor,
    kv: KV,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int,
    soft_cap: float,
) -> None:
    """Causal attention over the paged KV. AITER's window counts the keys to the left of a query's own, -1 all of them."""
    if not q.shape[0]:
        return
    vendor_call(UNIFIED_ATTENTION, "unified_attention")(
        q=q,
        k=kv.keys,
        v=kv.values,
        out=out,
        cu_seqlens_q=query_start,
        max_seqlen_q=max_query_len,
        seqused_k=seq_lens,
        max_seqlen_k=max_seq_len,
        softmax_scale=scale,
        causal=True,
        window_size=(window - 1, 0) if window else (-1, -1),
        block_table=block_table,
        softcap=soft_cap,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )


def gated_activation(out: Tensor, x: Tensor, kind: str) -> None:
    """``out = f(x[:, :I]) * x[:, I:]``: x [T,2I], out [T,I]."""
    if x.shape[0]:
        vendor_call("aiter.ops.activation", _GATES[kind])(out, x.contiguous())
