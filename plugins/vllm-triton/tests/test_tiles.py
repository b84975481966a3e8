"""Which of a family's tiles a step of attention gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vllm_triton import tuning
from vllm_triton.ops.attention import EXACT, decode_of, extend_of
from vllm_triton.portable import TUNING
from vllm_triton.tuning import Codes, Decode, Extend

CODES = Codes(
    extend=Extend(32, 16, 8, 1), extend_wide=Extend(16, 16, 8, 1), decode=Decode(32, 8, 1, 4), decode_wide=Decode(16, 8, 1, 4)
)
HALVES = torch.zeros(1, dtype=torch.float16)


@pytest.fixture(autouse=True)
def family(monkeypatch):
    monkeypatch.setattr(tuning, "_active", [replace(TUNING, codes=CODES)])


@pytest.mark.parametrize(
    ("size", "codes", "extend", "decode"),
    [
        (128, False, TUNING.extend, TUNING.decode),
        (160, False, TUNING.extend_wide, TUNING.decode),
        (128, True, CODES.extend, CODES.decode),
        (160, True, CODES.extend_wide, CODES.decode_wide),
    ],
)
def test_a_cache_of_codes_has_tiles_of_its_own_and_so_have_wide_heads(size, codes, extend, decode):
    assert extend_of(size, HALVES, codes=codes) == extend
    assert decode_of(size, codes=codes) == decode


def test_a_family_without_such_tiles_takes_those_for_numbers(monkeypatch):
    monkeypatch.setattr(tuning, "_active", [TUNING])
    assert extend_of(128, HALVES, codes=True) == TUNING.extend
    assert decode_of(256, codes=True) == TUNING.decode


@pytest.mark.parametrize("codes", [False, True])
def test_queries_in_float32_have_the_tiles_of_the_scalar_units(codes):
    assert extend_of(128, HALVES.float(), codes=codes) == EXACT
