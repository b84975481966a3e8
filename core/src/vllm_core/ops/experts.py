"""References: choosing experts, and the family ``moe``.

Shazeer et al. 2017 (arXiv:1701.06538) for the gated sum, Jiang et al. 2024 (arXiv:2401.04088) for gated MLPs as experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_core.api.quant import Weight
from vllm_core.ops import linear, quant


@dataclass(frozen=True, slots=True)
class Experts:
    """The reference's form of a layer's experts: the matrices themselves, float [E 2I, H] and [E H, I]."""

    gate_up: Tensor
    down: Tensor
    num_experts: int
    readers: tuple[str, ...]

    def of(self, expert: int) -> tuple[linear.Packed, linear.Packed]:
        """Both weights of one expert."""
        gate_up, down = (whole.view(self.num_experts, -1, whole.shape[1])[expert] for whole in (self.gate_up, self.down))
        return linear.Packed(gate_up, None, self.readers), linear.Packed(down, None, self.readers)


def moe_route(experts: Tensor, weights: Tensor, logits: Tensor, renormalize: bool) -> None:
    """The largest logits of each row and their share of the softmax; a stable sort leaves equal ones in order."""
    chosen = logits.sort(dim=-1, descending=True, stable=True).indices[:, : experts.shape[1]]
    shares = logits.softmax(-1).gather(1, chosen)
    experts.copy_(chosen)
    weights.copy_(shares / shares.sum(-1, keepdim=True) if renormalize else shares)


def moe_pack(gate_up: Weight, down: Weight, num_experts: int, readers: Sequence[str]) -> Experts:
    """Keep the tensors; a quantised weight is decoded to float32."""
    plain = [one if isinstance(one, Tensor) else quant.decode(one, torch.float32) for one in (gate_up, down)]
    return Experts(plain[0], plain[1], num_experts, tuple(readers))


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
    """Every expert at every token: which tokens chose it is known on the device alone, and nothing waits for that."""
    count = len(x)
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for expert in range(weight.num_experts):
        gate_up, down = weight.of(expert)
        linear.gated_linear(narrow[:count], wide[:count], x, gate_up, kind)
        linear.linear(parts[:count], narrow[:count], down)
        chosen = experts == expert
        share = torch.where(chosen, weights, 0.0).sum(1, keepdim=True)
        # Not a product with 0: what nobody asked for may have overflowed.
        total += torch.where(chosen.any(1, keepdim=True), parts[:count].float() * share, 0.0)
    out.copy_(total)
