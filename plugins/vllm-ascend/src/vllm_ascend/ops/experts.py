"""Experts: `npu_moe_gating_top_k_softmax`, `npu_moe_init_routing_v2`, `npu_grouped_matmul`, `npu_moe_finalize_routing`.

Rows are sorted by expert and counted on the device; the products take the counts from there: nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch_npu
from torch import Tensor

from vllm_ascend.ops.activation import activated
from vllm_core.api import UnsupportedError, Weight

ONE_OUTPUT, BY_ROWS = 3, 0
"""`split_item` and `group_type` of npu_grouped_matmul: the groups' rows follow each other in x and in one output."""
SUMS, COUNTS = 0, 1
"""`group_list_type`, and `expert_tokens_num_type` of npu_moe_init_routing_v2. One group alone has to be given as a sum."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Gate and up projections [E, H, 2I], and down projections [E, I, H]: the vendor's product takes x @ weight."""

    gate_up: Tensor
    down: Tensor


def moe_route(experts: Tensor, weights: Tensor, logits: Tensor, renormalize: bool) -> None:
    """``experts``, ``weights`` [T,K] = the K largest of float32 logits [T,E], and their softmax.

    The vendor ranks probabilities: of two logits so near that these are equal in float32, the lower index counts as the larger.
    """
    if not len(logits):
        return
    shares, chosen, _ = torch_npu.npu_moe_gating_top_k_softmax(logits, None, k=experts.shape[1])
    experts.copy_(chosen)
    weights.copy_(shares / shares.sum(-1, keepdim=True) if renormalize else shares)


def moe_pack(gate_up: Weight, down: Weight, num_experts: int, readers: Sequence[str]) -> Experts:
    """Transpose each expert's matrices. Raises UnsupportedError for a quantised weight."""
    return Experts(_transposed(gate_up, num_experts), _transposed(down, num_experts))


def _transposed(weight: Weight, count: int) -> Tensor:
    if not isinstance(weight, Tensor):
        raise UnsupportedError(
            "Format of a weight has no product",
            on="moe_pack",
            found="quantised experts",
            expected="numbers of the model's dtype",
            fix="let the loader decode it",
        )
    return weight.view(count, -1, weight.shape[1]).transpose(1, 2).contiguous()


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
    """``out[t] = sum_k weights[t,k] * down(f(gate) * up)`` of expert ``experts[t,k]``; all scratch is the vendor's own.

    ``weights`` are rounded to x's dtype, as the vendor's last op wants them.
    """
    if not len(x):
        return
    count = len(packed.gate_up)
    rows, places, counts, _ = torch_npu.npu_moe_init_routing_v2(
        x.contiguous(),
        experts,
        active_num=experts.numel(),
        expert_num=count,
        expert_tokens_num_type=COUNTS,
        expert_tokens_num_flag=True,
        active_expert_range=[0, count],
    )
    inner = activated(_grouped(rows, packed.gate_up, counts), kind)
    found = _grouped(inner, packed.down, counts)
    # Places come by token and choice; they are wanted by choice and token.
    places = places.view(experts.shape).t().reshape(-1)
    out.copy_(torch_npu.npu_moe_finalize_routing(found, None, None, None, weights.to(x.dtype), places, None))


def _grouped(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Each expert's rows of x [N, K] times its matrix of [E, K, M]."""
    (product,) = torch_npu.npu_grouped_matmul(
        [x],
        [weight],
        group_list=counts,
        split_item=ONE_OUTPUT,
        group_type=BY_ROWS,
        group_list_type=COUNTS if len(weight) > 1 else SUMS,
    )
    assert isinstance(product, torch.Tensor)
    return product
