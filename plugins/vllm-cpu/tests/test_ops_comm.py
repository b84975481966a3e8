"""Collectives between two ranks: values, bits, odd widths, and what happens when the other one has gone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vllm_core.api import DeviceFacts
from vllm_cpu import platform
from vllm_cpu.device import CpuDevice
from vllm_cpu.ops import comm

FACTS = DeviceFacts(
    id="0",
    name="CPU",
    device_type="cpu",
    architecture="x",
    memory_kind="host",
    memory_bytes=1 << 28,
    properties={"cores": "4"},
    max_workers=2,
)


@pytest.fixture
def both(tmp_path):
    """Runs a function of (rank, handle) on two ranks at once, each on a thread of its own."""
    with ThreadPoolExecutor(2) as pool:
        join = [pool.submit(CpuDevice(FACTS).communicator, rank, 2, f"file://{tmp_path}/meet") for rank in range(2)]
        members = [future.result() for future in join]
        assert [(one.rank, one.world_size) for one in members] == [(0, 2), (1, 2)]
        assert 0 not in {one.handle for one in members}
        yield lambda work: list(pool.map(lambda one: work(one.rank, one.handle), members))
        for one in members:
            one.close()
            one.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_have_the_same_bits_on_every_rank(both, dtype) -> None:
    inputs = [torch.randn(7, 33, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(2)]

    def work(rank: int, handle: int) -> torch.Tensor:
        x = inputs[rank].clone()
        comm.all_reduce(x, handle)
        return x

    first, second = both(work)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, inputs[0] + inputs[1])


@pytest.mark.parametrize("width", [8, 7, 5])
def test_what_is_gathered_ends_where_the_output_does(both, width) -> None:
    """A vocabulary that two ranks cannot share equally."""

    def work(rank: int, handle: int) -> torch.Tensor:
        out = torch.zeros(3, width)
        comm.all_gather(out, torch.arange(12.0).view(3, 4) + 100 * rank, handle)
        return out

    whole = torch.cat((torch.arange(12.0).view(3, 4), torch.arange(12.0).view(3, 4) + 100), dim=1)
    for out in both(work):
        assert torch.equal(out, whole[:, :width])


def test_each_rank_gets_its_rows_of_the_sum(both) -> None:
    def work(rank: int, handle: int) -> torch.Tensor:
        out = torch.zeros(2, 3)
        comm.reduce_scatter(out, torch.arange(12.0).view(4, 3) * (rank + 1), handle)
        return out

    first, second = both(work)
    assert torch.equal(torch.cat((first, second)), torch.arange(12.0).view(4, 3) * 3)


def test_the_group_of_one_rank_is_the_identity() -> None:
    x = torch.randn(2, 3)
    out = torch.zeros(2, 3)
    comm.all_reduce(x, 0)
    for op in (comm.all_gather, comm.reduce_scatter):
        op(out.zero_(), x, 0)
        assert torch.equal(out, x)


def test_workers_divide_memory_and_cores(monkeypatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    alone, shared = (
        platform.configure({"memory_bytes": 8 << 30, "tensor_parallel_size": count}, frozenset()) for count in (1, 2)
    )
    assert shared.changes["kv_cache_memory_bytes"] * 2 == alone.changes["kv_cache_memory_bytes"]
    assert "divided by 2 workers" in shared.reasons["kv_cache_memory_bytes"]
    before = torch.get_num_threads()
    try:
        platform.start(FACTS, 2)
        assert torch.get_num_threads() == 2
        platform.start(FACTS, 16)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
