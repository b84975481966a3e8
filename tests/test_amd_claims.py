"""The page of compiled claims is that of what is offered, and nothing on it spills."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from tools.amd_claims import MISSING, PATH, claims_in, page
from vllm_rocm.backends.families import ARCHITECTURES
from vllm_rocm.machine_code import claims_of

ROW = re.compile(r"^\| (\w+[/:]\w+) \| ([\w ]+) \| (\d*) ?\|", re.MULTILINE)


def rows_of(text: str, architecture: str) -> list[tuple[str, str, str]]:
    chapter = text.partition(f"\n## {architecture}: ")[2].partition("\n## ")[0]
    return ROW.findall(chapter)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_claim_is_on_the_page_and_none_that_was_compiled_spills(architecture):
    rows = rows_of(PATH.read_text("utf-8"), architecture)
    assert [claim for claim, _, _ in rows] == claims_of(architecture)
    assert [row for row in rows if row[1] != MISSING and row[2] != "0"] == []


def test_a_spilled_register_is_on_the_page():
    line = '{"claim": "bfloat16/bfloat16", "kernels": 7, "spilled": 2, "vector_registers": 256, "lds_bytes": 2048}'
    text = page({"gfx942": claims_in(iter([line, '{"kernel": "decode"}']))})
    rows = {claim: (kernels, spilled) for claim, kernels, spilled in rows_of(text, "gfx942")}
    assert rows["bfloat16/bfloat16"] == ("7", "2")
    assert rows["bfloat16/int8"] == (MISSING, "")
    assert "1 of 24 claims compiled whole, 2 kernels" in text
