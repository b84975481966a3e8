"""Run on an NPU, or what stands for it: products of an int8 weight against the numbers that it stands for, as JSON by
dtype."""

from __future__ import annotations

import json
import sys

import torch

from vllm_ascend.device import NpuDevice
from vllm_ascend.ops import linear
from vllm_core.api import DeviceFacts, QuantTensor

FACTS = DeviceFacts(id="0", name="NPU", device_type="npu", architecture="910b", memory_kind="discrete", memory_bytes=1 << 29)


def difference(device: NpuDevice, name: str) -> float:
    """The largest, relative to the largest value."""
    dtype = getattr(torch, name)
    torch.manual_seed(3)
    codes = torch.randint(-127, 128, (96, 64), dtype=torch.int8)
    scale, bias, x = torch.rand(96) / 64, torch.randn(96).to(dtype), torch.randn(7, 64).to(dtype)
    expected = x.float() @ (codes.float() * scale[:, None]).t() + bias.float()
    host = (codes, scale, bias, x)
    codes, scale, bias, x = (one.to(device.torch_device) for one in host)
    packed = linear.linear_pack(QuantTensor("int8_channel", (96, 64), codes, scale), bias, ["mlp.up"])
    out = device.allocate("workspace", (7, 96), dtype)
    linear.linear(out, x, packed)
    residual = torch.ones_like(out)
    linear.linear_add(residual, out, x, packed)
    worst = max((out.cpu().float() - expected).abs().max(), (residual.cpu().float() - 1 - expected).abs().max())
    return float(worst / expected.abs().max())


device = NpuDevice(FACTS)
print(json.dumps({name: difference(device, name) for name in sys.argv[1:]}))
