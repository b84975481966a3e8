"""The family ``kv`` but for attention: a layer's blocks, and what is written to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_triton.kernels import rope
from vllm_triton.ops.launch import power_of_2
from vllm_triton.tuning import active

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class KV:
    """One layer: blocks [num_blocks, 2, Hk, tokens_per_block, D], keys at 0."""

    blocks: Tensor
    tokens_per_block: int
    num_heads: int
    head_size: int
    block_stride: int


def kv_bind(memory: Tensor, num_kv_heads: int, head_size: int, dtype: str, tokens_per_block: int) -> KV:
    """View uint8 [num_blocks, block_bytes]."""
    blocks = memory.view(_DTYPES[dtype]).view(memory.shape[0], 2, num_kv_heads, tokens_per_block, head_size)
    return KV(blocks, tokens_per_block, num_kv_heads, head_size, blocks.stride(0))


def kv_write(kv: KV, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Store k and v [T,Hk,D] at ``block * tokens_per_block + offset``."""
    count = k.shape[0]
    if not count:
        return
    rope.kv_write[(count, kv.num_heads)](
        k,
        v,
        kv.blocks,
        slot_mapping,
        *k.stride()[:2],
        *v.stride()[:2],
        kv.block_stride,
        HK=kv.num_heads,
        D=kv.head_size,
        BLOCK_D=power_of_2(kv.head_size),
        TPB=kv.tokens_per_block,
        num_warps=1,
    )


def qk_norm_rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor | None,
    interleaved: bool,
    kv: KV,
    slot_mapping: Tensor,
) -> None:
    """Norm and rotate q [T,Hq,D] and k [T,Hk,D] in place, store k and v."""
    if (q_weight is None) != (k_weight is None):
        # No architecture has one alone: the parts serve it.
        from vllm_triton.ops.norm import rms_norm

        for x, weight in ((q, q_weight), (k, k_weight)):
            if weight is not None:
                rms_norm(x, x, weight, eps)
        q_weight = k_weight = None
    _launch(q, k, v, q_weight, k_weight, eps, positions, cos_sin, interleaved, kv, slot_mapping)


def rotary_embedding(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> None:
    """Rotate the first elements of each head of q [T,Hq,D] and k [T,Hk,D] in place."""
    _launch(q, k, k, None, None, 0.0, positions, cos_sin, interleaved, None, positions)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor | None,
    interleaved: bool,
    kv: KV | None,
    slots: Tensor,
) -> None:
    count, num_heads, size = q.shape
    num_kv = k.shape[1]
    if not count:
        return
    half = cos_sin.shape[2] if cos_sin is not None else size // 2
    heads = _together(num_heads, num_kv)
    dependent = active().dependent
    rope.qk_norm_rope_kv_write[(count, (num_heads + num_kv) // heads)](
        q,
        k,
        v,
        q if q_weight is None else q_weight,
        q if k_weight is None else k_weight,
        eps,
        positions,
        positions if cos_sin is None else cos_sin,
        q if kv is None else kv.blocks,
        slots,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        0 if kv is None else kv.block_stride,
        HQ=num_heads,
        HK=num_kv,
        D=size,
        HALF=half,
        BLOCK_HALF=power_of_2(half),
        BLOCK_REST=power_of_2(max(1, size - 2 * half)),
        HEADS=heads,
        TPB=1 if kv is None else kv.tokens_per_block,
        NORM=q_weight is not None,
        ROPE=cos_sin is not None,
        INTERLEAVED=interleaved,
        WRITE=kv is not None,
        num_warps=max(1, min(4, heads * size // 256)),
        **dependent,
    )


def _together(num_heads: int, num_kv: int) -> int:
    """Heads of one program: a power of two that divides both numbers, so that none has heads of q and of k."""
    return next(n for n in (8, 4, 2, 1) if num_heads % n == 0 and num_kv % n == 0)


def kv_copy(kv: KV, source: Tensor, target: Tensor) -> None:
    """Copy whole blocks, int64 [N] each."""
    kv.blocks[target] = kv.blocks[source]


def kv_export(out: Tensor, kv: KV, blocks: Tensor) -> None:
    """Write blocks in the canonical layout: float32 [N,2,tokens_per_block,Hk,D]."""
    out.copy_(kv.blocks[blocks].transpose(2, 3))


def kv_import(kv: KV, blocks: Tensor, target: Tensor) -> None:
    """The inverse of `kv_export`, rounded to the KV dtype."""
    kv.blocks[target] = blocks.transpose(2, 3).to(kv.blocks.dtype)
