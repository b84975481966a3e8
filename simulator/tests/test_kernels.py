"""Triton kernels on a simulated device: in the order of its queue, on its memory, with bfloat16 rounded as GPUs round it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

QUESTIONS = f"""
sys.path.insert(0, {str(Path(__file__).parent)!r})
import triton_kernels as kernels
api = getattr(torch, KIND)
x, result = torch.arange(100.0, device=KIND), torch.empty(100, device=KIND)
host = torch.empty(100, pin_memory=True)
kernels.scale_kernel[(4,)](result, x, 0.5, 100, BLOCK=32, num_warps=4)
host.copy_(result, non_blocking=True)
early = host.tolist()
api.synchronize()
out["early"], out["late"] = early == host.tolist(), host.tolist() == [0.5 * n for n in range(100)]
narrow = (torch.randn(512) * 3).bfloat16()
found = torch.empty_like(narrow, device=KIND)
kernels.scale_kernel[(1,)](found, narrow.to(KIND), 0.3, 512, BLOCK=512)
exact = (narrow.float() * torch.tensor(0.3).bfloat16().float()).bfloat16(), (narrow.float() * 0.3).bfloat16()
out["bfloat16"] = any(torch.equal(found.cpu(), one) for one in exact)
a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
square = torch.empty(16, 16, dtype=torch.bfloat16, device=KIND)
kernels.product_kernel[(1,)](square, a.to(KIND), b.to(KIND), SIZE=16)
total = a.float() @ b.float()
exact = total + total.sum(1, keepdim=True)
out["product"] = ((square.cpu().float() - exact).abs() / (exact.abs() + 1e-3)).max().item()
kernels.sum_kernel[(1,)](torch.empty(1, device=KIND), x.bfloat16(), SIZE=64)
out["narrow sum"] = said(api.synchronize)
out["afterwards"] = (x + 1).sum().item()
out["replayed"] = None
if GRAPH:
    graph = api.CUDAGraph()
    with api.graph(graph):
        kernels.scale_kernel[(4,)](result, x, 2.0, 100, BLOCK=32)
    x.fill_(4.0)
    graph.replay()
    out["replayed"] = result.sum().item()
"""


@pytest.mark.parametrize(("pose", "kind"), [("hip", "cuda"), ("xpu", "xpu")])
def test_kernels_run_when_the_device_comes_to_them(found_on, pose, kind, tmp_path):
    log, has_graphs = tmp_path / "log.json", pose == "hip"
    prelude = f"KIND, GRAPH = {kind!r}, {has_graphs}\n"
    found = found_on(prelude + QUESTIONS, pose=pose, memory_mib=64, interpret=True, more={"SIMULATOR_LOG": str(log)})
    assert not found["early"]
    assert found["late"]
    assert found["bfloat16"]
    assert found["product"] <= 2**-8  # half of a unit in the last place of bfloat16
    assert "a reduction of bfloat16 is not simulated" in found["narrow sum"]
    assert found["afterwards"] == 5050.0
    assert found["replayed"] == (800.0 if has_graphs else None)
    ran = {name: count for name, count in json.loads(log.read_text())["ops"].items() if name.startswith("triton::")}
    scaled = 3 if has_graphs else 2
    assert ran == {"triton::scale_kernel": scaled, "triton::product_kernel": 1, "triton::sum_kernel": 1}


def test_an_npu_has_no_triton_to_interpret():
    from vllm_simulator import Settings

    with pytest.raises(ValueError, match="pose npu has no Triton"):
        Settings(pose="npu", interpret=True)
