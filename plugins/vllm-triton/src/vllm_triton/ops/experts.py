"""Mixture of experts: routing, and all experts' products in a few launches whose sizes depend on no token's choice.

Few pairs of token and expert are a product each, of one row, which reads the chosen experts' weights once at memory speed. More
of them are put in the order of experts first, and multiplied in tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_core.api import Weight
from vllm_triton.kernels import codec
from vllm_triton.kernels import experts as kernels
from vllm_triton.kernels.quant import INT4
from vllm_triton.ops import quant
from vllm_triton.ops.elementwise import kind_of
from vllm_triton.ops.launch import filled, power_of_2
from vllm_triton.tuning import Grouped, active

CHUNK = 512
"""Pairs that a program puts in order."""

CELLS = 4096
"""Pairs times experts that it compares at a time."""

MOST_STEPS = 32
"""Steps of the longest product of one token that is unrolled."""

SMALLEST_STEP = 32
"""Columns of the smallest tile of a weight."""

WIDE_FLOATS = Grouped(16, 32, 32, 4, 2)
"""Tiles of float32, which no matrix unit takes at full precision."""

_COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class Matrices:
    """One matrix of each expert, one below the other: numbers, or codes as `kernels.quant` says. ``rows`` are of one expert."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    rows: int
    columns: int
    unit: int
    group: int
    kind: int

    @property
    def plain(self) -> bool:
        """Whether they are numbers."""
        return bool(self.kind == codec.PLAIN.value)


@dataclass(frozen=True, slots=True)
class Experts:
    """Gate and up projections [E 2I,H] and down projections [E H,I] of ``count`` experts."""

    count: int
    gate_up: Matrices
    down: Matrices


def moe_route(experts: Tensor, weights: Tensor, logits: Tensor, renormalize: bool) -> None:
    """``experts``, ``weights`` [T,K] = the K largest of float32 logits [T,E], and their softmax."""
    count, top = experts.shape
    if not count:
        return
    size = logits.shape[1]
    kernels.route[(count,)](
        experts,
        weights,
        logits,
        E=size,
        TOP=top,
        LANES=power_of_2(size),
        SLOTS=power_of_2(top),
        RENORMALIZE=renormalize,
        num_warps=1,
        **active().dependent,
    )


def moe_pack(gate_up: Weight, down: Weight, num_experts: int, readers: Sequence[str]) -> Experts:
    """Keep the weights; `readers` does not matter here. Raises UnsupportedError for a format without a kernel."""
    return Experts(num_experts, _matrices(gate_up, num_experts), _matrices(down, num_experts))


def _matrices(weight: Weight, count: int) -> Matrices:
    if not isinstance(weight, Tensor):
        one = quant.pack(weight, None, on="moe_pack")
        return Matrices(one.codes, one.scale, one.zero, one.rows // count, one.columns, one.unit, one.group, one.kind)
    rows, columns = weight.shape
    return Matrices(weight, weight, weight, rows // count, columns, 0, 0, codec.PLAIN.value)


def moe(
    out: Tensor,
    wide: Tensor,
    narrow: Tensor,
    parts: Tensor,
    index: Tensor,
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    packed: Experts,
    kind: str,
) -> None:
    """``out[t] = sum_k weights[t,k] * down(f(gate) * up)`` of expert ``experts[t,k]``; arguments before x are scratch."""
    count, top = experts.shape
    function = kind_of(kind)
    if not count:
        return
    if _alone(packed, count, top):
        _by_pair(out, narrow, x, experts, weights, packed, function)
        return
    order, starts = _arranged(index, experts, packed.count)
    _grouped(narrow, x, order, starts, packed, top, function, gather=True)
    _grouped(parts, narrow, order, starts, packed, top, function, gather=False)
    size = out.shape[1]
    block = min(_COLUMNS, power_of_2(size))
    grid = (count, -(-size // block))
    kernels.combine[grid](out, parts, weights, SIZE=size, TOP=top, BLOCK=block, num_warps=4, **active().dependent)


def _alone(packed: Experts, count: int, top: int) -> bool:
    """Whether pairs are so few that hardly two share an expert, whose weights are then read once anyway."""
    if not (packed.gate_up.plain and packed.down.plain):
        return False
    one = active().one_row(packed.down.rows, packed.down.columns)
    steps = top * -(-packed.down.columns // one.block_k)
    return (count == 1 or 4 * count * top <= packed.count) and steps <= MOST_STEPS


def _by_pair(out: Tensor, narrow: Tensor, x: Tensor, experts: Tensor, weights: Tensor, packed: Experts, function: int) -> None:
    chip, (count, top) = active(), experts.shape
    hidden, inner = packed.down.rows, packed.down.columns
    first, second = chip.one_row(inner, hidden), chip.one_row(hidden, inner)
    kernels.one_pair[(-(-inner // first.block_n), count * top)](
        narrow,
        x,
        experts,
        packed.gate_up.codes,
        inner,
        x.stride(0),
        K=hidden,
        TOP=top,
        BLOCK_N=first.block_n,
        BLOCK_K=first.block_k,
        KIND=function,
        num_warps=first.warps,
        **dict(first.options),
        **chip.dependent,
    )
    kernels.one_token[(-(-hidden // second.block_n), count)](
        out,
        narrow,
        experts,
        weights,
        packed.down.codes,
        hidden,
        K=inner,
        TOP=top,
        BLOCK_N=second.block_n,
        BLOCK_K=second.block_k,
        num_warps=second.warps,
        **dict(second.options),
        **chip.dependent,
    )


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How pairs are put in order: by ``chunks`` programs, and from where on what they write lies in the scratch."""

    lanes: int
    chunk: int
    chunks: int
    starts: int
    counts: int
    end: int


def arrangement_of(pairs: int, count: int) -> Arrangement:
    """Of pairs of ``count`` experts; `end` is at most 4 (pairs + count)."""
    lanes = power_of_2(count)
    chunk = max(CHUNK, lanes)
    chunks = -(-pairs // chunk)
    starts = filled(pairs)
    if chunks == 1:
        return Arrangement(lanes, chunk, 1, starts, starts, starts + count + 1)
    counts = starts + filled(count + 1)
    return Arrangement(lanes, chunk, chunks, starts, counts, counts + chunks * count)


def _arranged(index: Tensor, experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The pairs in the order of their experts, and where each expert's begin: views of ``index``."""
    pairs = experts.numel()
    how = arrangement_of(pairs, count)
    order, starts, counts = index[:pairs], index[how.starts :], index[how.counts :]
    rows = max(8, min(64, CELLS // how.lanes))
    sizes = {"E": count, "LANES": how.lanes, "ROWS": rows, "CHUNK": how.chunk, **active().dependent}
    if how.chunks > 1:
        kernels.count[(how.chunks,)](counts, experts, pairs, num_warps=4, **sizes)
    alone = how.chunks == 1
    kernels.arrange[(how.chunks,)](order, starts, counts, experts, pairs, how.chunks, ALONE=alone, num_warps=4, **sizes)
    return order, starts


def _grouped(
    out: Tensor, x: Tensor, order: Tensor, starts: Tensor, packed: Experts, top: int, function: int, *, gather: bool
) -> None:
    chip, weight = active(), packed.gate_up if gather else packed.down
    rows, pairs = out.shape[1], len(order)
    tile = tile_of(weight, -(-pairs // packed.count), rows, x.dtype, gather)
    # Each expert's last tile may be a part of one.
    tiles = pairs // tile.block_m + min(pairs, packed.count)
    kernels.grouped[(tiles * -(-rows // tile.block_n),)](
        out,
        x,
        order,
        starts,
        weight.codes,
        weight.scale,
        weight.zero,
        tiles,
        rows,
        x.stride(0),
        E=packed.count,
        TOP=top,
        LANES=power_of_2(packed.count),
        K=weight.columns,
        # Four bits are read as they were packed, bytes in steps of any size.
        UNIT=weight.unit if weight.kind == INT4.value else tile.block_k,
        GROUP=weight.group,
        FORMAT=weight.kind,
        FP8=chip.fp8,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        GATHER=gather,
        KIND=function,
        STAGES=tile.stages,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dict(tile.options),
        **chip.dependent,
    )


def tile_of(weight: Matrices, mean: int, rows: int, dtype: torch.dtype, gated: bool) -> Grouped:
    """The tile of a product, of which an expert has ``mean`` pairs on average."""
    if dtype == torch.float32:
        return WIDE_FLOATS
    chip = active()
    if weight.plain:
        tile = chip.grouped(mean, rows, weight.columns, gated)
        # Columns that are whole tiles need no mask.
        whole = weight.columns & -weight.columns
        return replace(tile, block_k=whole) if SMALLEST_STEP <= whole < tile.block_k else tile
    tuning = chip.quantised
    most = tuning.block_m // (2 if gated else 1)
    block_m, warps = max(16, min(most, power_of_2(mean))), tuning.warps_of(most)
    return Grouped(block_m, tuning.block_n, weight.unit, warps, tuning.stages, tuning.options)
