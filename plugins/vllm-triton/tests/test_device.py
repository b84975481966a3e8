"""What `StreamDevice` does with tensors that are on the device already."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_core.api import DeviceFacts, MemoryBudgetError
from vllm_triton import device as devices
from vllm_triton.device import StreamDevice


@pytest.fixture
def device() -> StreamDevice:
    runtime: Any = SimpleNamespace(
        set_device=lambda device: None,
        mem_get_info=lambda device: (512, 1024),
        memory_reserved=lambda device: 0,
        memory_allocated=lambda device: 0,
    )
    facts = DeviceFacts(id="0", name="a chip", device_type="x", architecture="", memory_kind="discrete", memory_bytes=1024)
    made = StreamDevice(facts, runtime, "cpu")
    made._device = torch.device("cpu")
    return made


class NoMoreMemory(torch.Tensor):
    """A tensor that cannot be copied."""

    def clone(self, *arguments: Any, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no more memory")


def test_a_tensor_that_is_there_is_counted_and_a_part_is_cut_off(device):
    whole = torch.arange(8.0)
    assert device.adopt("weights", whole) is whole
    part = device.adopt("weights", whole[:2])
    assert part.untyped_storage().nbytes() == 8
    assert device.statistics().own_bytes["weights"] == 32 + 8


def test_a_part_that_there_is_no_memory_to_cut_off_is_a_budget_error_and_not_counted(device):
    part = torch.arange(8.0)[:2].as_subclass(NoMoreMemory)
    with pytest.raises(MemoryBudgetError, match="512 bytes available"):
        device.adopt("weights", part)
    assert device.statistics().own_bytes["weights"] == 0


def test_a_buffer_is_filled_again_only_after_the_other_one(device, monkeypatch):
    """Also behind a tensor that filled both: the host would wait for the copy that it has just queued."""
    used = []
    monkeypatch.setattr(devices, "STAGING_BYTES", 4)
    device._staging = [
        (
            torch.zeros(4, dtype=torch.uint8),
            SimpleNamespace(synchronize=lambda name=name: used.append(name), record=lambda: None),
        )
        for name in "ab"
    ]
    for count in (3, 8, 5, 16, 1, 0, 12, 4):
        source = torch.arange(count, dtype=torch.uint8)
        target = torch.zeros_like(source)
        device._upload(target, source)
        assert torch.equal(target, source)
    assert used == ["a", "b"] * (len(used) // 2) + ["a"] * (len(used) % 2)
