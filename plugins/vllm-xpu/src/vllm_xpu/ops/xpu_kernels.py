"""Calls of vllm-xpu-kernels, as its releases 0.1.16 and newer declare them (`vllm_xpu.versions`): arguments as in `SCHEMAS`.

The distribution registers its ops with torch when its extensions are imported: ``torch.ops._C`` has the cache and the
activations, and its Python module the attention. A test compares `SCHEMAS` and `ATTENTION` with the package where it is
present.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from vllm_triton.ops.token_major import KV

SCHEMAS = {
    "reshape_and_cache_flash": "(Tensor key, Tensor value, Tensor! key_cache, Tensor! value_cache, Tensor slot_mapping, "
    "str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()",
    "silu_and_mul": "(Tensor! result, Tensor input) -> ()",
    "gelu_and_mul": "(Tensor! out, Tensor input) -> ()",
    "gelu_tanh_and_mul": "(Tensor! out, Tensor input) -> ()",
}
"""Schemas of ``torch.ops._C``."""

ATTENTION = ("vllm_xpu_kernels.flash_attn_interface", "flash_attn_varlen_func")
ATTENTION_ARGUMENTS = (
    "q",
    "k",
    "v",
    "max_seqlen_q",
    "cu_seqlens_q",
    "max_seqlen_k",
    "seqused_k",
    "softmax_scale",
    "causal",
    "window_size",
    "softcap",
    "block_table",
    "out",
)
"""Those of its parameters that are given, all by name."""

_GATES = {"silu": "silu_and_mul", "gelu": "gelu_and_mul", "gelu_tanh": "gelu_tanh_and_mul"}


@cache
def _ops() -> Any:
    """torch.ops._C with the distribution's ops in it."""
    import_module("vllm_xpu_kernels._C")
    return torch.ops._C


@cache
def _attention() -> Any:
    return getattr(import_module(ATTENTION[0]), ATTENTION[1])


def kv_write(kv: KV, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Store k and v [T,Hk,D] at ``block * tokens_per_block + offset``."""
    if k.shape[0]:
        _ops().reshape_and_cache_flash(k, v, kv.keys, kv.values, slot_mapping, "auto", kv.scale, kv.scale)


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
    """Causal attention over the paged KV. Intel's window counts the keys to the left of a query's own, -1 all of them."""
    if not q.shape[0]:
        return
    _attention()(
        q=q,
        k=kv.keys,
        v=kv.values,
        max_seqlen_q=max_query_len,
        cu_seqlens_q=query_start,
        max_seqlen_k=max_seq_len,
        seqused_k=seq_lens,
        softmax_scale=scale,
        causal=True,
        window_size=[window - 1, 0] if window else [-1, -1],
        softcap=soft_cap,
        block_table=block_table,
        out=out,
    )


def gated_activation(out: Tensor, x: Tensor, kind: str) -> None:
    """``out = f(x[:, :I]) * x[:, I:]``: x [T,2I], out [T,I]."""
    if x.shape[0]:
        getattr(_ops(), _GATES[kind])(out, x.contiguous())
