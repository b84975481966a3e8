"""The command of another distribution: delegated where it is installed, and how to get it where it is not."""

from __future__ import annotations

import pytest

from vllm_core.cli import conformance
from vllm_core.cli.main import main


@pytest.mark.parametrize("arguments", [[], ["run", "--platform", "cpu"], ["verify", "file", "--rerun", "3"], ["--help"]])
def test_without_the_suite_every_command_says_how_to_install_it(monkeypatch, capsys, arguments):
    monkeypatch.setattr(conformance, "SUITE", "vllm_conformance_that_is_not_here")
    assert main(["conformance", *arguments]) == 2
    error = capsys.readouterr().err
    assert "The conformance suite is not installed" in error
    assert "pip install ./conformance" in error


def test_with_the_suite_its_own_parser_answers(capsys):
    pytest.importorskip("vllm_conformance")
    with pytest.raises(SystemExit, match="0"):
        main(["conformance", "run", "--help"])
    assert "--subset" in capsys.readouterr().out
