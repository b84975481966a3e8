"""Mixture of experts: routing, rows by expert and back, and products by group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_simulator.npu.dispatch import op, queue, rule

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INNER_LIMIT = 65536
"""The last dimension of x and of a weight of npu_grouped_matmul is smaller."""
COUNT = 1
"""`expert_tokens_num_type`: rows of each expert; and `group_list_type`: rows of each group."""


@op("npu::npu_moe_gating_top_k_softmax")
def npu_moe_gating_top_k_softmax(x: Tensor, finished: Tensor | None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over experts [T, E], then the k largest: weights, int32 experts, int32 rows.

    Of equal ones the lower index comes first, as the chip's sort instruction has it (Ascend C, Sort32).
    """
    rule(finished is None and x.dim() == 2 and 0 < k <= min(1024, x.shape[1]), f"x {tuple(x.shape)}, k {k}")
    rule(x.dtype in FLOATS, f"x is {x.dtype}")
    y, experts, rows = x.new_empty((len(x), k)), *(x.new_empty((len(x), k), dtype=torch.int32) for _ in range(2))

    def body(y: Tensor, experts: Tensor, rows: Tensor, x: Tensor) -> None:
        values, found = x.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
        y.copy_(values[:, :k])
        experts.copy_(found[:, :k])
        rows.copy_(torch.arange(k)[None] * len(x) + torch.arange(len(x))[:, None])

    queue("npu::npu_moe_gating_top_k_softmax", body, y, experts, rows, x)
    return y, experts, rows


@op("npu::npu_moe_init_routing_v2")
def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of x [T, H] once for each of their experts [T, K], in the order of experts; where each choice went, int32 [T K];
    rows of each expert, int64 [E]; and scales, which mean nothing here."""
    rule(
        scale is None and offset is None and x_dtype is None and quant_mode == -1, "scales and quantised rows are not simulated"
    )
    rule(x.dim() == expert_idx.dim() == 2 and len(x) == len(expert_idx), f"{tuple(x.shape)}, {tuple(expert_idx.shape)}")
    rule(x.dtype in FLOATS and expert_idx.dtype == torch.int32, f"x is {x.dtype}, expert_idx {expert_idx.dtype}")
    rule(x.is_contiguous() and expert_idx.is_contiguous(), "x and expert_idx are contiguous")
    rule(active_num in (-1, 0, expert_idx.numel()), f"active_num {active_num}: fewer than all rows are not simulated")
    rule(drop_pad_mode == 0, "drop_pad_mode 0 alone is supported")
    rule(expert_tokens_num_flag and expert_tokens_num_type in (COUNT, 2), "the flag is True, the type 1 or 2")
    rule(expert_tokens_num_type == COUNT and row_idx_type == 0, "other lists and scattered indices are not simulated")
    rule(0 < expert_num <= 10240 and list(active_expert_range) == [0, expert_num], "all experts are active here")
    count = expert_idx.numel()
    rows, places = x.new_empty((count, x.shape[1])), x.new_empty((count,), dtype=torch.int32)
    counts, scales = x.new_empty((expert_num,), dtype=torch.int64), x.new_empty((count,), dtype=torch.float32)

    def body(rows: Tensor, places: Tensor, counts: Tensor, x: Tensor, experts: Tensor) -> None:
        flat = experts.flatten().long()
        order = flat.sort(stable=True).indices
        rows.copy_(x[order // experts.shape[1]])
        places[order] = torch.arange(len(order), dtype=torch.int32)
        counts.copy_(torch.bincount(flat, minlength=expert_num))

    queue("npu::npu_moe_init_routing_v2", body, rows, places, counts, x, expert_idx)
    return rows, places, counts, scales


@op("npu::npu_moe_finalize_routing")
def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Tensor:
    """Each row's K results, which lie at the places [K T], times its scales [T, K], summed."""
    rule(skip1 is skip2 is bias is export_for_source_row is None, "skips and biases are not simulated")
    rule(drop_pad_mode == 0 and scales is not None, "drop_pad_mode 0 alone is documented; without scales it is not simulated")
    assert scales is not None
    rows = expanded_permuted_rows
    rule(rows.dtype in FLOATS and scales.dtype == rows.dtype, f"scales have the rows' dtype: {scales.dtype} and {rows.dtype}")
    rule(scales.dim() == 2 and rows.dim() == 2 and len(rows) == scales.numel(), f"{tuple(rows.shape)}, {tuple(scales.shape)}")
    places = expanded_src_to_dst_row
    rule(places.dtype == torch.int32 and tuple(places.shape) == (len(rows),), f"places are int32 [T K], not {places.dtype}")
    out = rows.new_empty((len(scales), rows.shape[1]))

    def body(out: Tensor, rows: Tensor, scales: Tensor, places: Tensor) -> None:
        total = torch.zeros(out.shape)
        for number, column in enumerate(places.view(scales.shape[1], -1)):
            total += rows[column.long()].float() * scales[:, number].float()[:, None]
        out.copy_(total)

    queue("npu::npu_moe_finalize_routing", body, out, rows, scales, places)
    return out


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
    rule(x[0].dtype in FLOATS and x[0].dtype == weight[0].dtype, f"one dtype: {x[0].dtype} and {weight[0].dtype}")
    rule(x[0].dim() == 2 and x[0].shape[1] == weight[0].shape[1], f"{tuple(x[0].shape)} times {tuple(weight[0].shape)}")
    rule(max(x[0].shape[1], weight[0].shape[2]) < INNER_LIMIT, f"last dimensions are below {INNER_LIMIT}")
    rule(split_item in (2, 3) and group_type == 0 and group_list is not None, "split_item 2 or 3, group_type 0, a group_list")
    assert group_list is not None
    rule(group_list.dtype == torch.int64 and tuple(group_list.shape) == (len(weight[0]),), "group_list is int64 [G]")
    rule(group_list_type != COUNT or len(group_list) > 1, "a list of counts has more than one group")
    out = x[0].new_empty((len(x[0]), weight[0].shape[2]))

    def body(out: Tensor, x: Tensor, weight: Tensor, groups: Tensor) -> None:
        counts = groups.tolist() if group_list_type == COUNT else groups.diff(prepend=groups.new_zeros(1)).tolist()
        begin = 0
        for index, count in enumerate(counts):
            out[begin : begin + count] = (x[begin : begin + count].float() @ weight[index].float()).to(out.dtype)
            begin += count

    queue("npu::npu_grouped_matmul", body, out, x[0], weight[0], group_list)
    return [out]
