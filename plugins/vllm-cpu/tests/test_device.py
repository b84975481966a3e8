"""The device keeps what `vllm_core.api.Device` promises."""

from __future__ import annotations

import pytest
import torch

from vllm_core.api import DeviceFacts, MemoryBudgetError, UnsupportedError
from vllm_cpu.device import MAPPED_BYTES, PLACED_BYTES, CpuDevice
from vllm_cpu.pages import ALIGNMENT, BLOCK_BYTES, PAGE_BYTES, Pages

has_pages = pytest.mark.skipif(Pages(lambda: 1 << 30).place(torch.ones(1)) is None, reason="no large pages on this system")


@pytest.fixture
def device() -> CpuDevice:
    return CpuDevice(
        DeviceFacts(id="0", name="CPU", device_type="cpu", architecture="x", memory_kind="host", memory_bytes=1 << 28)
    )


@pytest.mark.parametrize("count", [1, 100, MAPPED_BYTES, MAPPED_BYTES + 3])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_memory_is_zeroed_aligned_writable_and_counted(device, count, dtype) -> None:
    tensor = device.allocate("kv", (count,), dtype)
    assert tensor.data_ptr() % 64 == 0
    assert not tensor.any()
    tensor.fill_(1)
    assert device.statistics().own_bytes["kv"] == count * dtype.itemsize


def test_an_empty_tensor_can_be_allocated(device) -> None:
    assert device.allocate("state", (0, 4), torch.int32).shape == (0, 4)


def test_release_gives_back_one_pool_and_keeps_the_peak(device) -> None:
    device.allocate("kv", (1000,), torch.uint8)
    device.adopt("weights", torch.zeros(10))
    assert device.release("kv") == 1000
    stats = device.statistics()
    assert (stats.own_bytes["kv"], stats.own_bytes["weights"], stats.peak_own_bytes) == (0, 40, 1040)


def test_small_tensors_are_adopted_as_they_are(device) -> None:
    host = torch.arange(4)
    assert device.adopt("weights", host).data_ptr() == host.data_ptr()


@has_pages
def test_large_weights_are_placed_one_after_the_other(device) -> None:
    values = torch.randn(PLACED_BYTES // 4 + 1, 2)
    first, second = (device.adopt("weights", host) for host in (values.T, values[1:]))
    assert first.equal(values.T)
    assert first.is_contiguous()
    assert second.equal(values[1:])
    assert first.data_ptr() % PAGE_BYTES == 0
    assert 0 <= second.data_ptr() - first.data_ptr() - first.nbytes < ALIGNMENT
    assert device.statistics().own_bytes["weights"] == first.nbytes + second.nbytes


@has_pages
def test_a_weight_larger_than_a_block_has_its_own() -> None:
    pages = Pages(lambda: 1 << 30)
    small, large = torch.ones(100), torch.ones(BLOCK_BYTES + 4, dtype=torch.uint8)
    before, placed, after = (pages.place(host) for host in (small, large, small))
    assert before is not None
    assert placed is not None
    assert after is not None
    assert placed.equal(large)
    assert placed.data_ptr() % PAGE_BYTES == 0
    assert after.data_ptr() % ALIGNMENT == 0


def test_weights_stay_where_they_are_when_memory_is_short() -> None:
    assert Pages(lambda: 100).place(torch.ones(100)) is None


def test_weights_stay_after_their_pool_is_released(device) -> None:
    placed = device.adopt("weights", torch.ones(PLACED_BYTES))
    device.release("weights")
    assert placed.all()
    assert device.adopt("weights", torch.ones(PLACED_BYTES)).data_ptr() != placed.data_ptr() + placed.nbytes


def test_too_much_is_refused_with_the_bytes_needed_and_had(device) -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        device.allocate("kv", (1 << 29,), torch.uint8)
    assert str(1 << 29) in caught.value.expected
    assert "bytes available" in caught.value.found


def test_statistics_are_bounded_by_what_the_probe_found(device) -> None:
    stats = device.statistics()
    assert stats.total_bytes == 1 << 28
    assert 0 < stats.available_bytes <= stats.total_bytes


def test_what_is_not_claimed_is_refused_by_name(device) -> None:
    for call in (lambda: device.copy_to_peer(torch.zeros(1), device), lambda: device.restore("kv")):
        with pytest.raises(UnsupportedError):
            call()
    event = device.event()
    event.record()
    assert event.query()
