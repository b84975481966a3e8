"""Right ops pass, wrong ones fail, raising ones are rows, and what an offer refuses is not run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vllm_conformance import opcheck
from vllm_conformance.__main__ import main
from vllm_core.api import Offer, UnsupportedError
from vllm_core.errors import UnknownPlatformError


@pytest.fixture
def rows_of(monkeypatch, request):
    """Run ops of `wrong_kernels` under the given offer."""
    monkeypatch.syspath_prepend(request.path.parent)

    def run(*ops, seeds=(0, 1, 2), **conditions):
        entries = {op: f"wrong_kernels:{op}" for op in ops}
        return list(opcheck.check_offer(Offer(provider="wrong", ops=entries, **conditions), "any", seeds))

    return run


def outcomes(rows):
    return {row.outcome for row in rows}


def test_a_right_op_passes_in_every_dtype(rows_of):
    rows = rows_of("add")
    assert outcomes(rows) == {"PASS"}
    assert {row.case.dtype for row in rows} == {"float32", "bfloat16", "float16"}
    assert opcheck.passed(rows)


def test_an_op_off_by_more_than_the_tolerance_fails_and_says_where(rows_of):
    rows = [row for row in rows_of("rms_norm") if row.case.shape_class != "empty"]
    assert outcomes(rows) == {"FAIL"}
    assert "expected" in rows[0].detail
    assert not opcheck.passed(rows)


def test_an_op_that_writes_nothing_fails(rows_of):
    assert "FAIL" in outcomes(rows_of("layer_norm"))


def test_an_op_that_changes_an_input_fails(rows_of):
    assert "FAIL" in outcomes(rows_of("gather_rows"))


def test_an_op_that_raises_is_a_row_and_the_others_run(rows_of):
    rows = rows_of("activation", "add")
    assert {row.outcome for row in rows if row.case.op == "activation"} == {"CRASH"}
    assert {row.outcome for row in rows if row.case.op == "add"} == {"PASS"}
    assert "IndexError: kernel table has no entry" in rows[0].detail
    assert not opcheck.passed(rows)


def test_a_feature_that_is_not_offered_is_refused_and_not_run(rows_of):
    rows = rows_of("rotary_embedding")
    assert {row.case.seed for row in rows if row.outcome == "REFUSED"} == {2}
    assert {row.case.seed for row in rows if row.outcome == "PASS"} == {0, 1}
    assert opcheck.passed(rows)


def test_a_feature_that_is_offered_and_missing_is_found(rows_of):
    rows = rows_of("rotary_embedding", features=frozenset({"interleaved"}))
    assert {row.case.seed for row in rows if row.outcome == "CRASH"} == {2}


def test_dtypes_that_are_not_offered_are_not_run(rows_of):
    assert {row.case.dtype for row in rows_of("add", dtypes=frozenset({"bfloat16"}))} == {"bfloat16"}


def test_an_op_that_never_ran_does_not_pass(rows_of):
    rows = rows_of("add", architectures=frozenset({"another"}))
    assert outcomes(rows) == {"REFUSED"}
    assert not opcheck.passed(rows)


def test_nothing_at_all_does_not_pass():
    assert not opcheck.passed([])


def test_the_table_counts_by_op_and_lists_what_failed(rows_of):
    text = opcheck.table(rows_of("add", "activation"), most_details=2)
    lines = text.splitlines()
    assert lines[1].split()[:3] == ["wrong", "add", str(len(rows_of("add")))]
    assert lines[3].startswith("CRASH wrong activation float32")
    assert lines[-1].startswith("... and ")


def test_an_unknown_platform_is_named_with_what_is_installed(capsys):
    with pytest.raises(UnknownPlatformError, match="nowhere"):
        opcheck.candidate_of("nowhere")
    assert main(["ops", "--platform", "nowhere"]) == 2
    assert "fix:" in capsys.readouterr().err


def test_a_platform_whose_device_is_elsewhere_is_refused(monkeypatch):
    pytest.importorskip("vllm_cpu")
    from dataclasses import replace

    candidate = opcheck.candidate_of("cpu")
    away = replace(candidate, manifest=replace(candidate.manifest, device_class="accelerator"))
    monkeypatch.setattr(opcheck, "collect", lambda **options: ([away], []))
    with pytest.raises(UnsupportedError, match="accelerator"):
        opcheck.candidate_of("cpu")


def command(*arguments):
    line = [sys.executable, "-m", "vllm_conformance", *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=280)


def test_the_installed_cpu_platform_holds_on_the_command_line():
    pytest.importorskip("vllm_cpu")
    result = command("ops", "--platform", "cpu", "--seeds", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ops of cpu: PASS" in result.stdout


def test_the_installed_cpu_platform_patches_nothing():
    pytest.importorskip("vllm_cpu")
    result = command("patches", "--platform", "cpu")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout == "patches by cpu: 0\n"


def test_looking_for_patches_after_the_plugin_was_loaded_is_refused():
    pytest.importorskip("vllm_cpu.plugin")
    from vllm_conformance.usage import changes_by

    with pytest.raises(UnknownPlatformError, match="Too late"):
        changes_by("cpu")
