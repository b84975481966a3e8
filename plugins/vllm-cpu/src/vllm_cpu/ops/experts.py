"""Mixtures of experts on the host: tokens grouped by expert, each group's products at once. Oracle: `vllm_core.ops.experts`.

`grouped` is what all products here share; where there is no library they are `vllm_cpu.ops.linear`'s. Rows do not depend on
their group, and are summed by rank, so that a token's result is the same whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from vllm_cpu.ops import linear
from vllm_cpu.recording import recorded

Rows: TypeAlias = Callable[[Tensor, Tensor, int], None]
"""Writes a group's outputs from its inputs with one expert's weight."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Each expert's weights as torch.mm reads them."""

    gate_up: tuple[linear.Packed, ...]
    down: tuple[linear.Packed, ...]
    readers: tuple[str, ...]


@recorded
def moe_route(experts: Tensor, weights: Tensor, logits: Tensor, renormalize: bool) -> None:
    """The largest logits of each row int32 [T,K], largest first, of equal ones the lower index first, and their shares."""
    found = logits.sort(dim=-1, descending=True, stable=True)
    largest, chosen = (part[:, : experts.shape[1]] for part in found)
    # Where only the chosen ones count the others need no exponent.
    weights.copy_(largest.softmax(-1) if renormalize else logits.softmax(-1).gather(1, chosen))
    experts.copy_(chosen)


def moe_pack(gate_up: Tensor, down: Tensor, num_experts: int, readers: Sequence[str]) -> Experts:
    """Keep the tensors: each expert's matrices are views."""
    each = [
        tuple(linear.linear_pack(one, None, readers) for one in whole.view(num_experts, -1, whole.shape[1]))
        for whole in (gate_up, down)
    ]
    return Experts(each[0], each[1], tuple(readers))


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

    def gated(rows: Tensor, inputs: Tensor, expert: int) -> None:
        both = wide[: len(inputs)]
        linear.linear(both, inputs, weight.gate_up[expert])
        _gate(rows, both, kind)

    def product(rows: Tensor, inputs: Tensor, expert: int) -> None:
        linear.linear(rows, inputs, weight.down[expert])

    grouped(out, narrow, parts, x, experts, weights, gated, product)


def grouped(
    out: Tensor, narrow: Tensor, parts: Tensor, x: Tensor, experts: Tensor, weights: Tensor, gated: Rows, product: Rows
) -> None:
    """``out`` by ``gated`` [n,I] from inputs [n,H] and ``product`` [n,H] from these, for each expert that a token chose."""
    tokens, chosen = experts.shape
    if not tokens:
        return
    if tokens == 1:
        for row, expert in enumerate(experts[0].tolist()):
            gated(narrow[row : row + 1], x, expert)
            product(parts[row : row + 1], narrow[row : row + 1], expert)
        _sum(out, parts, weights, None)
        return
    flat = experts.view(-1)
    order = flat.argsort(stable=True)
    # The inputs lie where the outputs will: a group's are not read any more when its outputs come.
    torch.index_select(x, 0, order.div(chosen, rounding_mode="floor"), out=parts)
    groups = list(_groups(flat))
    for expert, begin, end in groups:
        gated(narrow[begin:end], parts[begin:end], expert)
        product(parts[begin:end], narrow[begin:end], expert)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    _sum(out, parts, weights, place.view(tokens, chosen))


def _groups(flat: Tensor) -> Iterator[tuple[int, int, int]]:
    """Expert, and begin and end of its pairs in their order by expert, of those that have any."""
    begin = 0
    for expert, count in enumerate(flat.bincount().tolist()):
        if count:
            yield expert, begin, begin + count
            begin += count


def _sum(out: Tensor, parts: Tensor, weights: Tensor, place: Tensor | None) -> None:
    """``out[t] = sum over k of weights[t,k] * parts[place[t,k]]`` in float32, one after another; without places part k itself.

    Products and sums are ops of their own: one of both may round otherwise where a row is longer or shorter.
    """
    total: Tensor | None = None
    for k in range(weights.shape[1]):
        rows = parts[k : k + 1] if place is None else parts.index_select(0, place[:, k])
        share = rows.float() * weights[:, k : k + 1]
        total = share if total is None else total.add_(share)
    assert total is not None, "a token has an expert"
    out.copy_(total)


def _gate(out: Tensor, x: Tensor, kind: str) -> None:
    gate, up = x.float().chunk(2, dim=-1)
    tanh = "tanh" if kind == "gelu_tanh" else "none"
    out.copy_((functional.silu(gate) if kind == "silu" else functional.gelu(gate, approximate=tanh)) * up)
