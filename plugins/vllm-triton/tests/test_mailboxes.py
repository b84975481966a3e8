"""Sums and gathers of two ranks through memory that both write to, in two processes of Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from vllm_triton.ops import reduce

SCRIPT = Path(__file__).with_name("mailboxes.py")
WORDS = Path(__file__).with_name("mailbox_words.py")
LIMIT_S = 300


def test_two_ranks_have_the_sums_and_gathers_of_both_whatever_comes_after_what(tmp_path, monkeypatch):
    monkeypatch.setattr(reduce, "LANES", 3)
    monkeypatch.setattr(reduce, "LANE_BYTES", 256)
    for rank in range(2):
        area = torch.full((reduce.mailbox_bytes(2) // 4,), reduce.EMPTY, dtype=torch.int32)
        (tmp_path / str(rank)).write_bytes(area.numpy().tobytes())
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, str(SCRIPT), str(rank), str(tmp_path)], env=environ, stdout=-1, stderr=-1, text=True)
        for rank in range(2)
    ]
    try:
        for one in ranks:
            out, err = one.communicate(timeout=LIMIT_S)
            assert one.returncode == 0, err[-2000:]
            assert out == "16 calls, 0 differences\n"
    finally:
        for one in ranks:
            one.kill()


def test_rows_travel_sixteen_bytes_at_a_time_and_wait_for_what_was_stored_before_them():
    """Addresses of peers come from memory, so that the compiler knows nothing of their alignment unless it is told."""
    done = subprocess.run([sys.executable, str(WORDS)], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(done.stdout.splitlines()) == ["all_gather ['.v4'] 1 True", "all_reduce ['.v4'] 1 True"]
