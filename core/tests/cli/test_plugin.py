"""`vllm-core plugin new | check | diff-api`, as a person runs them."""

from __future__ import annotations

import json

import pytest

from vllm_core.cli.main import main


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a command in an empty folder; returns (exit status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_CORE_CACHE", str(tmp_path / "cache"))

    def call(*words):
        status = main(["plugin", *words])
        return (status, *capsys.readouterr())

    return call


def test_new_writes_a_distribution_and_says_what_comes_next(run, tmp_path):
    status, text, _ = run("new", "acme", "--dir", "here")
    assert status == 0
    assert "vllm-acme/src/vllm_acme/plugin.py" in text.splitlines()
    assert "pip install -e here/vllm-acme" in text
    assert (tmp_path / "here/vllm-acme/tests/test_conformance.py").is_file()


def test_new_refuses_a_name_of_ours_with_four_parts(run):
    status, _, text = run("new", "cpu")
    assert status == 2
    assert all(part in text for part in ("Name cannot be used", "found:", "expected:", "fix:"))


def test_check_of_what_new_wrote_passes_and_lists_what_is_left(run):
    run("new", "acme")
    status, text, _ = run("check", "vllm-acme")
    assert status == 0
    assert text.splitlines()[-1] == "vllm-acme 0.1.0: PASS, 0 failed"
    assert "left to references" in text
    assert "to do: replace what is marked" in text


def test_check_of_a_fault_exits_with_1_and_prints_four_parts(run, tmp_path):
    run("new", "acme")
    (tmp_path / "vllm-acme/src/vllm_acme/more.py").write_text("import vllm_core.engine\n")
    status, text, _ = run("check", "vllm-acme")
    assert status == 1
    first = text.splitlines()[1]
    assert first == "  failed  imports: vllm_acme/more.py:1"
    assert text.splitlines()[-1] == "vllm-acme 0.1.0: FAIL, 1 failed"


def test_check_as_json_is_the_findings(run):
    run("new", "acme")
    status, text, _ = run("check", "vllm-acme", "--json")
    (checked,) = json.loads(text)
    assert status == 0
    assert {one["outcome"] for one in checked["findings"]} == {"ok", "skipped"}


def test_check_of_nothing_is_an_error(run):
    status, _, text = run("check", "./nowhere/at/all")
    assert status == 2
    assert "plugin new NAME" in text


def test_diff_of_a_version_with_itself_is_empty(run):
    status, text, _ = run("diff-api", "0.1", "0.1", "--json")
    assert (status, json.loads(text)) == (0, [])


def test_diff_of_an_unknown_version_names_the_known(run):
    status, _, text = run("diff-api", "0.1", "8.8")
    assert status == 2
    assert "one of 0.1, 0.2, current, or a path" in text
