"""The vendors' process groups over gloo: two processes, each with a simulated device."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import vllm_simulator
from vllm_simulator import extension

LIMIT_S = 120
RANK = """
import json, sys, torch
from torch import distributed
kind, rank, meeting = KIND, int(sys.argv[1]), sys.argv[2]
owner = torch_npu._C._distributed_c10d if kind == "npu" else distributed
group_type = getattr(owner, GROUP)
options = group_type.Options()
group = group_type(distributed.FileStore(meeting, 2), rank, 2, options)
x = torch.full((3,), float(rank + 1), device=kind, dtype=torch.bfloat16)
x.add_(1)
group.allreduce([x]).wait()
parts = [torch.empty(2, device=kind) for _ in range(2)]
group.allgather([parts], [torch.full((2,), float(rank), device=kind)]).wait()
try:
    group.allreduce([torch.ones(4, 4, device=kind).t()[:, :2]])
except RuntimeError as error:
    said = str(error)
largest = distributed.AllreduceOptions()
largest.reduceOp = distributed.ReduceOp.MAX
try:
    group.allreduce([x], largest)
except RuntimeError as error:
    other = str(error)
print(json.dumps([group.rank(), group.size(), x.tolist(), [one.tolist() for one in parts], said, other]))
"""


@pytest.mark.parametrize(
    ("pose", "kind", "group"),
    [("hip", "cuda", "ProcessGroupNCCL"), ("xpu", "xpu", "ProcessGroupXCCL"), ("npu", "npu", "ProcessGroupHCCL")],
)
def test_ranks_meet_and_sum_what_was_queued_before(pose, kind, group, tmp_path):
    if extension.compiler() is None:
        pytest.skip("no C++ compiler")
    environ = vllm_simulator.environment(environ={**os.environ, "OMP_NUM_THREADS": "1"}, pose=pose, memory_mib=64)
    head = "import torch_npu\n" if pose == "npu" else ""
    code = head + f"KIND, GROUP = {kind!r}, {group!r}\n" + RANK
    command = [sys.executable, "-c", code]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meeting")], env=environ, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = [json.loads(one.communicate(timeout=LIMIT_S)[0].splitlines()[-1]) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    for rank, (own, size, total, parts, refused, other) in enumerate(said):
        assert (own, size) == (rank, 2)
        assert total == [5.0] * 3
        assert parts == [[0.0, 0.0], [1.0, 1.0]]
        assert "contiguous" in refused
        assert "not simulated" in other
