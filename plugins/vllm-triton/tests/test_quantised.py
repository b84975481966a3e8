from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_core.api import FORMATS, QuantStack, QuantTensor, UnsupportedError
from vllm_triton.offers import LINEAR_FORMATS

SCRIPT = Path(__file__).with_name("quantised.py")
LIMIT_S = 600
FEW = ("int4_group/128", "int8_channel", "fp8_block128", "q4_0")
MORE = ("int4_group/64", "int4_group/32", "int4_group/256", "fp8_tensor", "fp8_channel", "q8_0")


def test_products_with_quantised_weights_are_those_with_the_decoded_ones():
    check(FEW)


@pytest.mark.slow
def test_products_with_every_format_are_those_with_the_decoded_weight():
    check(MORE)


def check(formats: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *formats],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.fullmatch(r"[1-9]\d* cases, 0 differences\n", done.stdout), done.stdout


def test_formats_offered_are_those_that_packing_takes():
    from vllm_triton.ops import quant

    assert set(quant._FORMS) | {"plain"} == LINEAR_FORMATS
    assert LINEAR_FORMATS - {"plain"} <= set(FORMATS)


def test_a_format_without_a_kernel_is_refused_by_name():
    from vllm_triton.ops.linear import linear_pack

    with pytest.raises(UnsupportedError, match="q6_k"):
        linear_pack(QuantTensor("q6_k", (1, 256), torch.zeros(1, 210, dtype=torch.uint8)), None, ())
    with pytest.raises(UnsupportedError, match="Stack"):
        linear_pack(QuantStack((torch.zeros(1, 4), torch.zeros(1, 4))), None, ())


def test_groups_too_small_for_a_step_are_refused():
    from vllm_triton.ops.linear import linear_pack

    scale, zero = torch.ones(2, 4), torch.zeros(2, 4, dtype=torch.uint8)
    weight = QuantTensor("int4_group", (2, 64), torch.zeros(2, 32, dtype=torch.uint8), scale, zero)
    with pytest.raises(UnsupportedError, match="groups of 16"):
        linear_pack(weight, None, ())
