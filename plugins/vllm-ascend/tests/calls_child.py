"""Call each op without a cache once, in the shapes of a decoder; prints how many as JSON."""

from __future__ import annotations

import json
import sys

import torch

from vllm_ascend.device import NpuDevice
from vllm_ascend.ops import activation, embedding, experts, linear, norm, rope
from vllm_core.api import DeviceFacts, QuantTensor


def main(name: str) -> None:
    """Values do not matter here."""
    facts = DeviceFacts(
        id="0", name="NPU", device_type="npu", architecture="910b", memory_kind="discrete", memory_bytes=1 << 29
    )
    device, dtype = NpuDevice(facts), getattr(torch, name)

    def fresh(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return device.allocate("workspace", shape, of)

    x, weight = fresh(5, 256), fresh(256, of=torch.float32)
    norm.rms_norm(fresh(5, 256), x, weight, 1e-6)
    norm.add_rms_norm(fresh(5, 256), fresh(5, 256), x, weight, 1e-6)
    for kind in ("silu", "gelu", "gelu_tanh"):
        activation.gated_activation(fresh(5, 128), x, kind)
    table, positions = fresh(64, 2, 32, of=torch.float32), fresh(5, of=torch.int32)
    for interleaved in (False, True):
        rope.rotary_embedding(fresh(5, 4, 64), fresh(5, 2, 64), positions, table, interleaved)
    packed = linear.linear_pack(fresh(128, 256), fresh(128), ["mlp.up"])
    linear.linear(fresh(5, 128), x, packed)
    linear.linear_add(fresh(5, 128), fresh(5, 128), x, packed)
    codes = QuantTensor("int8_channel", (128, 256), fresh(128, 256, of=torch.int8), fresh(128, of=torch.float32))
    for bias in (None, fresh(128)):
        linear.linear(fresh(5, 128), x, linear.linear_pack(codes, bias, ["mlp.up"]))
    embedding.embedding(fresh(5, 256), positions, fresh(64, 256), 1.0)
    for count, top in ((8, 2), (1, 1)):
        pack = experts.moe_pack(fresh(count * 192, 256), fresh(count * 256, 96), count, ["mlp"])
        chosen, shares = fresh(5, top, of=torch.int32), fresh(5, top, of=torch.float32)
        experts.moe_route(chosen, shares, fresh(5, count, of=torch.float32), True)
        experts.moe(fresh(5, 256), x, x, x, chosen, x, chosen, shares, pack, "silu")
    device.synchronize()
    print(json.dumps({"ops": 11}))


main(*sys.argv[1:])
