"""Run on an NPU, or what stands for it: routing and experts against core's references on the host.

``experts_child.py DTYPE...`` prints relative differences as JSON, by dtype and case.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor

from vllm_ascend.device import NpuDevice
from vllm_ascend.ops import experts
from vllm_core.api import OPS, DeviceFacts

CASES = {
    "mixtral": (9, 64, 48, 8, 2, "silu"),
    "many experts": (5, 32, 16, 128, 8, "gelu"),
    "one token": (1, 64, 40, 8, 2, "gelu_tanh"),
    "one expert": (3, 32, 16, 1, 1, "silu"),
    "no token": (0, 32, 16, 8, 2, "silu"),
}
"""Tokens, hidden size, inner size, experts, those of a token, activation."""


FACTS = DeviceFacts(id="0", name="NPU", device_type="npu", architecture="910b", memory_kind="discrete", memory_bytes=1 << 29)


def compared(device: NpuDevice, name: str) -> dict[str, float]:
    """The difference of each case; of the larger ones some experts have no row."""
    dtype, g = getattr(torch, name), torch.Generator().manual_seed(7)

    def there(tensor: Tensor) -> Tensor:
        return tensor.to(device.torch_device)

    found = {}
    for case, (tokens, hidden, inner, count, top, kind) in CASES.items():
        logits = (torch.randn(tokens, count, generator=g) * 2).round()
        logits[:, count - 1] += 4
        wanted = torch.empty(tokens, top, dtype=torch.int32), torch.empty(tokens, top)
        OPS["moe_route"].load_reference()(*wanted, logits, True)
        mine = there(torch.full((tokens, top), -1, dtype=torch.int32)), there(torch.empty(tokens, top))
        experts.moe_route(*mine, there(logits), True)
        device.synchronize()
        assert torch.equal(mine[0].cpu(), wanted[0]), case
        assert torch.allclose(mine[1].cpu(), wanted[1], 1e-5, 1e-5), case
        x = torch.randn(tokens, hidden, generator=g).to(dtype)
        gate_up = (torch.randn(count * 2 * inner, hidden, generator=g) * hidden**-0.5).to(dtype)
        down = (torch.randn(count * hidden, inner, generator=g) * inner**-0.5).to(dtype)
        expected, pairs = torch.empty(tokens, hidden), tokens * top
        scratch = [torch.empty(pairs, size) for size in (2 * inner, inner, hidden)]
        index = torch.empty(4 * (pairs + count), dtype=torch.int32)
        reference = OPS["moe_pack"].load_reference()(gate_up.float(), down.float(), count, ())
        OPS["moe"].load_reference()(expected, *scratch, index, x.float(), *wanted, reference, kind)
        packed = experts.moe_pack(there(gate_up), there(down), count, ())
        out, (wide, narrow, parts) = there(torch.empty(tokens, hidden, dtype=dtype)), scratch
        experts.moe(out, there(wide), there(narrow), there(parts), there(index), there(x), *mine, packed, kind)
        device.synchronize()
        worst = (out.cpu().float() - expected).abs().max() / expected.abs().max() if tokens else 0.0
        found[case] = float(worst)
    return found


device = NpuDevice(FACTS)
print(json.dumps({name: compared(device, name) for name in sys.argv[1:]}))
