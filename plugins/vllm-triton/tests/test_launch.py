"""Launches whose arguments are settled: what Triton is asked, and what a device's launcher gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_triton.ops.launch import MOST_SETTLED, settled
from vllm_triton.portable import TUNING
from vllm_triton.tuning import use

SCRIPT = Path(__file__).with_name("launched.py")


@pytest.fixture(scope="module")
def launched() -> dict:
    command = [sys.executable, "-W", "ignore", str(SCRIPT)]
    environ = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_a_launch_past_triton_hands_over_what_tritons_own_does(launched):
    first, second = launched["first"], launched["second"]
    assert first["programs"] == second["programs"] == [3, 1, 1]
    assert first["values"] == second["values"]
    assert first["hash"] == second["hash"]
    assert (first["asked"], second["asked"]) == (True, False)


@pytest.mark.parametrize("other", ["dtype", "alignment", "strides"])
def test_what_a_kernel_is_compiled_for_apart_is_asked_again(launched, other):
    assert launched[other]["asked"]
    assert launched[other]["hash"] != launched["first"]["hash"]


def test_what_was_asked_once_is_found_again_after_another(launched):
    assert not launched["back"]["asked"]
    assert launched["back"]["hash"] == launched["first"]["hash"]


def test_for_hip_memory_over_two_gib_is_compiled_apart(launched):
    assert launched["sized"] == [True, True, False, True, False, False]


def test_while_a_hook_looks_at_specialisations_triton_is_asked(launched):
    assert launched["hooked"]["asked"]


def test_tensors_of_the_host_are_launched_by_triton_each_time(launched):
    assert launched["host"] == [True, True]


def test_a_question_is_asked_once_for_each_of_its_facts():
    asked = []

    @settled
    def double(number: int) -> int:
        asked.append(number)
        return 2 * number

    assert [double(1), double(1), double(2), double(1)] == [2, 2, 4, 2]
    assert asked == [1, 2]


def test_another_tuning_settles_again():
    asked = []
    use(TUNING, 1)

    @settled
    def ask(number: int) -> int:
        asked.append(number)
        return number

    ask(1)
    use(TUNING, 2)
    ask(1)
    ask(1)
    assert asked == [1, 1]


def test_answers_are_not_kept_without_end():
    asked = []

    @settled
    def ask(number: int) -> int:
        asked.append(number)
        return number

    for number in range(MOST_SETTLED + 2):
        ask(number)
    ask(0)
    assert asked.count(0) == 2
