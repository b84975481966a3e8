"""Mixture of experts: routing and products by group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_simulator.npu.dispatch import op, queue, rule


@op("npu::npu_moe_gating_top_k_softmax")
def npu_moe_gating_top_k_softmax(x: Tensor, finished: Tensor | None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over experts [T, E], then the k largest: weights, int32 experts, int32 rows."""
    rule(finished is None and x.dim() == 2 and 0 < k <= min(1024, x.shape[1]), f"x {tuple(x.shape)}, k {k}")
    y, experts, rows = x.new_empty((len(x), k)), *(x.new_empty((len(x), k), dtype=torch.int32) for _ in range(2))

    def body(y: Tensor, experts: Tensor, rows: Tensor, x: Tensor) -> None:
        values, found = x.float().softmax(-1).topk(k)
        y.copy_(values)
        experts.copy_(found)
        rows.copy_(torch.arange(k)[None] * len(x) + torch.arange(len(x))[:, None])

    queue("npu::npu_moe_gating_top_k_softmax", body, y, experts, rows, x)
    return y, experts, rows


@op("npu::npu_grouped_matmul")
def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    **others: Any,
) -> list[Tensor]:
    """One x [T, K] whose rows are sorted by group, one weight [G, K, N]: each group's rows times its matrix."""
    rule(all(value in (None, 0) for value in others.values()), "bias, scales and activations are not simulated")
    rule(len(x) == len(weight) == 1 and weight[0].dim() == 3, "one x and one weight of three dimensions")
    rule(split_item in (2, 3) and group_type == 0 and group_list is not None, "split_item 2 or 3, group_type 0, a group_list")
    assert group_list is not None
    rule(group_list.dtype == torch.int64 and tuple(group_list.shape) == (len(weight[0]),), "group_list is int64 [G]")
    out = x[0].new_empty((len(x[0]), weight[0].shape[2]))

    def body(out: Tensor, x: Tensor, weight: Tensor, groups: Tensor) -> None:
        counts = groups.tolist() if group_list_type == 1 else groups.diff(prepend=groups.new_zeros(1)).tolist()
        begin = 0
        for index, count in enumerate(counts):
            out[begin : begin + count] = (x[begin : begin + count].float() @ weight[index].float()).to(out.dtype)
            begin += count

    queue("npu::npu_grouped_matmul", body, out, x[0], weight[0], group_list)
    return [out]
