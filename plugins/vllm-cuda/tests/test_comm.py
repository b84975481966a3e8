"""Collectives: which provider a machine gets, and what the communicator does that needs no GPU."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vllm_core.api import Accepted, CallSite, Rejected, UnsupportedError
from vllm_cuda import comm
from vllm_cuda.backends.offers import offers
from vllm_triton.ops import reduce

SITE = CallSite(op="all_reduce", role="comm", dtype="bfloat16")


def judged(facts):
    return {one.provider: one.judge(SITE, facts.architecture) for one in offers(facts) if "all_reduce" in one.ops}


def test_peers_that_reach_each_other_sum_through_their_memory_first(make_facts):
    facts = replace(make_facts(), links={"GPU-1": "peer access"})
    assert judged(facts) == {"vllm-cuda-peer": Accepted(), "vllm-cuda-nccl": Accepted()}
    peer, nccl = (one for one in offers(facts) if "all_reduce" in one.ops)
    assert peer.priority > nccl.priority


def test_one_peer_out_of_reach_leaves_nccl_and_the_plan_says_which(make_facts):
    facts = replace(make_facts(), links={"GPU-1": "peer access", "GPU-2": "no peer access"})
    verdicts = judged(facts)
    assert verdicts["vllm-cuda-nccl"] == Accepted()
    rejected = verdicts["vllm-cuda-peer"]
    assert isinstance(rejected, Rejected)
    assert "GPU-2: no peer access" in str(rejected)


@pytest.fixture
def member():
    """A communicator without GPU: what `_exchange` needs of one."""

    def make(rank: int, world_size: int, meeting: Path) -> comm.CudaCommunicator:
        made = object.__new__(comm.CudaCommunicator)
        made.rank, made.world_size, made._meeting = rank, world_size, meeting
        return made

    return make


def test_every_rank_gets_the_bytes_of_all_in_their_order(member, tmp_path):
    results: dict[int, list[bytes]] = {}

    def meet(rank: int) -> None:
        results[rank] = member(rank, 3, tmp_path / "meet")._exchange("memory", bytes([rank] * 4))

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (2, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {rank: [b"\0\0\0\0", b"\1\1\1\1", b"\2\2\2\2"] for rank in range(3)}


def test_a_group_that_is_given_up_ends_the_wait_for_ranks_that_never_come(member, tmp_path):
    with pytest.raises(FileNotFoundError):
        member(0, 2, tmp_path / "gone" / "meet")._await(tmp_path / "gone" / "meet-nccl-1")


def test_memory_that_cannot_be_mapped_is_an_error_that_names_the_way_out(member, tmp_path):
    lone = member(1, 2, tmp_path)
    lone.mailboxes, lone.without_mailboxes = {}, "cuIpcOpenMemHandle_v2: CUDA_ERROR_NOT_SUPPORTED (801)"
    comm._groups[7] = lone
    try:
        with pytest.raises(UnsupportedError, match="CUDA_ERROR_NOT_SUPPORTED") as caught:
            comm.peer_all_reduce(torch.zeros(2, 4), 7)
    finally:
        del comm._groups[7]
    assert "--deny-provider vllm-cuda-peer" in caught.value.fix


def test_a_rank_alone_sums_nothing():
    x = torch.arange(6.0).view(2, 3)
    comm.peer_all_reduce(x, 0)
    out, scattered = torch.empty(2, 3), torch.empty(2, 3)
    comm.all_gather(out, x, 0)
    comm.reduce_scatter(scattered, x, 0)
    assert torch.equal(out, x)
    assert torch.equal(scattered, x)


def boxes(**changes):
    options = {"rank": 0, "world_size": 2, "slot_bytes": 4096, "item_bytes": 2, "stop": torch.zeros(1, dtype=torch.int32)}
    return reduce.Mailboxes(bases=torch.zeros(2, dtype=torch.int64), **(options | changes))


def test_small_sums_of_one_width_go_through_mailboxes():
    made = boxes()
    half = torch.bfloat16
    assert made.takes(torch.zeros(4, 512, dtype=half))
    assert not made.takes(torch.zeros(5, 512, dtype=half)), "does not fit a slot"
    assert not made.takes(torch.zeros(2, 256, dtype=half)), "rows of another width would lie across those that are there"
    assert not made.takes(torch.zeros(8, 512, dtype=half)[::4]), "rows lie apart"


def test_rows_of_odd_width_do_not():
    assert not boxes().takes(torch.zeros(1, 7, dtype=torch.bfloat16))


def test_an_empty_mailbox_holds_words_that_mean_minus_zero():
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)):
        words = torch.full((1,), reduce.EMPTY[size], dtype=torch.int32)
        values = words.view(dtype)
        assert torch.equal(values, torch.zeros_like(values))
        assert bool(torch.signbit(values).all())
