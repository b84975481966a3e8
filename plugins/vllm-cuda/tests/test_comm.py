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
    lone.mailboxes, lone.without_mailboxes = None, "cuIpcOpenMemHandle_v2: CUDA_ERROR_NOT_SUPPORTED (801)"
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


@pytest.fixture
def make_boxes():
    def make(world_size: int = 2) -> reduce.Mailboxes:
        bases, stop = torch.zeros(world_size, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
        return reduce.Mailboxes(rank=0, world_size=world_size, bases=bases, stop=stop)

    return make


def test_two_ranks_sum_through_mailboxes_whatever_the_size(make_boxes):
    half = torch.bfloat16
    assert make_boxes().sums(torch.zeros(1, 4096, dtype=half))
    assert make_boxes().sums(torch.zeros(4096, 4096, dtype=half))
    assert not make_boxes().sums(torch.zeros(2, reduce.LANE_BYTES // 2 + 2, dtype=half)), "a row is longer than its mailbox"
    assert not make_boxes().sums(torch.zeros(8, 512, dtype=half)[::4]), "rows lie apart"
    assert not make_boxes().sums(torch.zeros(1, 7, dtype=half)), "rows travel as words of four bytes"


def test_more_ranks_sum_only_what_is_small_through_mailboxes(make_boxes):
    rows = reduce.SMALL_BYTES // 2048
    assert make_boxes(4).sums(torch.zeros(rows, 1024, dtype=torch.bfloat16))
    assert not make_boxes(4).sums(torch.zeros(rows + 1, 1024, dtype=torch.bfloat16))


def test_logits_are_gathered_through_mailboxes(make_boxes):
    out, part = torch.zeros(3, 149), torch.zeros(3, 75)
    assert make_boxes().gathers(out, part)
    assert not make_boxes().gathers(out.bfloat16(), part.bfloat16()), "their words hold two elements"
    assert not make_boxes().gathers(out, torch.zeros(3, 150)[:, ::2])


def test_an_empty_mailbox_holds_a_word_that_means_zero():
    words = torch.full((1,), reduce.EMPTY, dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float16):
        values = words.view(dtype)
        assert torch.equal(values, torch.zeros_like(values))
    assert abs(words.view(torch.float32).item()) < torch.finfo(torch.float32).tiny
