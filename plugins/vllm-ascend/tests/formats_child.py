"""Run on an NPU, or what stands for it: the format of packed weights and their products against the host's, as JSON by case."""

from __future__ import annotations

import json

import torch
import torch_npu

from vllm_ascend.device import NpuDevice
from vllm_ascend.ops import linear
from vllm_core.api import DeviceFacts

FACTS = DeviceFacts(id="0", name="NPU", device_type="npu", architecture="910b", memory_kind="discrete", memory_bytes=1 << 29)
CASES = {
    "float16": (torch.float16, 96, 64, "mlp.up"),
    "bfloat16": (torch.bfloat16, 96, 64, "mlp.up"),
    "float32": (torch.float32, 96, 64, "mlp.up"),
    "ragged rows": (torch.float16, 97, 64, "mlp.up"),
    "ragged columns": (torch.float16, 96, 72, "mlp.up"),
    "rows that are embeddings": (torch.float16, 96, 64, "embed_tokens"),
}
"""Dtype, rows, columns and a reader of the weight."""


def packed(device: NpuDevice, dtype: torch.dtype, rows: int, columns: int, reader: str) -> dict[str, float]:
    """The weight's format, and the largest difference of a product and of a sum, relative to the largest value."""
    torch.manual_seed(3)
    weight, bias, x = torch.randn(rows, columns).to(dtype), torch.randn(rows).to(dtype), torch.randn(7, columns).to(dtype)
    expected = x.float() @ weight.float().t() + bias.float()
    weight, bias, x = (one.to(device.torch_device) for one in (weight, bias, x))
    pack = linear.linear_pack(weight, bias, [reader])
    out = device.allocate("workspace", (7, rows), dtype)
    linear.linear(out, x, pack)
    residual = torch.ones_like(out)
    linear.linear_add(residual, out, x, pack)
    worst = max((out.cpu().float() - expected).abs().max(), (residual.cpu().float() - 1 - expected).abs().max())
    return {"format": torch_npu.get_npu_format(pack.weight), "difference": float(worst / expected.abs().max())}


device = NpuDevice(FACTS)
print(json.dumps({name: packed(device, *case) for name, case in CASES.items()}))
