"""Paged attention: which kernels run for a step, and with what block sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_core.api import UnsupportedError
from vllm_triton.kernels import attention, codec
from vllm_triton.ops.cache import KV, cache_of, form_of, strides_of
from vllm_triton.ops.launch import Launch, Programs, Scratch, filled, power_of_2, settled
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

_SCRATCH_BYTES, _LOCKS_BYTES = 64 << 20, 64 << 10
_SCRATCH = Scratch(_SCRATCH_BYTES, dtype=torch.float32)
_LOCKS = Scratch(_LOCKS_BYTES, dtype=torch.int32, zero=True)


class Shape(NamedTuple):
    """What a launch is settled by, the numbers of tokens and rows apart: queries [Hq,D] of a token, the cache, and masks."""

    heads: int
    size: int
    kv_heads: int
    dtype: torch.dtype
    form: tuple[int, int, int, int]
    """Of the cache (`cache.form_of`)."""
    q: tuple[int, ...]
    out: tuple[int, ...]
    """Strides of out, as ``q`` are those of the queries."""
    table_stride: int
    scale: float
    window: int
    soft_cap: float
    sinks: bool

    @property
    def group(self) -> int:
        """Heads that share one of the cache."""
        return self.heads // self.kv_heads

    @property
    def codes(self) -> bool:
        """Whether the cache has no numbers."""
        return bool(self.form[-1] != codec.PLAIN.value)

    def element_size(self) -> int:
        """Bytes of a number of the queries."""
        return self.dtype.itemsize

    @property
    def queries_bytes(self) -> int:
        """As `queries_bytes`."""
        return queries_bytes(self.group, self.size, self.element_size())

    @property
    def settled(self) -> dict[str, Any]:
        """Arguments and constants of all kernels, by their names."""
        return {
            "scale": self.scale,
            "soft_cap": self.soft_cap if self.soft_cap > 0.0 else 1.0,
            "window": self.window,
            "table_stride": self.table_stride,
            "HK": self.kv_heads,
            "G": self.group,
            "D": self.size,
            "BLOCK_D": max(16, power_of_2(self.size)),
            "CAP": self.soft_cap > 0.0,
            "WINDOW": self.window > 0,
            "SINKS": self.sinks,
            **strides_of(q=self.q, out=self.out),
            **cache_of(self.form),
        }


def queries_bytes(group: int, size: int, item_bytes: int) -> int:
    """Bytes of a token's queries of one KV head as a tile has them, both sizes powers of two."""
    return max(16, power_of_2(group)) * max(16, power_of_2(size)) * item_bytes


def shape_of(
    out: Tensor, q: Tensor, kv: KV, block_table: Tensor, scale: float, window: int, soft_cap: float, sinks: Tensor | None
) -> Shape:
    """That of a call."""
    heads, form, row = q.shape[1], form_of(kv), block_table.stride(0)
    strides = q.stride(), out.stride()
    return Shape(heads, kv.head_size, kv.num_heads, q.dtype, form, *strides, row, scale, window, soft_cap, sinks is not None)


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
    num_tokens, num_rows = q.shape[0], seq_lens.shape[0]
    if not num_tokens:
        return
    shape = shape_of(out, q, kv, block_table, scale, window, soft_cap, sinks)
    given = (q, kv.blocks, kv.scales, block_table, query_start, seq_lens, q if sinks is None else sinks)
    if max_query_len > 1:
        programs, launch = _extend(shape, num_tokens, num_rows)
        launch.start(programs, out, *given)
    if max_query_len == 1 or num_rows > 1:
        programs, cells, launch = _decode(shape, num_rows, spans_of(max_seq_len))
        launch.start(programs, out, *parts_of(out, cells), *given)


def _check(shape: Shape) -> None:
    if shape.queries_bytes > MOST_BYTES:
        raise UnsupportedError(
            "So many heads of one KV head have no kernel",
            on=f"paged_attention of {shape.dtype}",
            found=f"{shape.group} heads of {shape.size}",
            expected=f"queries of at most {MOST_BYTES} bytes, both sizes as powers of two",
            fix="use --provider attention=reference",
        )
    if shape.codes and (name := str(shape.dtype).removeprefix("torch.")) not in active().tried.dtypes:
        raise UnsupportedError(
            "Queries over a cache of codes were not tried in this dtype",
            on="paged_attention",
            found=name,
            expected=", ".join(sorted(active().tried.dtypes)),
            fix="choose another --dtype or --kv-cache-dtype",
        )


@settled
def _extend(shape: Shape, num_tokens: int, num_rows: int) -> tuple[Programs, Launch]:
    _check(shape)
    tuning = extend_of(shape.size, shape, codes=shape.codes)
    block_n, stages, warps = _beside(shape, tuning.block_n, tuning.stages, tuning.warps)
    padded = power_of_2(shape.group)
    block_m = max(16, tuning.block_m, padded)
    tokens_per_block = shape.form[0]
    tiles = num_tokens // (block_m // padded) + num_rows
    launch = Launch(
        attention.extend,
        num_rows=num_rows,
        num_tiles=tiles,
        GP=padded,
        BLOCK_M=block_m,
        BLOCK_N=min(block_n, tokens_per_block) if tokens_per_block >= 16 else block_n,
        SINGLES=num_rows == 1,
        STAGES=stages,
        FP8=active().fp8,
        num_warps=warps,
        num_stages=stages,
        **dict(tuning.options),
        **shape.settled,
    )
    return (shape.kv_heads, tiles, 1), launch


def _beside(shape: Shape, block_n: int, stages: int, warps: int) -> tuple[int, int, int]:
    """Keys of a tile, stages and warps: those given, but beside queries of many bytes."""
    return CROWDED if shape.queries_bytes >= CROWDED_BYTES else (block_n, stages, warps)


def extend_of(head_size: int, q: Tensor | Shape, *, codes: bool = False) -> Extend:
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


def spans_of(max_seq_len: int) -> int:
    """Keys in whole pairs of the smallest tiles: `splits_of` asks for no more, and is settled for them together."""
    return (max_seq_len + 31) & ~31


def splits_of(num_rows: int, num_heads: int, max_seq_len: int, tuning: Decode) -> int:
    """Spans that the keys of each row are cut into: enough programs to fill the chip, none of less than a few tiles."""
    wanted = active().multiprocessors * tuning.waves
    most = max(1, -(-max_seq_len // (2 * tuning.block_n)))
    return max(1, min(wanted // max(1, num_rows * num_heads), most, MAX_SPLITS))


@settled
def _decode(shape: Shape, num_rows: int, max_seq_len: int) -> tuple[Programs, int, Launch]:
    _check(shape)
    programs, cells, options = decoding(shape, num_rows, max_seq_len)
    return programs, cells, Launch(attention.decode, FP8=active().fp8, **options, **shape.settled)


def decoding(shape: Shape, num_rows: int, max_seq_len: int) -> tuple[Programs, int, dict[str, Any]]:
    """How rows of one query are launched: programs, of which the last number is that of splits; cells that these need for
    their results (`parts_of`); tile and options."""
    chip, tuning = active(), decode_of(shape.size, codes=shape.codes)
    splits = splits_of(num_rows, shape.kv_heads, min(max_seq_len, shape.window or max_seq_len), tuning)
    cells = filled(num_rows * shape.heads * splits)
    if 4 * cells * (shape.size + 1) > _SCRATCH_BYTES or 4 * num_rows * shape.kv_heads > _LOCKS_BYTES:
        splits = 1
    many = num_rows * shape.kv_heads * splits > MANY * chip.multiprocessors
    stages = tuning.stages_of_many if many and tuning.stages_of_many else tuning.stages
    block_n, stages = (EXACT.block_n, EXACT.stages) if shape.element_size() == 4 else (tuning.block_n, stages)
    # Codes are widened in registers, which so few warps do not have, nor those of wide heads.
    warps = tuning.warps if not shape.codes and shape.size <= WIDEST else max(4, tuning.warps)
    block_n, stages, warps = _beside(shape, block_n, stages, warps)
    options = {
        "splits": splits,
        "GP": max(16, power_of_2(shape.group)),
        "BLOCK_N": min(block_n, max(16, shape.form[0])),
        "SPLIT": splits > 1,
        "STAGES": stages,
        "num_warps": warps,
        "num_stages": stages,
        **dict(tuning.options),
        **chip.dependent,
    }
    return (num_rows, shape.kv_heads, splits), cells if splits > 1 else 0, options


def parts_of(out: Tensor, cells: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory of the splits: float32 partial results and sums of so many cells, locks. Without cells nothing is read of it."""
    locks = _LOCKS.get(out.device)
    if not cells:
        return out, out, locks
    sums = _SCRATCH.get(out.device)
    return sums[cells:], sums, locks
