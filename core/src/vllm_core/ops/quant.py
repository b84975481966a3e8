"""Quantised weights: `dequantize` is the executable definition of every format of `vllm_core.api.quant.FORMATS`.

Rows are the unit of everything here: they are decoded, cut, selected and stacked without touching each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from vllm_core.api.quant import FORMATS, QuantStack, QuantTensor, Weight

FP8_SIDE = 128
"""Rows and columns of a square of ``fp8_block128``."""

FP8_MOST = 448.0
"""The largest number of float8_e4m3fn."""

GROUP = 32
"""Inputs that share a scale where core rounds to ``int4_group``."""

_CHUNK_ELEMENTS = 1 << 18
"""Elements decoded at once: bounds the decoders' temporaries, which then stay in the cache."""


def dequantize(weight: QuantTensor) -> Tensor:
    """The float32 matrix [N, K] that a quantised one stands for, on its device (GGUF formats: on the host)."""
    return decode(weight, torch.float32)


def decode(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The matrix [N, K] in ``dtype``, rounded once from float32; a plain tensor is cast."""
    if isinstance(weight, Tensor):
        return weight.to(dtype)
    if isinstance(weight, QuantStack):
        return torch.cat([decode(part, dtype) for part in weight.parts])
    rows, columns = weight.shape
    out = torch.empty((rows, columns), dtype=dtype, device=weight.data.device)
    step = max(1, _CHUNK_ELEMENTS // max(1, columns))
    if weight.format == "fp8_block128":
        step = -(-step // FP8_SIDE) * FP8_SIDE
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        out[begin:end] = _decode(take_rows(weight, begin, end))
    return out


def decoded(weights: Iterable[tuple[str, Tensor | QuantTensor]]) -> Iterator[tuple[str, Tensor]]:
    """Named weights, the quantised ones decoded to float32."""
    for name, weight in weights:
        yield name, weight if isinstance(weight, Tensor) else decode(weight, torch.float32)


def rounded(weight: Tensor, formats: Sequence[str]) -> Tensor | QuantTensor:
    """A matrix in the first of ``formats`` that it can have: rows of whole blocks, or of whole groups of `GROUP` inputs.

    Others, and what is not a matrix, stay as they are.
    """
    for name in formats if weight.dim() == 2 else ():
        if weight.shape[1] % (FORMATS[name].block or (GROUP if name == "int4_group" else 1)) == 0:
            return quantize(weight, name)
    return weight


def quantize(weight: Tensor, name: str) -> QuantTensor:
    """Round a matrix [N, K] to a format, row by row and with no data but its own: to the nearest of its numbers.

    For ``int8_channel``, ``fp8_channel``, ``int4_group`` (of `GROUP` inputs) and what the gguf package writes: q4_0, q4_1,
    q5_0, q5_1, q8_0.
    """
    shape = (weight.shape[0], weight.shape[1])
    values = weight.detach().float().cpu()
    if name == "int8_channel":
        scale = (values.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        return QuantTensor(name, shape, (values / scale[:, None]).round().to(torch.int8), scale)
    if name == "fp8_channel":
        codes, scale = _fp8(values)
        return QuantTensor(name, shape, codes, scale[:, 0])
    if name == "int4_group":
        return _quantize_groups(values, shape)
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize as encode

    return QuantTensor(name, shape, torch.from_numpy(encode(values.numpy(), GGMLQuantizationType[name.upper()])))


def _quantize_groups(values: Tensor, shape: tuple[int, int]) -> QuantTensor:
    """Sixteen steps from the least number of a group, or 0, to its greatest, or 0, so that 0 stays 0."""
    groups = values.reshape(shape[0], -1, GROUP)
    low, high = groups.amin(dim=2).clamp_max(0), groups.amax(dim=2).clamp_min(0)
    scale = ((high - low) / 15).clamp_min(torch.finfo(torch.float32).tiny)
    zero = (-low / scale).round().clamp(0, 15)
    steps = ((groups / scale[:, :, None]).round() + zero[:, :, None]).clamp(0, 15).to(torch.uint8).reshape(shape)
    return QuantTensor("int4_group", shape, steps[:, ::2] | (steps[:, 1::2] << 4), scale, zero.to(torch.uint8))


def rounded_to_fp8(values: Tensor, group: int) -> Tensor:
    """Float32 [T, K] rounded to float8_e4m3fn, with a scale for each ``group`` inputs of a row; 0: one for the row.

    A scale is the largest size of what shares it over `FP8_MOST`, so that nothing is cut off.
    """
    rows, columns = values.shape
    group = group or columns
    count = -(-columns // group)
    codes, scale = _fp8(functional.pad(values.float(), (0, -columns % group)).view(rows, count, group))
    return (codes.float() * scale).view(rows, count * group)[:, :columns]


def _fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of float32 numbers, and the scale float32 [..., 1] that those of the last dimension share."""
    largest = values.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30)
    # torch divides a number by a tensor in two roundings, and then numbers between two codes go the other way.
    inverse = torch.full_like(largest, FP8_MOST) / largest
    return (values * inverse).to(torch.float8_e4m3fn), largest / FP8_MOST


def take_rows(weight: QuantTensor, begin: int, end: int) -> QuantTensor:
    """Rows ``begin .. end``, as views. Of ``fp8_block128`` only from the first row of a square."""
    scale = weight.scale
    if scale is not None and weight.format == "fp8_block128":
        assert begin % FP8_SIDE == 0, "scales are those of whole squares"
        scale = scale[begin // FP8_SIDE : -(-end // FP8_SIDE)]
    elif scale is not None and weight.format != "fp8_tensor":
        scale = scale[begin:end]
    zero = None if weight.zero is None else weight.zero[begin:end]
    return replace(weight, shape=(end - begin, weight.shape[1]), data=weight.data[begin:end], scale=scale, zero=zero)


def select_rows(weight: Weight, ids: Tensor) -> Tensor:
    """Float32 rows [T, K] of ``ids`` int [T]; of a plain tensor in its dtype."""
    if isinstance(weight, Tensor):
        return weight.index_select(0, ids)
    assert isinstance(weight, QuantTensor), "tables are not stacked"
    assert weight.format != "fp8_block128", "a row of a table has its own scales"
    scale = weight.scale if weight.scale is None or weight.format == "fp8_tensor" else weight.scale.index_select(0, ids)
    zero = None if weight.zero is None else weight.zero.index_select(0, ids)
    data = weight.data.index_select(0, ids)
    return _decode(replace(weight, shape=(len(ids), weight.shape[1]), data=data, scale=scale, zero=zero))


def take_columns(weight: QuantTensor, begin: int, end: int) -> QuantTensor | None:
    """Columns ``begin .. end``, copied; None where that would cut through a block, or reaches past the last column."""
    columns = weight.shape[1]
    unit = _unit(weight)
    if begin % unit or end % unit or end > columns:
        return None
    scale, zero = weight.scale, weight.zero
    if weight.format in ("int4_group", "fp8_block128") and scale is not None:
        scale = scale[:, begin // unit : end // unit].contiguous()
        zero = None if zero is None else zero[:, begin // unit : end // unit].contiguous()
    width = weight.data.shape[1]
    data = weight.data[:, begin * width // columns : end * width // columns].contiguous()
    return replace(weight, shape=(weight.shape[0], end - begin), data=data, scale=scale, zero=zero)


def pad_rows(weight: QuantTensor, rows: int) -> QuantTensor:
    """The matrix with rows of zeros added up to ``rows``."""
    missing = rows - weight.shape[0]
    if not missing:
        return weight

    def longer(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.cat((tensor, tensor.new_zeros((missing, *tensor.shape[1:]))))

    scale = weight.scale if weight.format == "fp8_tensor" else longer(weight.scale)
    assert weight.format != "fp8_block128", "squares are padded by nobody"
    data = longer(weight.data)
    assert data is not None
    return replace(weight, shape=(rows, weight.shape[1]), data=data, scale=scale, zero=longer(weight.zero))


def stack(parts: Sequence[QuantTensor | Tensor]) -> Weight:
    """One matrix of parts on top of each other: plain, of one format where all agree, else a `QuantStack`."""
    plain = [part for part in parts if isinstance(part, Tensor)]
    packed = [part for part in parts if isinstance(part, QuantTensor)]
    if len(parts) == 1:
        return parts[0]
    if not packed:
        return torch.cat(plain)
    if plain or not _agree(packed):
        return QuantStack(tuple(parts))
    if packed[0].format == "fp8_tensor":
        packed = [_per_channel(part) for part in packed]
    first = packed[0]

    def joined(tensors: list[Tensor | None]) -> Tensor | None:
        here = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(here) if here else None

    data, rows = torch.cat([part.data for part in packed]), sum(part.shape[0] for part in packed)
    scale, zero = joined([part.scale for part in packed]), joined([part.zero for part in packed])
    return replace(first, shape=(rows, first.shape[1]), data=data, scale=scale, zero=zero)


def moved(weight: Weight, move: Callable[[Tensor], Tensor]) -> Weight:
    """The same weight with every tensor of it passed through ``move``."""
    if isinstance(weight, Tensor):
        return move(weight)
    if isinstance(weight, QuantStack):
        return QuantStack(tuple(_moved(part, move) for part in weight.parts))
    return _moved_quant(weight, move)


def copied(weight: QuantTensor) -> QuantTensor:
    """The same matrix in memory of its own: views would keep what they were cut from."""
    return _moved_quant(weight, lambda tensor: tensor.clone(memory_format=torch.contiguous_format))


def formats_in(weight: Weight) -> frozenset[str]:
    """Formats that a provider must read to take the weight as it is."""
    if isinstance(weight, Tensor):
        return frozenset({"plain"})
    if isinstance(weight, QuantStack):
        return frozenset({"stack"}).union(*(formats_in(part) for part in weight.parts))
    return frozenset({weight.format})


def _moved(part: QuantTensor | Tensor, move: Callable[[Tensor], Tensor]) -> QuantTensor | Tensor:
    return move(part) if isinstance(part, Tensor) else _moved_quant(part, move)


def _moved_quant(part: QuantTensor, move: Callable[[Tensor], Tensor]) -> QuantTensor:
    scale, zero = (None if one is None else move(one) for one in (part.scale, part.zero))
    return replace(part, data=move(part.data), scale=scale, zero=zero)


def _unit(weight: QuantTensor) -> int:
    """Columns that cannot be parted."""
    if weight.format == "int4_group":
        assert weight.scale is not None
        return weight.shape[1] // weight.scale.shape[1]
    return FORMATS[weight.format].block or 1


def _agree(parts: Sequence[QuantTensor]) -> bool:
    """Whether parts can be one tensor: equal formats and groups; squares of fp8 that end where a part ends."""
    if len({part.format for part in parts}) > 1:
        return False
    if parts[0].format == "int4_group":
        return len({_unit(part) for part in parts}) == 1
    return parts[0].format != "fp8_block128" or all(part.shape[0] % FP8_SIDE == 0 for part in parts[:-1])


def _per_channel(part: QuantTensor) -> QuantTensor:
    assert part.scale is not None
    return replace(part, format="fp8_channel", scale=part.scale.reshape(1).expand(part.shape[0]).contiguous())


def _decode(weight: QuantTensor) -> Tensor:
    return _DECODERS.get(weight.format, _gguf)(weight)


def _gguf(weight: QuantTensor) -> Tensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as decode_rows

    blocks = weight.data.detach().cpu().numpy()
    values = decode_rows(blocks, GGMLQuantizationType[weight.format.upper()])
    return torch.from_numpy(values).to(weight.data.device)


def _scaled_rows(weight: QuantTensor) -> Tensor:
    assert weight.scale is not None
    return weight.data.float() * weight.scale.float().reshape(-1, 1)


def _grouped(weight: QuantTensor) -> Tensor:
    assert weight.scale is not None
    assert weight.zero is not None
    rows, columns = weight.shape
    nibbles = torch.stack((weight.data & 15, weight.data >> 4), dim=-1).reshape(rows, weight.scale.shape[1], -1)
    values = (nibbles.float() - weight.zero.float().unsqueeze(-1)) * weight.scale.float().unsqueeze(-1)
    return values.reshape(rows, columns)


def _squares(weight: QuantTensor) -> Tensor:
    assert weight.scale is not None
    rows, columns = weight.shape
    scale = weight.scale.float().repeat_interleave(FP8_SIDE, 0)[:rows].repeat_interleave(FP8_SIDE, 1)[:, :columns]
    return weight.data.float() * scale


_DECODERS: Mapping[str, Callable[[QuantTensor], Tensor]] = {
    "int8_channel": _scaled_rows,
    "int4_group": _grouped,
    "fp8_tensor": _scaled_rows,
    "fp8_channel": _scaled_rows,
    "fp8_block128": _squares,
}
