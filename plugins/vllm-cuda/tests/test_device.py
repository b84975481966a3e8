"""Memory of a `CudaDevice` where there is no GPU: tensors lie on the host, which pins none of its memory then."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vllm_core.api import MemoryBudgetError
from vllm_cuda import device as devices
from vllm_cuda.device import CudaDevice, host_available_bytes


class HostDevice(CudaDevice):
    """Opens no context."""

    def make_current(self) -> None:
        self._device = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU pins memory")
def test_a_pool_that_the_host_has_no_pinned_memory_for_stays_where_it_is(make_facts):
    device = HostDevice(make_facts())
    weights = device.allocate("weights", (4,), torch.float32).fill_(3.0)
    with pytest.raises(MemoryBudgetError, match="pinned memory on the host"):
        device.offload("weights")
    assert weights.tolist() == [3.0] * 4
    assert device._own["weights"] == 16
    assert device._away["weights"] == []


def test_what_the_host_can_give_is_read_where_it_says_it(tmp_path):
    meminfo = tmp_path / "meminfo"
    assert host_available_bytes(meminfo) == 0
    meminfo.write_text("MemTotal:       131072 kB\nMemFree:          1024 kB\nMemAvailable:    65536 kB\n")
    assert host_available_bytes(meminfo) == 64 << 20
    meminfo.write_text("MemTotal:       131072 kB\n")
    assert host_available_bytes(meminfo) == 0


@pytest.mark.parametrize(("kind", "expected"), [("unified", 64 << 20), ("discrete", 1 << 20)])
def test_pages_that_the_host_caches_are_available_where_both_share_memory(make_facts, monkeypatch, kind, expected):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 128 << 20))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(devices, "host_available_bytes", lambda: 64 << 20)
    stats = HostDevice(replace(make_facts(), memory_kind=kind)).statistics()
    assert (stats.available_bytes, stats.total_bytes) == (expected, 128 << 20)
