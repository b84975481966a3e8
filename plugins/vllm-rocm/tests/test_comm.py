"""The communicator over another of torch's backends, whose groups have the same interface: two ranks in two threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import distributed

from vllm_core.api import UnsupportedError
from vllm_rocm.device import RCCL
from vllm_triton.group import GroupCommunicator

HOST = "ProcessGroupGloo"


def test_ranks_that_joined_sum_over_their_group(tmp_path):
    def member(rank: int) -> list[float]:
        communicator = GroupCommunicator(HOST, rank, 2, f"file://{tmp_path}/meeting")
        x = torch.full((3,), float(rank + 1))
        communicator.process_group.allreduce([x]).wait()
        assert communicator.handle
        return x.tolist()

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(member, range(2))) == [[3.0] * 3] * 2


def test_closing_twice_does_nothing(tmp_path):
    communicator = GroupCommunicator(HOST, 0, 1, f"file://{tmp_path}/meeting")
    communicator.close()
    communicator.close()
    assert communicator.process_group is None


@pytest.mark.skipif(hasattr(distributed, RCCL), reason="this torch has the collectives")
def test_a_torch_without_the_collectives_is_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedError, match=RCCL):
        GroupCommunicator(RCCL, 0, 1, f"file://{tmp_path}/meeting")
