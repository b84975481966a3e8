"""Recorded work: replays give the bits of plain runs, and what would be replayed wrongly is refused."""

from __future__ import annotations

import gc
import struct
from dataclasses import replace
from threading import Thread

import pytest
import torch
from torch import Tensor

from vllm_core.api import DeviceFacts, UnsupportedError
from vllm_cpu import recording
from vllm_cpu.device import CpuDevice
from vllm_cpu.recording import NativeCall, recorded

LINEAR = struct.Struct("PPqPqqP")
"""The arguments of vllm_linear in a recorded call."""


@pytest.fixture
def device() -> CpuDevice:
    return CpuDevice(
        DeviceFacts(id="0", name="CPU", device_type="cpu", architecture="x", memory_kind="host", memory_bytes=1 << 28)
    )


class Block:
    """A norm, a product of its rows and a sum: as in a layer."""

    def __init__(self, ops, dtype: torch.dtype = torch.float32, rows: int = 3) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ops, self.rows = ops, rows
        self.norm = torch.rand(64, generator=generator)
        weight = torch.randn(64, 64, generator=generator).to(dtype)
        self.weight = ops["linear_pack"](weight, None, ("block",))
        self.x, self.normed, self.out = (torch.zeros(rows, 64, dtype=dtype) for _ in range(3))

    def run(self) -> None:
        """``out = x + linear(norm(x))``."""
        self.ops["rms_norm"](self.normed, self.x, self.norm, 1e-6)
        self.ops["linear"](self.out, self.normed, self.weight)
        self.ops["add"](self.out, self.out, self.x)

    def plain(self, x: Tensor) -> Tensor:
        """The result for ``x`` without a recording."""
        self.x.copy_(x)
        self.run()
        return self.out.clone()


@pytest.fixture
def ops(native_ops):
    from vllm_cpu.ops import native_linear

    return native_ops | {"linear_pack": native_linear.linear_pack, "linear": native_linear.linear}


def inputs(block: Block, count: int = 4) -> list[Tensor]:
    return [torch.randn(block.x.shape, generator=torch.Generator().manual_seed(n)).to(block.x.dtype) for n in range(count)]


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_calls_are_replayed_in_one_call_with_the_bits_of_plain_runs(device, ops, dtype, alone, monkeypatch) -> None:
    """``alone``: the library has no replay of its own, and the calls are made one by one."""
    if alone:
        monkeypatch.setattr(recording, "replayer", lambda: None)
    block = Block(ops, dtype)
    expected = [block.plain(x) for x in inputs(block)]
    graph = device.capture(block.run)
    assert (graph.runs, [call.op for call in graph.calls]) == (1, ["rms_norm", "linear", "add"])
    for x, wanted in zip(inputs(block), expected, strict=True):
        block.x.copy_(x)
        block.out.fill_(7)
        graph.replay()
        assert torch.equal(block.out, wanted)


def test_what_torch_computes_between_ops_is_replayed_in_its_place(device, ops) -> None:
    block = Block(ops)
    kept = torch.zeros(4, 64)

    def work() -> None:
        block.x.mul_(2)
        block.run()
        scaled = block.out * 0.5 + block.x.sum(0)
        kept[1:] = scaled[:, :]
        kept[0].copy_(torch.stack([scaled[0], scaled[1]]).amax(0))

    expected = []
    for x in inputs(block):
        block.x.copy_(x)
        work()
        expected.append(kept.clone())
    graph = device.capture(work)
    for x, wanted in zip(inputs(block), expected, strict=True):
        block.x.copy_(x)
        kept.fill_(7)
        graph.replay()
        assert torch.equal(kept, wanted)


def test_another_packages_op_is_called_again_as_a_whole(device, ops) -> None:
    """It may do anything with what it is given, and is not seen doing it."""
    block, calls = Block(ops), []

    def halve(out: Tensor, x: Tensor) -> None:
        calls.append(out)
        out.copy_(x)
        out.numpy()[:] /= 2 if x.tolist()[0][0] > 0 else 4

    bound = device.bind(halve, "vllm-elsewhere")

    def work() -> None:
        block.run()
        bound(block.out, block.out)

    expected = []
    for x in inputs(block):
        block.x.copy_(x)
        work()
        expected.append(block.out.clone())
    graph = device.capture(work)
    assert [type(call) is NativeCall for call in graph.calls] == [True, True, True, False]
    calls.clear()
    for x, wanted in zip(inputs(block), expected, strict=True):
        block.x.copy_(x)
        graph.replay()
        assert torch.equal(block.out, wanted)
    assert len(calls) == len(expected)


def test_ops_of_this_package_are_bound_as_they_are(device, ops) -> None:
    assert device.bind(ops["add"], "vllm-cpu-native") is ops["add"]


def _scaled_by_value(out: Tensor, x: Tensor) -> None:
    out.copy_(x * x.sum().item())


def _picked(out: Tensor, x: Tensor) -> None:
    out[: len(x[x > 0])].zero_()


def _through_numpy(out: Tensor, x: Tensor) -> None:
    out.copy_(torch.from_numpy(x.numpy() * 2))


def _listed(out: Tensor, x: Tensor) -> None:
    out.fill_(x.tolist()[0])


def _decided(out: Tensor, x: Tensor) -> None:
    out.copy_(x if x[0] > 0 else -x)


def _large(out: Tensor, x: Tensor) -> None:
    out.copy_((x.repeat(1 << 23) * 2)[: len(out)])


@pytest.mark.parametrize("work", [_scaled_by_value, _picked, _through_numpy, _listed, _decided, _large])
def test_work_that_reads_values_between_ops_is_refused(device, work) -> None:
    out, x = torch.zeros(4), torch.arange(4.0)
    with pytest.raises(UnsupportedError, match="between ops"):
        device.capture(lambda: work(out, x))


def test_an_op_that_returns_a_value_is_refused_by_name_and_the_work_goes_on(device) -> None:
    """Other workers of a model may wait for what the rest of the work sends them."""
    done = []

    @recorded
    def largest(x: Tensor) -> float:
        return float(x.max())

    with pytest.raises(UnsupportedError, match="largest returned a value"):
        device.capture(lambda: done.append(largest(torch.ones(2))))
    assert done == [1.0]


def test_work_that_raises_leaves_nothing_behind(device, ops) -> None:
    with pytest.raises(KeyError):
        device.capture(lambda: {}["nothing"])
    assert recording.now() is None
    block = Block(ops)
    graph = device.capture(block.run)
    assert len(graph.calls) == 3


def test_a_failing_call_of_a_replay_is_named(device, ops) -> None:
    block = Block(ops)
    graph = device.capture(block.run)
    first, product, last = graph.calls
    values = list(LINEAR.unpack(product.packed))
    values[5] = -1  # rows
    broken = replace(product, packed=LINEAR.pack(*values), arguments=(*values[:5], -1, None))
    block.out.fill_(7)
    with pytest.raises(UnsupportedError, match=r"vllm_linear, torch\.float32"):
        recording.Recording([first, broken, last]).replay()
    assert bool((block.out == 7).all()), "what follows a failure is not called"


def test_a_recording_keeps_what_it_reads_and_writes(device, ops) -> None:
    block = Block(ops)
    block.x.copy_(inputs(block)[0])
    block.run()
    expected, out = block.out.clone(), block.out
    graph = device.capture(block.run)
    out.fill_(7)
    del block
    gc.collect()
    taken = [torch.full((3, 64), 9.0) for _ in range(64)]
    graph.replay()
    assert torch.equal(out, expected)
    assert all(bool((one == 9).all()) for one in taken)


def test_what_another_thread_calls_meanwhile_is_not_recorded(device, ops) -> None:
    block, other = Block(ops), Block(ops)
    alike = other.plain(inputs(other)[1])

    def work() -> None:
        block.run()
        aside = Thread(target=lambda: other.plain(inputs(other)[1]))
        aside.start()
        aside.join()

    graph = device.capture(work)
    assert len(graph.calls) == 3
    other.out.fill_(7)
    graph.replay()
    assert bool((other.out == 7).all())
    other.run()
    assert torch.equal(other.out, alike)


def test_recorded_twice_with_other_contents_the_calls_are_the_same(device, ops) -> None:
    """No number that was passed came from the contents."""
    block = Block(ops)
    found = []
    for x in inputs(block, 2):
        block.x.copy_(x)
        found.append([(call.op, call.packed) for call in device.capture(block.run).calls])
    assert found[0] == found[1]
