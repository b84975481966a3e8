"""Quantised weights of a safetensors checkpoint: the tensors of each put together and brought to a format of the contract.

A layer's tensors may come in any order, and in several files: what has come of it waits for the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set

import torch
from torch import Tensor

from vllm_core.api import QuantTensor
from vllm_core.errors import WeightsError
from vllm_core.loader.quant_config import QuantScheme

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of an int32, from the lowest, hold its outputs, in the layout ``gemm``."""

_NEEDED = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales"),
    "packed": ("weight_packed", "weight_scale"),
}
_SCALES = ("weight_scale", "weight_scale_inv")
_PARTS = frozenset(
    {
        *("weight", "g_idx", "weight_g_idx", "weight_shape", "weight_zero_point", "input_scale", "input_scale_ub", *_SCALES),
        *(name for names in _NEEDED.values() for name in names),
    }
)
_UNUSED = frozenset({"k_scale", "v_scale", "q_scale", "prob_output_scale", "input_zero_point"})
"""Settings of activations and of a cache in fp8, which holds values as they are here."""


def assemble(
    tensors: Iterable[tuple[str, Tensor]], scheme: QuantScheme, names: Iterable[str]
) -> Iterator[tuple[str, Tensor | QuantTensor]]:
    """Each weight of the checkpoint under the name that it has where nothing is quantised, and all other tensors as they are.

    ``names`` are those of all tensors to come. Raises WeightsError for parts that are missing, or do not fit each other.
    """
    expected: dict[str, set[str]] = {}
    for name in names:
        module, _, part = name.rpartition(".")
        if part in _PARTS:
            expected.setdefault(module, set()).add(part)
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        module, _, part = name.rpartition(".")
        if part in _UNUSED or _is_filler(scheme, part, tensor, expected.get(module, set())):
            continue
        if part not in _PARTS or (part == "weight" and not _is_code(tensor)):
            yield name, tensor
            continue
        parts = waiting.setdefault(module, {})
        parts[part] = tensor
        if parts.keys() == expected[module]:
            yield f"{module}.weight", _made(module, waiting.pop(module), scheme)


def _is_filler(scheme: QuantScheme, part: str, tensor: Tensor, parts: Set[str]) -> bool:
    """GPTQ's exporters give a bias of zeros to layers that have none."""
    return scheme.layout == "gptq" and part == "bias" and "qweight" in parts and not tensor.any()


def _is_code(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float8_e4m3fn, torch.int8)


def _made(module: str, parts: Mapping[str, Tensor], scheme: QuantScheme) -> QuantTensor:
    needed = _NEEDED.get(scheme.layout, ("weight",))
    missing = [name for name in needed if name not in parts]
    if missing:
        raise _wrong(module, f"no {missing[0]}", f"tensors {', '.join(needed)}")
    if scheme.layout in ("fp8", "codes"):
        return _codes(module, parts)
    if scheme.layout == "awq":
        return _awq(module, parts, scheme)
    return _gptq(module, parts, scheme) if scheme.layout == "gptq" else _packed(module, parts, scheme)


def _codes(module: str, parts: Mapping[str, Tensor]) -> QuantTensor:
    """int8 or fp8 as it is; the scale's shape says what shares one."""
    data, scale = parts["weight"], next((parts[name] for name in _SCALES if name in parts), None)
    if scale is None:
        raise _wrong(module, "no weight_scale", "a scale of its weight")
    rows, columns = data.shape
    scale = scale.float()
    squares = (-(-rows // 128), -(-columns // 128))
    if scale.numel() == 1 and data.dtype != torch.int8:
        return QuantTensor("fp8_tensor", (rows, columns), data, scale.reshape(1))
    if scale.numel() == 1:
        scale = scale.reshape(1).expand(rows).contiguous()
    if scale.numel() == rows and scale.shape in ((rows,), (rows, 1)):
        return QuantTensor(
            "int8_channel" if data.dtype == torch.int8 else "fp8_channel", (rows, columns), data, scale.reshape(rows)
        )
    if scale.shape == squares and data.dtype != torch.int8:
        return QuantTensor("fp8_block128", (rows, columns), data, scale)
    raise _wrong(module, f"a scale of shape {tuple(scale.shape)}", f"one, {rows}, or {squares} numbers")


def _awq(module: str, parts: Mapping[str, Tensor], scheme: QuantScheme) -> QuantTensor:
    """qweight int32 [K, N / 8], qzeros int32 [K / g, N / 8], scales [K / g, N]."""
    weight = _nibbles(parts["qweight"])[..., list(AWQ_ORDER)].flatten(1).t()
    zero = _nibbles(parts["qzeros"])[..., list(AWQ_ORDER)].flatten(1).t()
    return _grouped(module, weight, parts["scales"].t(), zero, scheme)


def _gptq(module: str, parts: Mapping[str, Tensor], scheme: QuantScheme) -> QuantTensor:
    """qweight int32 [K / 8, N], qzeros int32 [K / g, N / 8], scales [K / g, N], g_idx int32 [K]."""
    weight = _nibbles(parts["qweight"].t().contiguous()).flatten(1)
    zero = _nibbles(parts["qzeros"]).flatten(1).t() + scheme.zero_offset
    _in_order(module, parts.get("g_idx"), scheme.group or weight.shape[1])
    return _grouped(module, weight, parts["scales"].t(), zero, scheme)


def _packed(module: str, parts: Mapping[str, Tensor], scheme: QuantScheme) -> QuantTensor:
    """weight_packed int32 [N, K * bits / 32], weight_scale [N, K / g], weight_zero_point int32 [N * bits / 32, K / g]."""
    words, scale = parts["weight_packed"], parts["weight_scale"]
    if scheme.bits == 8:
        # Codes are stored with 128 added.
        data = (words.contiguous().view(torch.uint8) ^ 0x80).view(torch.int8)
        scale = scale.float().reshape(-1).expand(data.shape[0]).contiguous()
        return QuantTensor("int8_channel", (data.shape[0], data.shape[1]), data, scale)
    weight = _nibbles(words).flatten(1)
    zeros = parts.get("weight_zero_point")
    zero = torch.full(scale.shape, 8, dtype=torch.uint8)
    if zeros is not None:
        zero = _nibbles(zeros.t().contiguous()).flatten(1).t()[: len(scale)]
    _in_order(module, parts.get("weight_g_idx"), scheme.group or weight.shape[1])
    return _grouped(module, weight, scale, zero, scheme)


def _grouped(module: str, weight: Tensor, scale: Tensor, zero: Tensor, scheme: QuantScheme) -> QuantTensor:
    """Nibbles [N, K] with scales and zeros [N, K / g], as the contract lays them out."""
    rows, columns = weight.shape
    groups = columns // (scheme.group or columns)
    if scale.shape != (rows, groups) or zero.shape != scale.shape:
        found = f"scales {tuple(scale.shape)} and zeros {tuple(zero.shape)} of a weight [{rows}, {columns}]"
        raise _wrong(module, found, f"[{rows}, {groups}], groups of {scheme.group or columns}")
    data = weight[:, 0::2] | (weight[:, 1::2] << 4)
    return QuantTensor("int4_group", (rows, columns), data.contiguous(), scale.contiguous(), zero.contiguous())


def _nibbles(words: Tensor) -> Tensor:
    """uint8 [..., 8] of int32, from the lowest four bits on."""
    bytes_ = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    return torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(-2)


def _in_order(module: str, groups: Tensor | None, size: int) -> None:
    """Refuse inputs that are not in the order of their groups."""
    if groups is None or torch.equal(groups.long(), torch.arange(len(groups)) // size):
        return
    raise WeightsError(
        "Quantised weight has reordered inputs",
        on=module,
        found="a g_idx that is not in order (desc_act)",
        expected="groups of consecutive inputs",
        fix="use a checkpoint that was quantised with desc_act false",
    )


def _wrong(module: str, found: str, expected: str) -> WeightsError:
    return WeightsError(
        "Quantised weight is incomplete", on=module, found=found, expected=expected, fix="fetch the checkpoint again"
    )
