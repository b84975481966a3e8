"""Paged attention: which kernels run for a step, and with what block sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_core.api import UnsupportedError
from vllm_triton.kernels import attention, codec
from vllm_triton.ops.cache import KV
from vllm_triton.ops.launch import Scratch, filled, power_of_2
from vllm_triton.tuning import MANY, Decode, Extend, active

MAX_SPLITS = 64
EXACT = Extend(block_m=16, block_n=16, warps=4, stages=1)
"""Tiles of float32: of more queries, or with keys on their way, registers spill."""

CROWDED, CROWDED_BYTES = (16, 1, 8), 32 << 10
"""Keys of a tile, stages and warps where the queries of the heads that share one take so many bytes or more."""

MOST_BYTES = 64 << 10
"""Most of these bytes that fit into shared memory, and registers, beside keys."""

WIDEST = 128
"""Head sizes above it have tiles of their own, since each key takes twice as much."""

_SCRATCH = Scratch(64 << 20)
_LOCKS = Scratch(64 << 10, zero=True)


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
    sinks: Tensor | None = None,
) -> None:
    """Causal attention over the paged KV: q and out [T,Hq,D], int32 block_table [S,B], float32 sinks [Hq].

    Raises UnsupportedError for heads that share one, whose queries are more than `MOST_BYTES`, and over codes for a dtype that
    the platform has not tried.
    """
    num_tokens = q.shape[0]
    if not num_tokens:
        return
    if queries_bytes(q, kv) > MOST_BYTES:
        raise UnsupportedError(
            "So many heads of one KV head have no kernel",
            on=f"paged_attention of {q.dtype}",
            found=f"{q.shape[1] // kv.num_heads} heads of {kv.head_size}",
            expected=f"queries of at most {MOST_BYTES} bytes, both sizes as powers of two",
            fix="use --provider attention=reference",
        )
    if kv.kind != codec.PLAIN.value and (name := str(q.dtype).removeprefix("torch.")) not in active().tried.dtypes:
        raise UnsupportedError(
            "Queries over a cache of codes were not tried in this dtype",
            on="paged_attention",
            found=name,
            expected=", ".join(sorted(active().tried.dtypes)),
            fix="choose another --dtype or --kv-cache-dtype",
        )
    shape = shape_of(q, kv, window, soft_cap, sinks) | {"KIND": kv.kind, "FP8": active().fp8}
    num_rows = seq_lens.shape[0]
    masks = (scale, soft_cap if soft_cap > 0.0 else 1.0, window)
    given = q if sinks is None else sinks
    if max_query_len > 1:
        _extend(out, q, kv, block_table, query_start, seq_lens, masks, given, shape)
    if max_query_len == 1 or num_rows > 1:
        _decode(out, q, kv, block_table, query_start, seq_lens, max_seq_len, masks, given, shape)


def _extend(
    out: Tensor,
    q: Tensor,
    kv: KV,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    masks: tuple[float, float, int],
    sinks: Tensor,
    shape: dict[str, int | bool],
) -> None:
    tuning = extend_of(kv.head_size, q, codes=kv.kind != codec.PLAIN.value)
    block_n, stages, warps = _beside(q, kv, tuning.block_n, tuning.stages, tuning.warps)
    padded = power_of_2(int(shape["G"]))
    block_m = max(16, tuning.block_m, padded)
    block_n = min(block_n, kv.tokens_per_block) if kv.tokens_per_block >= 16 else block_n
    num_rows = seq_lens.shape[0]
    tiles = q.shape[0] // (block_m // padded) + num_rows
    attention.extend[(kv.num_heads, tiles)](
        out,
        q,
        kv.blocks,
        kv.scales,
        block_table,
        query_start,
        seq_lens,
        num_rows,
        tiles,
        *q.stride()[:2],
        *out.stride()[:2],
        block_table.stride(0),
        kv.block_stride,
        kv.scale_stride,
        *masks,
        sinks,
        GP=padded,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        SINGLES=num_rows == 1,
        STAGES=stages,
        num_warps=warps,
        num_stages=stages,
        **dict(tuning.options),
        **shape,
    )


def queries_bytes(q: Tensor, kv: KV) -> int:
    """Bytes of a token's queries of one KV head as a tile has them, both sizes powers of two."""
    return max(16, power_of_2(q.shape[1] // kv.num_heads)) * max(16, power_of_2(kv.head_size)) * q.element_size()


def _beside(q: Tensor, kv: KV, block_n: int, stages: int, warps: int) -> tuple[int, int, int]:
    """Keys of a tile, stages and warps: those given, but beside queries of many bytes."""
    return CROWDED if queries_bytes(q, kv) >= CROWDED_BYTES else (block_n, stages, warps)


def extend_of(head_size: int, q: Tensor, *, codes: bool = False) -> Extend:
    """Tiles for queries of this size and dtype, over keys that are numbers or codes.

    float32 runs on the scalar units: large tiles only take long to compile.
    """
    if q.element_size() == 4:
        return EXACT
    chip = active()
    if codes and chip.codes is not None:
        return chip.codes.extend if head_size <= WIDEST else chip.codes.extend_wide
    return chip.extend if head_size <= WIDEST else chip.extend_wide


def decode_of(head_size: int, *, codes: bool) -> Decode:
    """Tiles for single queries of this size, over keys that are numbers or codes."""
    chip = active()
    if codes and chip.codes is not None:
        return chip.codes.decode if head_size <= WIDEST else chip.codes.decode_wide
    return chip.decode


def splits_of(num_rows: int, num_heads: int, max_seq_len: int, tuning: Decode) -> int:
    """Spans that the keys of each row are cut into: enough programs to fill the chip, none of less than a few tiles."""
    wanted = active().multiprocessors * tuning.waves
    most = max(1, -(-max_seq_len // (2 * tuning.block_n)))
    return max(1, min(wanted // max(1, num_rows * num_heads), most, MAX_SPLITS))


def _decode(
    out: Tensor,
    q: Tensor,
    kv: KV,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    masks: tuple[float, float, int],
    sinks: Tensor,
    shape: dict[str, int | bool],
) -> None:
    grid, parts, meta = decoding(out, q, kv, seq_lens.shape[0], max_seq_len, masks[2])
    attention.decode[grid](
        out,
        *parts,
        q,
        kv.blocks,
        kv.scales,
        block_table,
        query_start,
        seq_lens,
        *q.stride()[:2],
        *out.stride()[:2],
        block_table.stride(0),
        kv.block_stride,
        kv.scale_stride,
        *masks,
        grid[2],
        sinks,
        **meta,
        **shape,
    )


def decoding(
    out: Tensor, q: Tensor, kv: KV, num_rows: int, max_seq_len: int, window: int
) -> tuple[tuple[int, int, int], tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """How rows of one query are launched: programs, of which the last number is that of splits; partial results, sums and locks
    of the splits; tile and options."""
    chip, codes = active(), kv.kind != codec.PLAIN.value
    tuning = decode_of(kv.head_size, codes=codes)
    num_heads = q.shape[1]
    splits = splits_of(num_rows, kv.num_heads, min(max_seq_len, window or max_seq_len), tuning)
    cells = filled(num_rows * num_heads * splits)
    scratch, locks = _SCRATCH.get(q.device), _LOCKS.get(q.device)
    if 4 * cells * (kv.head_size + 1) > scratch.numel() or 4 * num_rows * kv.num_heads > locks.numel():
        splits, cells = 1, 0
    sums = scratch[: 4 * cells].view(torch.float32)
    partial = scratch[4 * cells : 4 * cells * (kv.head_size + 1)].view(torch.float32)
    many = num_rows * kv.num_heads * splits > MANY * chip.multiprocessors
    stages = tuning.stages_of_many if many and tuning.stages_of_many else tuning.stages
    block_n, stages = (EXACT.block_n, EXACT.stages) if q.element_size() == 4 else (tuning.block_n, stages)
    # Codes are widened in registers, which so few warps do not have, nor those of wide heads.
    warps = tuning.warps if not codes and kv.head_size <= WIDEST else max(4, tuning.warps)
    block_n, stages, warps = _beside(q, kv, block_n, stages, warps)
    meta = {
        "GP": max(16, power_of_2(num_heads // kv.num_heads)),
        "BLOCK_N": min(block_n, max(16, kv.tokens_per_block)),
        "SPLIT": splits > 1,
        "STAGES": stages,
        "num_warps": warps,
        "num_stages": stages,
        **dict(tuning.options),
        **chip.dependent,
    }
    parts = (partial if splits > 1 else out, sums if splits > 1 else out, locks.view(torch.int32))
    return (num_rows, kv.num_heads, splits), parts, meta


def shape_of(q: Tensor, kv: KV, window: int, soft_cap: float, sinks: Tensor | None) -> dict[str, int | bool]:
    """What kernels are compiled for: heads, their size, blocks, masks and sinks."""
    return {
        "HK": kv.num_heads,
        "G": q.shape[1] // kv.num_heads,
        "D": kv.head_size,
        "BLOCK_D": max(16, power_of_2(kv.head_size)),
        "TPB": kv.tokens_per_block,
        "CAP": soft_cap > 0.0,
        "WINDOW": window > 0,
        "SINKS": sinks is not None,
    }
