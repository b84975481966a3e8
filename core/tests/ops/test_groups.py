"""The end of a group: its threads end where it is left, and not after the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import os, sys
import torch
from types import SimpleNamespace
from torch import distributed
from vllm_core.errors import UnsupportedError
from vllm_core.ops import comm

store = distributed.FileStore(sys.argv[1], 1)
communicator = SimpleNamespace(handle=7, process_group=distributed.ProcessGroupGloo(store, 0, 1), closed=0)

def close():
    communicator.process_group = None
    communicator.closed += 1

communicator.close = close
comm.enter(communicator)
x = torch.ones(3, 4)
comm.all_reduce(x, 7)
comm.all_gather(torch.empty(3, 4), x, 7)
comm.reduce_scatter(torch.empty(3, 4), x, 7)
threads = len(os.listdir("/proc/self/task"))
comm.leave(communicator)
comm.leave(communicator)
try:
    comm.all_reduce(x, 7)
except UnsupportedError as error:
    print(threads - len(os.listdir("/proc/self/task")), communicator.closed, error.what)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux lists them")
def test_threads_of_a_group_end_where_it_is_left(tmp_path: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RANK, str(tmp_path / "meet")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    ended, closed, what = done.stdout.split(maxsplit=2)
    assert int(ended) >= 2, "a group has threads that work and one that listens"
    assert (int(closed), what.strip()) == (2, "Communicator has no process group")
