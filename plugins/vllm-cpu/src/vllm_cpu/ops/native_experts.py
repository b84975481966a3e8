"""Mixtures of experts through the library's products; weights stay packed. Oracle: `vllm_core.ops.experts`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from vllm_core.api import QuantStack, QuantTensor, Weight
from vllm_cpu.ops.experts import grouped
from vllm_cpu.ops.native_linear import GATES, Packed, product
from vllm_cpu.recording import recorded


class Experts:
    """Each expert's weights as the library reads them: views of the layer's."""

    __slots__ = ("down", "gate_up", "readers")

    def __init__(self, gate_up: Weight, down: Weight, num_experts: int, readers: Sequence[str], activation: int = 0) -> None:
        self.gate_up, self.down = (
            tuple(Packed(one, None, readers, activation) for one in _each(whole, num_experts)) for whole in (gate_up, down)
        )
        self.readers = tuple(readers)


def moe_pack(gate_up: Weight, down: Weight, num_experts: int, readers: Sequence[str]) -> Experts:
    """Keep the weights as they are. Raises UnsupportedError for groups that the kernels do not read."""
    return Experts(gate_up, down, num_experts, readers)


def moe_pack_int8(gate_up: Weight, down: Weight, num_experts: int, readers: Sequence[str]) -> Experts:
    """As `moe_pack`; a few rows of inputs are rounded to eight bits, a scale for each 32."""
    return Experts(gate_up, down, num_experts, readers, activation=1)


@recorded
def moe(
    out: Tensor,
    wide: Tensor,
    narrow: Tensor,
    parts: Tensor,
    index: Tensor,
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    weight: Experts,
    kind: str,
) -> None:
    """``out[T,H]``: the gated MLPs of each token's experts, summed by their weights."""
    gate = GATES[kind]

    def gated(rows: Tensor, inputs: Tensor, expert: int) -> None:
        product(rows, inputs, weight.gate_up[expert], gate)

    def down(rows: Tensor, inputs: Tensor, expert: int) -> None:
        product(rows, inputs, weight.down[expert])

    grouped(out, narrow, parts, x, experts, weights, gated, down)


def _each(whole: Weight, count: int) -> list[Weight]:
    """Equal parts by rows, as views."""
    rows = whole.shape[0] // count
    return [_rows(whole, index * rows, (index + 1) * rows) for index in range(count)]


def _rows(whole: Weight, begin: int, end: int) -> Weight:
    if not isinstance(whole, QuantStack):
        return _cut(whole, begin, end)
    found, at = [], 0
    for part in whole.parts:
        first, last = max(begin - at, 0), min(end - at, part.shape[0])
        if first < last:
            found.append(_cut(part, first, last))
        at += part.shape[0]
    return found[0] if len(found) == 1 else QuantStack(tuple(found))


def _cut(part: QuantTensor | Tensor, begin: int, end: int) -> QuantTensor | Tensor:
    """Rows of a matrix whose scales, if it has any beside its data, are those of rows: all formats that are offered."""
    if isinstance(part, Tensor):
        return part[begin:end]
    scale, zero = (None if one is None else one[begin:end] for one in (part.scale, part.zero))
    return replace(part, shape=(end - begin, part.shape[1]), data=part.data[begin:end], scale=scale, zero=zero)
