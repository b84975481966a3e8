"""Run on an NPU, or what stands for it: the family ``kv`` in blocks of 128 against core's references on the host.

``attention_child.py DTYPE,DTYPE SIZE,SIZE`` prints relative differences as JSON, by dtype and head size.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from vllm_ascend.device import NpuDevice
from vllm_ascend.ops import attention
from vllm_core.api import OPS, DeviceFacts, UnsupportedError

BLOCK, KV_HEADS, HEADS, BLOCKS = 128, 2, 6, 9
COUNTS, LENGTHS = (1, 130, 7), (257, 130, 128)
"""A decoding row, a whole prompt, a piece of one that ends with a block."""
TABLE = torch.tensor([[3, 5, 8], [1, 7, 0], [2, 0, 0]], dtype=torch.int32)


def reference(op: str) -> Any:
    return OPS[op].load_reference()


FACTS = DeviceFacts(id="0", name="NPU", device_type="npu", architecture="910b", memory_kind="discrete", memory_bytes=1 << 29)


def compared(device: NpuDevice, name: str, size: int) -> dict[str, Any]:
    """The difference after each op, and what was refused."""
    dtype = getattr(torch, name)
    torch.manual_seed(5)
    total, found = sum(COUNTS), dict[str, float]()
    q, k, v = (torch.randn(total, heads, size).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    # A weight that the dtype holds: as checkpoints have it, and the vendor's norm reads it.
    weight, table = (torch.rand(size) + 0.5).to(dtype).float(), torch.randn(300, 2, size // 2)
    positions = torch.cat([torch.arange(n - c, n) for n, c in zip(LENGTHS, COUNTS, strict=True)]).int()
    rows = torch.repeat_interleave(torch.arange(3), torch.tensor(COUNTS))
    slots = TABLE[rows, positions // BLOCK].long() * BLOCK + positions % BLOCK
    past = torch.randn(BLOCKS, 2, BLOCK, KV_HEADS, size).to(dtype).float()
    past[0] = past[4] = float("nan")  # of nobody
    item = 2 * BLOCK * KV_HEADS * size * dtype.itemsize

    def up(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device.torch_device)

    host = reference("kv_bind")(torch.zeros(BLOCKS, item, dtype=torch.uint8), KV_HEADS, size, name, BLOCK)
    npu = attention.kv_bind(device.allocate("kv", (BLOCKS, item), torch.uint8), KV_HEADS, size, name, BLOCK)
    everything = torch.arange(BLOCKS)
    reference("kv_import")(host, past, everything)
    attention.kv_import(npu, up(past), up(everything))

    def compare(what: str, mine: torch.Tensor, other: torch.Tensor) -> None:
        wanted = other.float()
        found[what] = ((mine.cpu().float() - wanted).abs() / (1 + wanted.abs())).nan_to_num(0.0).max().item()

    def exported() -> tuple[torch.Tensor, torch.Tensor]:
        mine = device.allocate("workspace", past.shape, torch.float32)
        attention.kv_export(mine, npu, up(everything))
        other = torch.zeros_like(past)
        reference("kv_export")(other, host, everything)
        return mine, other

    compare("import and export", *exported())
    wide = up(torch.cat((q, k, v), 1))
    parts = [one.clone() for one in (q, k)], list(wide.split((HEADS, KV_HEADS, KV_HEADS), 1))
    reference("qk_norm_rope_kv_write")(*parts[0], v, weight, weight, 1e-6, positions, table, False, host, slots)
    attention.qk_norm_rope_kv_write(*parts[1], up(weight), up(weight), 1e-6, up(positions), up(table), False, npu, up(slots))
    compare("query", parts[1][0], parts[0][0])
    compare("written", *exported())
    starts, lengths = torch.tensor([0, 1, 131, 138], dtype=torch.int32), torch.tensor(LENGTHS, dtype=torch.int32)
    shape = (max(COUNTS), max(LENGTHS), size**-0.5, 0, 0.0)
    mine, other = up(torch.empty_like(q)), torch.empty_like(q)
    reference("paged_attention")(other, parts[0][0], host, starts, lengths, TABLE, *shape)
    attention.paged_attention(mine, parts[1][0], npu, up(starts), up(lengths), up(TABLE), *shape)
    compare("attention", mine, other)
    source, target = torch.tensor([3, 1]), torch.tensor([6, 4])
    reference("kv_copy")(host, source, target)
    attention.kv_copy(npu, up(source), up(target))
    compare("copied", *exported())
    # Single queries, captured at other lengths than they are replayed at.
    single, starts, lengths = up(q[:3]), up(torch.arange(4, dtype=torch.int32)), up(torch.ones(3, dtype=torch.int32))
    mine, table = up(torch.empty_like(q[:3])), up(TABLE)
    graph = device.capture(lambda: attention.paged_attention(mine, single, npu, starts, lengths, table, 1, *shape[1:]))
    for wanted in ((257, 130, 128), (4, 129, 1)):
        lengths.copy_(torch.tensor(wanted, dtype=torch.int32))
        graph.replay()
        other = torch.empty_like(q[:3])
        reference("paged_attention")(other, q[:3], host, starts.cpu(), torch.tensor(wanted).int(), TABLE, 1, *shape[1:])
        compare(f"replayed at {wanted}", mine, other)
    refused = []
    for masks in ((16, 0.0), (0, 30.0), (0, 0.0, torch.zeros(single.shape[1]))):
        try:
            attention.paged_attention(mine, single, npu, starts, lengths, table, 1, *shape[1:3], *masks)
        except UnsupportedError as error:
            refused.append(error.on)
    return {"differences": found, "refused": refused}


def main(names: str, sizes: str) -> None:
    """All of them on one device."""
    device = NpuDevice(FACTS)
    cases = [(name, size) for name in names.split(",") for size in sizes.split(",")]
    print(json.dumps({f"{name} {size}": compared(device, name, int(size)) for name, size in cases}))


main(*sys.argv[1:])
