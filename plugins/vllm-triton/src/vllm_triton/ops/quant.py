"""Quantised weights as the kernels read them, and products with them: few rows by kernels of our own, which read the packed
weight once; many rows by cuBLAS on the widened weight, whose cost then hides behind the product's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_core.api import QuantStack, QuantTensor, UnsupportedError
from vllm_triton.kernels import codec, quant
from vllm_triton.kernels.linear import GATED
from vllm_triton.ops.elementwise import kind_of
from vllm_triton.ops.launch import Scratch, power_of_2
from vllm_triton.portable import split_of
from vllm_triton.tuning import active

FEW = 256
"""Rows up to which widening inside the product costs less than widening the weight before it."""

FEW_EXACT = 16
"""The same of float32, which runs on the scalar units: larger tiles need more shared memory and registers than chips have."""

UNIT = 128
"""Inputs that a step of a product takes, where a byte is one."""

SMALLEST_UNIT = 32
_PARTS = Scratch(64 << 20)
_LOCKS = Scratch(64 << 10, zero=True)


@dataclass(frozen=True, slots=True)
class QuantPacked:
    """Codes, float32 scales and uint8 zeros as `kernels.quant` says, of a matrix [N,K]; `zero` is `scale`, unread, where the
    format has none."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    bias: Tensor | None
    rows: int
    columns: int
    unit: int
    group: int
    kind: int


def pack(weight: QuantTensor | QuantStack, bias: Tensor | None, *, on: str) -> QuantPacked:
    """The kernels' form of a weight that the op ``on`` got. Raises UnsupportedError for what no kernel reads."""
    if isinstance(weight, QuantStack):
        raise UnsupportedError(
            "Stack of formats has no kernel",
            on=on,
            found=f"{len(weight.parts)} parts",
            expected="one format",
            fix="let the loader decode it",
        )
    make = _FORMS.get(weight.format)
    if make is None:
        raise UnsupportedError(
            "Format of a weight has no kernel",
            on=on,
            found=weight.format,
            expected=", ".join(_FORMS),
            fix="let the loader decode it",
        )
    tried = active().tried
    if weight.format not in tried.formats:
        raise UnsupportedError(
            "Format of a weight was not tried on this architecture",
            on=on,
            found=weight.format,
            expected=f"{', '.join(sorted(tried.formats))}: {tried.why}",
            fix="let the loader decode it",
        )
    codes, scale, zero, unit, group, kind = make(weight)
    scale = scale.to(torch.float32).contiguous()
    rows, columns = weight.shape
    zero = scale if zero is None else zero
    # Of rows of one block the codes are a view that leaves out its scale.
    return QuantPacked(codes.contiguous(), scale, zero, bias, rows, columns, unit, group, kind)


_Form = tuple[Tensor, Tensor, "Tensor | None", int, int, int]


def _channel(weight: QuantTensor) -> _Form:
    assert weight.scale is not None
    scale = weight.scale.reshape(-1).expand(weight.shape[0])
    kind = codec.INT8 if weight.format == "int8_channel" else codec.E4M3
    return _bytes(weight.data), scale, None, UNIT, 0, kind.value


def _squares(weight: QuantTensor) -> _Form:
    """Each row has its own copy of its square's scales, so that halves of a stacked weight need not begin with a square."""
    assert weight.scale is not None
    scale = weight.scale.repeat_interleave(128, 0)[: weight.shape[0]]
    return _bytes(weight.data), scale, None, UNIT, 128, codec.E4M3.value


def _grouped(weight: QuantTensor) -> _Form:
    assert weight.scale is not None
    assert weight.zero is not None
    rows, columns = weight.shape
    group = columns // weight.scale.shape[1]
    unit = min(active().quantised.unit, group & -group)
    if unit < SMALLEST_UNIT:
        raise UnsupportedError(
            "Group of a four-bit weight has no kernel",
            on="int4_group weight",
            found=f"groups of {group} inputs",
            expected=f"a multiple of {SMALLEST_UNIT}",
            fix="let the loader decode it: --provider linear=reference, or moe=reference for experts",
        )
    nibbles = torch.stack((weight.data & 15, weight.data >> 4), dim=-1).view(rows, columns // unit, 2, unit // 2)
    codes = (nibbles[:, :, 0] | (nibbles[:, :, 1] << 4)).reshape(rows, columns // 2)
    return codes.contiguous(), weight.scale, weight.zero.contiguous(), unit, group, quant.INT4.value


def _q8_0(weight: QuantTensor) -> _Form:
    """ggml's block: a float16 scale, then 32 int8."""
    rows, columns = weight.shape
    blocks = weight.data.view(rows, columns // 32, 34)
    scale = blocks[:, :, :2].contiguous().view(torch.float16).squeeze(-1)
    return blocks[:, :, 2:].reshape(rows, columns).view(torch.int8), scale, None, 32, 32, codec.INT8.value


def _q4_0(weight: QuantTensor) -> _Form:
    """ggml's block: a float16 scale, then 16 bytes, whose low four bits are the first half; 8 stands for zero."""
    rows, columns = weight.shape
    blocks = weight.data.view(rows, columns // 32, 18)
    scale = blocks[:, :, :2].contiguous().view(torch.float16).squeeze(-1)
    zero = torch.full(scale.shape, 8, dtype=torch.uint8, device=scale.device)
    return blocks[:, :, 2:].reshape(rows, columns // 2), scale, zero, 32, 32, quant.INT4.value


_FORMS: Mapping[str, Callable[[QuantTensor], _Form]] = {
    "int8_channel": _channel,
    "fp8_tensor": _channel,
    "fp8_channel": _channel,
    "fp8_block128": _squares,
    "int4_group": _grouped,
    "q8_0": _q8_0,
    "q4_0": _q4_0,
}


def _bytes(codes: Tensor) -> Tensor:
    """fp8 as the bytes that it is."""
    return codes.contiguous() if codes.dtype == torch.int8 else codes.contiguous().view(torch.uint8)


def takes(x: Tensor, epilogue: int) -> bool:
    """Whether `few_rows` is for rows of x [T,K]; if not, the product is taken of the widened weight."""
    if x.element_size() == 4:
        return x.shape[0] <= FEW_EXACT and epilogue != GATED.value
    return x.shape[0] <= FEW


def few_rows(out: Tensor, x: Tensor, weight: QuantPacked, epilogue: int, kind: str = "silu") -> None:
    """``out`` = what `kernels.quant.few_rows` says, of x [T,K] that it `takes`. Raises UnsupportedError for a dtype of x that
    the platform has not tried."""
    count = x.shape[0]
    if not count:
        return
    _check_tried(x.dtype)
    gated = epilogue == GATED.value
    rows = weight.rows // (2 if gated else 1)
    chip, tuning = active(), active().quantised
    # A gate and an up projection have an accumulator each.
    most = tuning.block_m // (2 if gated else 1)
    block_m, block_n = max(16, min(most, power_of_2(count))), tuning.block_n
    stages = tuning.stages if x.element_size() < 4 else 2
    tiles, batches = -(-rows // block_n), -(-count // block_m)
    units = -(-weight.columns // weight.unit)
    parts, locks = _PARTS.get(x.device).view(torch.float32), _LOCKS.get(x.device).view(torch.int32)
    wanted = {"programs": tuning.programs, "part": tuning.part}
    split = split_of(rows * batches, weight.columns, block_n, weight.unit, **wanted) if weight.columns % weight.unit == 0 else 1
    area = tiles * batches * block_m * block_n * (2 if gated else 1)
    while split > 1 and (units % split or split * area > parts.numel() or tiles * batches > locks.numel()):
        split //= 2
    quant.few_rows[(tiles, split, batches)](
        out,
        x,
        weight.codes,
        weight.scale,
        weight.zero,
        out if weight.bias is None else weight.bias,
        parts,
        locks,
        count,
        rows,
        x.stride(0),
        K=weight.columns,
        UNIT=weight.unit,
        GROUP=weight.group,
        FORMAT=weight.kind,
        FP8=chip.fp8,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        SPLIT=split,
        BIAS=weight.bias is not None,
        EPILOGUE=epilogue,
        KIND=kind_of(kind),
        STAGES=stages,
        num_warps=tuning.warps_of(block_m),
        num_stages=stages,
        **dict(tuning.options),
        **chip.dependent,
    )


def _check_tried(dtype: torch.dtype) -> None:
    name, tried = str(dtype).removeprefix("torch."), active().tried
    if name not in tried.dtypes:
        raise UnsupportedError(
            "Packed weights were not tried in this dtype",
            on="product with a packed weight",
            found=name,
            expected=f"{', '.join(sorted(tried.dtypes))}: {tried.why}",
            fix="choose another --dtype, or let the loader decode the weight: --provider linear=reference",
        )


def widened(weight: QuantPacked, dtype: torch.dtype) -> Tensor:
    """The matrix [N,K] in ``dtype``. Raises UnsupportedError for one that the platform has not tried."""
    _check_tried(dtype)
    out = torch.empty((weight.rows, weight.columns), dtype=dtype, device=weight.codes.device)
    quant.widen[(-(-weight.rows // 16), -(-weight.columns // weight.unit))](
        out,
        weight.codes,
        weight.scale,
        weight.zero,
        weight.rows,
        K=weight.columns,
        UNIT=weight.unit,
        GROUP=weight.group,
        FORMAT=weight.kind,
        FP8=active().fp8,
        BLOCK_N=16,
        num_warps=4,
    )
    return out
