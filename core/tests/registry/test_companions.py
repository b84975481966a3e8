"""The matrix of versions: what fits, what is refused, and what of it is no matrix."""

from __future__ import annotations

import pytest

from vllm_core.api import Companion
from vllm_core.registry.validate import check_manifest


@pytest.mark.parametrize("found", ["2.10", "2.13.0+local", "2.13.0.dev20260101", "2.10.post2"])
def test_a_version_is_judged_by_its_leading_numbers(found):
    assert Companion(name="torch", versions=">=2.10,<3").refusal(found) == ""


@pytest.mark.parametrize("found", ["2.9.1", "3.0", "6.4.43482-0f2d60242", "8.1.RC1", "unknown"])
def test_a_version_outside_is_refused_with_both(found):
    companion = Companion(name="X", versions=">=2.10,<3", architectures=("a", "b"))
    assert companion.refusal(found) == f"found X {found}, expected X >=2.10,<3 for a, b"


@pytest.mark.parametrize(
    ("companions", "part"),
    [
        ([], "companions"),
        (("torch>=2.10",), "companions"),
        ((Companion(name="torch", versions=">=two"),), "'torch'"),
        ((Companion(name="torch", versions=">=2", architectures=("gfx9",)),), "'gfx9'"),
    ],
)
def test_a_matrix_that_cannot_be_right_is_a_manifest_error(candidate, companions, part):
    problem = check_manifest(candidate(companions=companions, architectures=("gfx8",)).manifest, "fake")
    assert problem is not None
    assert problem.stage == "manifest"
    assert part in problem.cause


def test_a_matrix_for_architectures_of_the_manifest_is_accepted(candidate):
    companions = (Companion(name="torch", versions=">=2", architectures=("gfx8",)),)
    assert check_manifest(candidate(companions=companions, architectures=("gfx8",)).manifest, "fake") is None
