"""Encoders: attention without a cache, and one vector per sequence."""

from __future__ import annotations

from torch import Tensor

from vllm_core.api import UnsupportedError
from vllm_triton.kernels import encoder
from vllm_triton.ops.attention import extend_of
from vllm_triton.ops.launch import power_of_2
from vllm_triton.tuning import active

LARGEST_HEAD = 256
_POOLINGS = {"mean": 0, "cls": 1, "last": 2}


def encoder_attention(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, max_query_len: int, scale: float
) -> None:
    """Bidirectional attention within each row: q and out [T,Hq,D], k and v [T,Hk,D]."""
    count, heads, size = q.shape
    if size > LARGEST_HEAD:
        raise UnsupportedError(
            "Head size has no kernel",
            on="encoder_attention",
            found=str(size),
            expected=f"at most {LARGEST_HEAD}",
            fix="use --provider encoder_attention=reference",
        )
    if not count:
        return
    tuning = extend_of(size, q)
    block_m = max(16, min(tuning.block_m, power_of_2(max_query_len)))
    num_rows = query_start.shape[0] - 1
    encoder.attention[(heads, -(-count // block_m) + num_rows)](
        out,
        q,
        k,
        v,
        query_start,
        num_rows,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *out.stride()[:2],
        float(scale),
        G=heads // k.shape[1],
        D=size,
        BLOCK_D=max(16, power_of_2(size)),
        BLOCK_M=block_m,
        BLOCK_N=tuning.block_n,
        STAGES=tuning.stages,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )


def pool(out: Tensor, x: Tensor, query_start: Tensor, kind: str, normalize: bool) -> None:
    """float32 [S,H] from [T,H]: mean, first (``cls``) or last token of each row, then of length 1 if asked."""
    if kind not in _POOLINGS:
        listing = ", ".join(_POOLINGS)
        raise UnsupportedError("Unknown pooling", on=kind, found="no such kind", expected=listing, fix="use one of these")
    rows, size = out.shape
    if not rows:
        return
    block = power_of_2(size)
    encoder.pool[(rows,)](
        out,
        x,
        query_start,
        x.stride(0),
        SIZE=size,
        BLOCK=block,
        BLOCK_T=max(1, min(32, 8192 // block)),
        KIND=_POOLINGS[kind],
        NORMALIZE=normalize,
        num_warps=8,
        **active().dependent,
    )
