"""The support matrix says what the manifests say."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm_cpu")

from tools import matrix
from vllm_core.api import CAPABILITIES, Full, NotImplementedYet, Partial, Unsupported, Versioned

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_readme_has_the_matrix_of_the_installed_manifests():
    platforms = matrix.manifests()
    assert "vllm-cpu" in dict(platforms)
    assert matrix.replaced(README, matrix.matrix(platforms)) == README


def test_each_capability_has_a_row():
    table = matrix.matrix(matrix.manifests())
    assert [f"`{name}`" for name in CAPABILITIES if f"| `{name}`:" not in table] == []


@pytest.mark.parametrize(
    ("support", "text"),
    [
        (Full(), "yes"),
        (Versioned("driver>=550"), "since driver>=550"),
        (Partial("slow", ("float32", "bfloat16")), "partly: float32, bfloat16"),
        (NotImplementedYet("#1"), "not yet"),
        (Unsupported("never"), "no"),
    ],
)
def test_each_claim_has_its_word(support, text):
    assert matrix.cell(support) == text


def test_a_readme_without_marks_is_an_error():
    with pytest.raises(ValueError, match="lacks"):
        matrix.replaced("# readme", "table")
