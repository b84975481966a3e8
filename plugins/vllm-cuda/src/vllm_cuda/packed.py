"""Quantised weights laid out once for `kernels/packed_rows.cu`: a lane reads 16 bytes of codes at a time, a warp 512 in a row.

A record is 16 rows x 128 inputs; those of a block of rows follow one another. Within it the codes lie as `_shuffled` says, and
its scales as [sets, 8, 2]: the last index is that of rows g and g + 8. `kernels/packed.cuh` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from vllm_cuda.packed_tiles import BLOCK, DEPTH, Layout
from vllm_triton.kernels.codec import E4M3, INT8
from vllm_triton.kernels.quant import INT4
from vllm_triton.ops.quant import QuantPacked

ALIGNED_COLUMNS = 8
"""Inputs of a piece of 16 bytes of x, which lies within the matrix or outside of it."""

PAIRS = (0, 2, 1, 3)
"""Inputs of four bytes: those of a pair are two bytes apart."""

USUAL_ZERO = 8
_SCALES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_NAN = 0x7F
_BLOCKS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Packed:
    """Codes uint8 [blocks, records, bytes] and scales of the same kind, or a float32 scale [N] a row; float32 bias [N]."""

    codes: Tensor
    scales: Tensor
    row_scale: Tensor
    bias: Tensor | None
    rows: int
    columns: int
    layout: Layout


def pack(weight: QuantPacked) -> Packed | None:
    """The same weight as this layout has it; None where its rows of inputs are no whole pieces of x."""
    if weight.columns % ALIGNED_COLUMNS:
        return None
    codes, scale = _bytes(weight), weight.scale
    if weight.kind == E4M3.value:
        scale = _marked(codes, scale, weight.group)
    bias = None if weight.bias is None else weight.bias.float()
    if not weight.group:
        layout = Layout(weight.kind, 0, _SCALES[torch.float32], False)
        packed = _shuffled(codes, weight.kind)
        return Packed(packed, packed, scale, bias, weight.rows, weight.columns, layout)
    sets, narrow = DEPTH // weight.unit, _narrowed(scale)
    zeros = weight.kind == INT4.value and bool((weight.zero != USUAL_ZERO).any())
    parts = [_arranged(narrow, weight)]
    if zeros:
        parts.append(_arranged(weight.zero, weight))
    layout = Layout(weight.kind, sets, _SCALES[narrow.dtype], zeros)
    return Packed(_shuffled(codes, weight.kind), torch.cat(parts, dim=2), scale, bias, weight.rows, weight.columns, layout)


def _bytes(weight: QuantPacked) -> Tensor:
    """A byte a code: uint8 [N,K]."""
    if weight.kind != INT4.value:
        return weight.codes.view(torch.uint8)
    halves = weight.codes.view(weight.rows, -1, weight.unit // 2)
    return torch.cat((halves & 15, halves >> 4), dim=2).view(weight.rows, weight.columns)


def _marked(codes: Tensor, scale: Tensor, group: int) -> Tensor:
    """NaN for the scale of a group that has one among its codes, which the kernel reads as 480: its sum is NaN either way."""
    missing = (codes & _NAN) == _NAN
    if group:
        missing = functional.pad(missing, (0, -codes.shape[1] % group)).view(len(codes), -1, group)
    return scale.masked_fill(missing.any(dim=-1), float("nan"))


def _narrowed(scale: Tensor) -> Tensor:
    """Scales in the narrowest type that has all of them exactly."""
    for dtype in (torch.float16, torch.bfloat16):
        narrow = scale.to(dtype)
        if torch.equal(narrow.float(), scale):
            return narrow
    return scale


def _arranged(values: Tensor, weight: QuantPacked) -> Tensor:
    """Of [N, groups]: the value of each step of `unit` inputs, as bytes [blocks, records, bytes]."""
    steps, sets = -(-weight.columns // weight.unit), DEPTH // weight.unit
    group = torch.arange(steps, device=values.device) * weight.unit // weight.group
    whole = functional.pad(values[:, group], (0, -steps % sets, 0, -weight.rows % BLOCK))
    whole = whole.view(-1, 2, BLOCK // 2, whole.shape[1] // sets, sets).permute(0, 3, 4, 2, 1).contiguous()
    return whole.view(*whole.shape[:2], -1).view(torch.uint8)


def _shuffled(codes: Tensor, kind: int) -> Tensor:
    """Codes [N,K] as bytes [blocks, records, 1024 or 2048] in the order of a lane's operands."""
    rows, columns = codes.shape
    blocks, records = -(-rows // BLOCK), -(-columns // DEPTH)
    size = BLOCK * DEPTH // (2 if kind == INT4.value else 1)
    out = torch.empty((blocks, records, size), dtype=torch.uint8, device=codes.device)
    for begin in range(0, blocks, _BLOCKS_AT_ONCE):
        some = codes[begin * BLOCK : (begin + _BLOCKS_AT_ONCE) * BLOCK]
        some = functional.pad(some, (0, -columns % DEPTH, 0, -len(some) % BLOCK))
        # [block, half, g, record, unit, t, input]
        some = some.view(-1, 2, 8, records, 4, 4, 8)
        out[begin : begin + _BLOCKS_AT_ONCE] = _WORDS[kind](some).reshape(-1, records, size)
    return out


def _words4(codes: Tensor) -> Tensor:
    """[block, record, pair of units, g, t, unit, half, bytes]: byte 0 has inputs 0 and 2, then 4 and 6, 1 and 3, 5 and 7."""
    low, high = codes[..., (0, 4, 1, 5)], codes[..., (2, 6, 3, 7)]
    words = low | (high << 4)
    return words.view(*words.shape[:4], 2, 2, 4, 4).permute(0, 3, 4, 2, 6, 5, 1, 7)


def _words8(codes: Tensor) -> Tensor:
    """[block, record, unit, g, t, half, word, bytes]."""
    words = codes.view(*codes.shape[:-1], 2, 4)[..., PAIRS]
    return words.permute(0, 3, 4, 2, 5, 1, 6, 7)


def _words_fp8(codes: Tensor) -> Tensor:
    """As `_words8`, with the bits of two codes in the places that `kernels/packed.cuh` finds them in."""
    words = codes.view(*codes.shape[:-1], 2, 4)
    first, second = words[..., :2], words[..., 2:]
    low = (first & 15) << 4 | second & 15
    high = first & 0x80 | second & 0x70 | second >> 4 & 8 | first >> 4 & 7
    words = torch.stack((low, high), dim=-1).flatten(-2)
    return words.permute(0, 3, 4, 2, 5, 1, 6, 7)


_WORDS = {INT4.value: _words4, INT8.value: _words8, E4M3.value: _words_fp8}
