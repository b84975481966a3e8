"""Collectives of two processes, each with a device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from vllm_toy import comm, extension

RANK = """
import sys, torch
from vllm_toy import comm, probe
from vllm_toy.device import ToyDevice

rank, rendezvous = int(sys.argv[1]), sys.argv[2]
device = ToyDevice(probe.probe().devices[rank])
group = device.communicator(rank, 2, rendezvous)
x = device.adopt("workspace", torch.arange(4.0).view(2, 2) + 10 * rank)
side, rows = device.allocate("workspace", (2, 3), torch.float32), device.allocate("workspace", (1, 2), torch.float32)
comm.all_gather(side, x, group.handle)
comm.reduce_scatter(rows, x, group.handle)
graph = device.capture(lambda: comm.all_reduce(x, group.handle))
graph.replay()
print(x.cpu().tolist(), side.cpu().tolist(), rows.cpu().tolist(), sep="|")
group.close()
group.close()
"""


def test_two_processes_agree(tmp_path):
    extension.load()
    command = [sys.executable, "-c", RANK]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank), f"file://{tmp_path}/group"], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    answers = [rank.communicate(timeout=90)[0].strip().split("|") for rank in ranks]
    total, side = "[[10.0, 12.0], [14.0, 16.0]]", "[[0.0, 1.0, 10.0], [2.0, 3.0, 12.0]]"
    assert answers == [[total, side, "[[10.0, 12.0]]"], [total, side, "[[14.0, 16.0]]"]]


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_the_group_of_one_copies(device, op):
    out, x = device.allocate("workspace", (2, 2), torch.float32), device.adopt("workspace", torch.arange(4.0).view(2, 2))
    getattr(comm, op)(out, x, 0)
    comm.all_reduce(x, 0)
    assert torch.equal(out.cpu(), x.cpu())
