"""The support matrix says what the manifests say, and keeps the levels that were measured."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm_cpu")

from tools import matrix
from vllm_core.api import CAPABILITIES
from vllm_core.errors import ConfigError

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_readme_has_the_claims_of_the_installed_manifests():
    platforms = matrix.manifests()
    assert "vllm-cpu" in dict(platforms)
    assert matrix.replaced(README, matrix.claimed(platforms, matrix.levels_in(README))) == README


def test_each_capability_has_a_row():
    table = matrix.claimed(matrix.manifests(), {})
    assert [name for name in CAPABILITIES if f"| `{name}`:" not in table] == []


def test_measured_levels_stay_when_claims_are_written_again():
    platforms = [one for one in matrix.manifests() if one[0] == "vllm-cpu"]
    column = f"vllm-cpu ({platforms[0][1].support_level})"
    readme = matrix.replaced(README, matrix.claimed(platforms, {column: "L4"}))
    assert matrix.levels_in(readme) == {column: "L4"}
    assert "| conformance | L4 |" in matrix.claimed(platforms, matrix.levels_in(readme))


def test_a_platform_that_was_not_measured_says_so():
    assert f"| conformance | {matrix.UNKNOWN} |" in matrix.claimed(matrix.manifests()[:1], {})


def test_a_readme_without_marks_is_an_error():
    with pytest.raises(ConfigError, match="No place for the support matrix"):
        matrix.replaced("# readme", "table")
