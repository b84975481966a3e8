from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_core.api import QuantStack, UnsupportedError
from vllm_triton import portable, tuning

SCRIPT = Path(__file__).with_name("experts.py")
LIMIT_S = 600
SOON = (
    "routing",
    "no token",
    "one token",
    "few tokens, many experts",
    "experts without a row",
    "an expert twice",
    "more pairs than a program puts in order",
    "float32",
    "int8_channel",
    "int4_group",
)


def test_experts_are_chosen_multiplied_and_summed_as_the_references_do():
    check(*SOON)


@pytest.mark.slow
def test_experts_are_multiplied_so_in_every_case():
    check()


def check(*cases: str) -> None:
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *cases]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.fullmatch(r"[1-9]\d* cases, 0 differences\n", done.stdout), done.stdout


@pytest.mark.parametrize(
    ("tokens", "count", "top", "alone"), [(1, 8, 2, True), (2, 8, 2, False), (4, 128, 8, True), (5, 128, 8, False)]
)
def test_pairs_are_multiplied_one_by_one_while_hardly_two_share_an_expert(tokens, count, top, alone, monkeypatch):
    from vllm_triton.ops import experts

    monkeypatch.setattr(tuning, "_active", [portable.TUNING])
    packed = experts.moe_pack(torch.zeros(count * 64, 64), torch.zeros(count * 64, 32), count, ())
    assert experts._alone(packed, tokens, top) is alone


@pytest.mark.parametrize(("pairs", "count"), [(1, 1), (8, 8), (513, 1), (4160, 512), (65536, 128), (3000, 700)])
def test_the_order_of_pairs_fits_into_the_scratch_that_the_op_is_given(pairs, count):
    from vllm_triton.ops.experts import arrangement_of

    how = arrangement_of(pairs, count)
    assert how.chunk * how.chunks >= pairs
    assert pairs <= how.starts < how.starts + count < how.end <= 4 * (pairs + count)
    assert how.chunks == 1 or how.starts + count < how.counts == how.end - how.chunks * count


def test_a_stack_of_formats_is_refused():
    from vllm_triton.ops.experts import moe_pack

    weight = torch.zeros(4, 4)
    with pytest.raises(UnsupportedError, match="Stack"):
        moe_pack(QuantStack((weight, weight)), weight, 1, ())


def test_no_more_is_read_than_the_matrices_of_experts_that_somebody_can_have_chosen():
    from vllm_triton.offline import Launch, Shape
    from vllm_triton.roofline import judge

    matrix = 768 * 2048 * 2
    weight = Shape((128 * 2048, 768), 2)
    fixed = {"weight": weight, "N": 2048, "K": 768, "TOP": 8, "E": 128, "BLOCK_N": 64, "BLOCK_K": 1024, "BLOCK_M": 16}
    few = Launch("one_token", "", 512, {**fixed, "experts": Shape((1, 8), 4)})
    judged = judge(few, 1, 1)
    assert judged is not None
    assert judged[0].num_bytes == 8 * matrix
    read = []
    for tokens in (1, 16, 4096):
        values = {**fixed, "order": Shape((tokens * 8,), 4), "GATHER": False, "UNIT": 64, "STAGES": 2}
        judged = judge(Launch("grouped", "", 512, values), 1, tokens)
        assert judged is not None
        work, tiling = judged
        assert tiling.issued >= work.operations
        read.append((work.num_bytes - tokens * 8 * (768 + 2048) * 2) / matrix)
    assert [round(one) for one in read] == [8, 82, 128]
