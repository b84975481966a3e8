"""Which way copies between two GPUs go, and memory that peers map."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from vllm_cuda import peer
from vllm_cuda.driver import DriverError


@pytest.fixture(autouse=True)
def unknown_pairs():
    peer.why_not_direct.cache_clear()
    yield
    peer.why_not_direct.cache_clear()


def test_a_gpu_reaches_itself():
    assert peer.why_not_direct(torch.device("cuda:0"), torch.device("cuda:0")) == ""


def test_no_access_is_a_reason_and_is_asked_for_once(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: asked.append(pair) or False)
    for _ in range(2):
        reason = peer.why_not_direct(torch.device("cuda:0"), torch.device("cuda:1"))
        assert "no access between cuda:0 and cuda:1" in reason
    assert asked == [(torch.device("cuda:1"), torch.device("cuda:0"))]


def test_bytes_that_arrive_changed_are_counted():
    sent = torch.arange(256, dtype=torch.uint8)
    assert peer.changed(sent, torch.cat((sent[:1] + 1, sent[1:]))) == 1
    assert peer.changed(sent, sent.clone()) == 0


class FakeDriver:
    """Memory without a GPU: addresses and handles count up, and the call named ``fails`` does."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.allocated: set[int] = set()
        self.mapped: set[int] = set()

    def call(self, name: str, *arguments: Any) -> None:
        if name == self.fails:
            raise DriverError(f"{name}: CUDA_ERROR_OUT_OF_MEMORY (2)")
        if name == "cuMemAlloc_v2":
            arguments[0]._obj.value = 4096
            self.allocated.add(4096)
        elif name == "cuMemFree_v2":
            self.allocated.remove(arguments[0].value)
        elif name == "cuIpcGetMemHandle":
            arguments[0]._obj.reserved = b"handle"
        elif name == "cuIpcOpenMemHandle_v2":
            arguments[0]._obj.value = 8192 + len(self.mapped)
            self.mapped.add(8192 + len(self.mapped))
        elif name == "cuIpcCloseMemHandle":
            self.mapped.remove(arguments[0].value)


@pytest.fixture
def on_two_ranks(monkeypatch):
    """What `peer._bases` gives or raises on each of two ranks, whose drivers are these."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)

    def run(*drivers: FakeDriver) -> list[Any]:
        sent: dict[int, bytes] = {}
        all_sent, found = threading.Barrier(2, timeout=30), [None, None]

        def rank(number: int) -> None:
            def exchange(mine: bytes) -> list[bytes]:
                sent[number] = mine
                all_sent.wait()
                return [sent[0], sent[1]]

            driver: Any = drivers[number]
            try:
                found[number] = peer._bases(driver, number, peer._offered(driver, 64), exchange)
            except (DriverError, threading.BrokenBarrierError) as error:
                found[number] = error

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    return run


def test_each_rank_has_its_own_memory_and_the_others_in_their_order(on_two_ranks):
    assert on_two_ranks(FakeDriver(), FakeDriver()) == [[4096, 8192], [8192, 4096]]


@pytest.mark.parametrize("fails", ["cuMemAlloc_v2", "cuMemsetD32_v2", "cuIpcGetMemHandle"])
def test_a_rank_without_memory_keeps_no_other_waiting_and_none_keeps_any(on_two_ranks, fails):
    drivers = FakeDriver(), FakeDriver(fails)
    first, second = on_two_ranks(*drivers)
    assert str(first) == "rank 1 has no memory for mailboxes"
    assert fails in str(second)
    assert not any(driver.allocated | driver.mapped for driver in drivers)


def test_memory_that_others_may_have_mapped_stays_where_theirs_cannot_be(on_two_ranks):
    drivers = FakeDriver(), FakeDriver("cuIpcOpenMemHandle_v2")
    first, second = on_two_ranks(*drivers)
    assert first == [4096, 8192]
    assert "cuIpcOpenMemHandle_v2" in str(second)
    assert drivers[1].allocated == {4096}
