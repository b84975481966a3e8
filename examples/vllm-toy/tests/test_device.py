"""What a simulated device must not let pass, and what it must be able to do."""

from __future__ import annotations

import pytest
import torch

from vllm_core.api import MemoryBudgetError, UnsupportedError
from vllm_toy import ops

GARBAGE = torch.full((1,), 0xC5, dtype=torch.uint8)


def adopt(device, *values):
    return device.adopt("workspace", torch.tensor(values))


def pinned(device, *size):
    return device.pinned(size, torch.float32)


# Memory of its own


def test_a_host_tensor_mixed_into_device_work_raises(device):
    x = adopt(device, 1.0, 2.0)
    with pytest.raises(RuntimeError, match="same device"):
        torch.add(x, torch.ones(2))
    with pytest.raises(RuntimeError, match="same device"):
        x[torch.tensor([0, 1])]
    with pytest.raises(UnsupportedError, match="cpu, toy:0"):
        ops.rms_norm(x[None], torch.ones(1, 2), x, 1e-6)


def test_two_devices_do_not_mix(device, devices):
    with pytest.raises(RuntimeError, match="same device"):
        torch.add(adopt(devices[0], 1.0), adopt(devices[1], 1.0))
    with pytest.raises(UnsupportedError, match="toy:0, toy:1"):
        ops.rms_norm(adopt(devices[0], 1.0)[None], adopt(devices[1], 1.0)[None], adopt(devices[0], 1.0), 1e-6)


def test_device_memory_is_no_array_of_the_host(device):
    with pytest.raises(TypeError, match="toy"):
        adopt(device, 1.0).numpy()


def test_following_an_address_of_the_device_is_a_segmentation_fault(child):
    assert child("import ctypes; ctypes.string_at(x.data_ptr(), 1)").returncode == -11


def test_temporaries_hold_garbage_and_pools_zeros(device):
    fresh = torch.empty(64, dtype=torch.uint8, device="toy:0").cpu()
    assert torch.equal(fresh, GARBAGE.expand(64))
    assert not device.allocate("kv", (64,), torch.uint8).cpu().any()


# Order of work


def test_a_result_read_before_it_was_waited_for_is_garbage(device):
    host, event = pinned(device, 2), device.event()
    host.copy_(adopt(device, 1.0, 2.0) * 2, non_blocking=True)
    event.record()
    assert torch.equal(host.view(torch.uint8), GARBAGE.expand(8))
    event.wait()
    assert host.tolist() == [2.0, 4.0]


def test_a_staging_buffer_filled_again_too_early_spoils_the_step(device):
    host, target = pinned(device, 2).fill_(1), adopt(device, 0.0, 0.0)
    target.copy_(host, non_blocking=True)
    host.fill_(7)
    assert target.cpu().tolist() == [7.0, 7.0]


def test_memory_that_is_not_pinned_may_be_filled_again(device):
    host, target = torch.ones(2), adopt(device, 0.0, 0.0)
    target.copy_(host, non_blocking=True)
    host.fill_(7)
    assert target.cpu().tolist() == [1.0, 1.0]


def test_an_event_is_not_reached_before_somebody_gave_the_device_time(device):
    event = device.event()
    adopt(device, 1.0).add_(1)
    event.record()
    assert [event.query(), event.query()] == [False, True]


def test_work_of_two_streams_is_ordered_by_events(device):
    x, done = adopt(device, 1.0), torch.Event("toy:0")
    with torch.Stream("toy:0"):
        x.add_(1)
        done.record()
    done.wait()
    assert (x * 3).cpu().tolist() == [6.0]


def test_what_a_kernel_raises_comes_out_where_it_is_waited_for_once(device):
    wrong = adopt(device, 1.0, 2.0, 3.0)[None]
    ops.rms_norm(wrong, wrong, adopt(device, 1.0, 1.0), 1e-6)
    with pytest.raises(RuntimeError, match="size"):
        device.synchronize()
    device.synchronize()
    assert (wrong * 2).cpu().tolist() == [[2.0, 4.0, 6.0]]


def test_a_blocking_device_raises_at_the_launch(child):
    code = "ops.rms_norm(x, x, device.adopt('workspace', torch.ones(3)), 1e-6); print('launched')"
    assert "launched" in child(code).stdout
    assert "launched" not in child(code, VLLM_TOY_BLOCKING="1").stdout


# Graphs


def test_a_graph_repeats_its_work_on_what_lies_there_now(device):
    source, target = adopt(device, 1.0), adopt(device, 0.0)
    graph = device.capture(lambda: target.copy_(source.exp() * 2 + target))
    assert target.cpu().tolist() == [0.0], "captured, not run"
    source.zero_()
    graph.replay()
    graph.replay()
    assert target.cpu().tolist() == [4.0]


@pytest.mark.parametrize("work", [lambda x: x.item(), lambda x: x.copy_(torch.ones(1)), lambda x: x.nonzero()])
def test_a_capture_that_needs_the_host_raises_and_leaves_the_device_usable(device, work):
    x = adopt(device, 1.0)
    with pytest.raises(RuntimeError, match="captured"):
        device.capture(lambda: work(x))
    assert (x + 1).cpu().tolist() == [2.0]


# How much memory, and its pools


def test_out_of_memory_is_an_error_of_four_parts_and_passes(device):
    with pytest.raises(MemoryBudgetError, match="VLLM_TOY_MEMORY_MIB"):
        device.allocate("kv", (1 << 40,), torch.uint8)
    assert device.allocate("kv", (4,), torch.uint8).cpu().tolist() == [0, 0, 0, 0]


def test_queued_work_is_finished_before_memory_is_called_full(device):
    device.synchronize()
    before, quarter = device.statistics().available_bytes, device.statistics().total_bytes // 4
    for _ in range(8):
        torch.empty(quarter, dtype=torch.uint8, device="toy:0")[:1].add_(1)
    device.synchronize()
    assert device.statistics().available_bytes == before


def test_statistics_count_the_pools_of_this_device_alone(device):
    device.synchronize()
    before = device.statistics()
    kept = device.allocate("state", (1 << 20,), torch.uint8)
    now = device.statistics()
    assert now.own_bytes["state"] - before.own_bytes["state"] == kept.nbytes
    assert before.available_bytes - now.available_bytes == kept.nbytes


def test_a_released_pool_cannot_be_touched_and_comes_back_at_its_addresses(device):
    weights, kv = device.adopt("weights", torch.arange(4.0)), device.allocate("kv", (4,), torch.float32)
    kv.fill_(5)
    addresses = weights.data_ptr(), kv.data_ptr()
    assert device.offload("weights") >= 16
    assert device.release("kv") >= 16
    assert device.release("kv") == 0
    with pytest.raises(RuntimeError, match="released pool"):
        weights.cpu()
    device.restore("weights")
    device.restore("kv")
    assert (weights.data_ptr(), kv.data_ptr()) == addresses
    assert weights.cpu().tolist() == [0.0, 1.0, 2.0, 3.0], "weights went to the host"
    assert kv.cpu().tolist() == [0.0] * 4, "KV was dropped"


def test_a_copy_to_the_peer_arrives_there(device, devices):
    copied = device.copy_to_peer(adopt(device, 1.0, 2.0) * 2, devices[1])
    assert (str(copied.device), copied.cpu().tolist()) == ("toy:1", [2.0, 4.0])
    device.copy_into_peer(adopt(device, 3.0, 5.0), copied, devices[1])
    assert copied.cpu().tolist() == [3.0, 5.0]


def test_a_seed_repeats_what_the_device_draws(device):
    draws = []
    for seed in (3, 3, 4):
        device.seed(seed)
        draws.append(adopt(device, 0.0, 0.0).normal_().cpu())
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
