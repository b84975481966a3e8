"""Quantisation of activations, and products with quantised weights."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_simulator.npu.dispatch import op, queue, rule

HALF = (torch.float16, torch.bfloat16)


@op("npu::npu_dynamic_quant")
def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """int8 rows and a float32 scale for each: x = y * scale."""
    rule(smooth_scales is None and group_index is None and dst_type is None and quant_mode == "pertoken", "not simulated")
    rule(input.dtype in HALF and input.dim() > 1, f"x is {input.dtype}, {input.dim()}-D")
    y, scale = input.new_empty(input.shape, dtype=torch.int8), input.new_empty(input.shape[:-1], dtype=torch.float32)

    def body(y: Tensor, scale: Tensor, x: Tensor) -> None:
        wide = x.float()
        scale.copy_(wide.abs().amax(-1) / 127)
        y.copy_((wide / scale.clamp(min=1e-12).unsqueeze(-1)).round().clamp(-128, 127))

    queue("npu::npu_dynamic_quant", body, y, scale, input)
    return y, scale


@op("npu::npu_quant_matmul")
def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | torch.dtype | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: list[int] | None = None,
    y_scale: Tensor | None = None,
) -> Tensor:
    """int8 [M, K] times int8 [K, N], times the columns' scale and, if given, the rows'."""
    rule(x1.dtype == x2.dtype == torch.int8 and x1.dim() == x2.dim() == 2, f"int8 matrices: {x1.dtype}, {x2.dtype}")
    rule(offset is None and bias is None and y_scale is None and not group_sizes, "offset, bias, y_scale are not simulated")
    rule(x1.shape[1] == x2.shape[0] and tuple(scale.shape) in ((1,), (x2.shape[1],)), "shapes fit")
    rule(pertoken_scale is None or tuple(pertoken_scale.shape) == (x1.shape[0],), "pertoken_scale is float32 [M]")
    out_dtype = torch.bfloat16 if scale.dtype == torch.bfloat16 else torch.float16
    rule(output_dtype is not None and scale.dtype in (torch.float32, torch.bfloat16), f"scale is {scale.dtype}")
    out = x1.new_empty((x1.shape[0], x2.shape[1]), dtype=output_dtype if isinstance(output_dtype, torch.dtype) else out_dtype)

    def body(out: Tensor, x1: Tensor, x2: Tensor, scale: Tensor, rows: Tensor | None) -> None:
        product = (x1.double() @ x2.double()).float() * scale.float()
        out.copy_(product if rows is None else product * rows.unsqueeze(1))

    queue("npu::npu_quant_matmul", body, out, x1, x2, scale, pertoken_scale)
    return out


@op("npu::npu_weight_quant_batchmatmul")
def npu_weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
    weight_dtype: int | None = None,
) -> Tensor:
    """x [M, K] times int8 [K, N] scaled by column; the product is float16 or bfloat16."""
    rule(x.dtype in HALF and x.dim() == 2, f"x is {x.dtype}, {x.dim()}-D")
    rule(weight.dtype == torch.int8 and weight.dim() == 2 and weight.shape[0] == x.shape[1], f"weight is {weight.dtype}")
    rule(antiquant_scale.dtype == x.dtype, f"antiquant_scale has x's dtype, not {antiquant_scale.dtype}")
    rule(tuple(antiquant_scale.shape) in ((weight.shape[1],), (1, weight.shape[1])), "antiquant_scale is [N]")
    rule(antiquant_offset is None and quant_scale is None and quant_offset is None, "offsets are not simulated")
    rule(antiquant_group_size == 0 and inner_precise == 0, "groups are not simulated")
    wanted = torch.float32 if x.dtype == torch.bfloat16 else torch.float16
    rule(bias is None or bias.dtype == wanted, f"bias is {wanted} where x is {x.dtype}")
    out = x.new_empty((x.shape[0], weight.shape[1]))

    def body(out: Tensor, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        product = x.float() @ (weight.float() * scale.float())
        out.copy_(product if bias is None else product + bias.float())

    queue("npu::npu_weight_quant_batchmatmul", body, out, x, weight, antiquant_scale, bias)
    return out
