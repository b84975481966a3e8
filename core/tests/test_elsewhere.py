"""What other engines have under a name that is not here: the advice names what exists, and nothing that does is listed."""

from __future__ import annotations

import argparse
import re
from importlib import import_module
from typing import Any

import pytest

from vllm_core import LLM
from vllm_core.cli import main as cli
from vllm_core.config import option_owners
from vllm_core.elsewhere import _table, instead
from vllm_core.errors import UnknownOptionError
from vllm_core.serve import schema


@pytest.fixture(scope="module")
def flags() -> set[str]:
    parser = cli.Parser(prog="vllm-core")
    subparsers = parser.add_subparsers()
    import_module(cli.COMMANDS["serve"][0]).add_parser(subparsers)
    served: argparse.ArgumentParser = subparsers.choices["serve"]
    return set(served._option_string_actions)


def test_no_option_of_ours_is_said_to_be_elsewhere(flags: set[str]) -> None:
    assert [one for one in flags if one.startswith("--") and instead("options", one)] == []
    assert [one for one in option_owners() if instead("options", one)] == []


def test_options_that_the_advice_names_exist(flags: set[str]) -> None:
    said = " ".join(text for table in _table().values() for text in table.values())
    named = set(re.findall(r"(?<![\w-])--?[a-z][\w-]+", said))
    assert named
    assert named - flags == set()


def test_fields_that_are_elsewhere_are_refused_or_unknown() -> None:
    for kind in (schema.CompletionRequest, schema.ChatRequest):
        assert [name for name in kind.model_fields if instead("fields", name)] == []


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--enable-lora", "no adapters"),
        ("--no-enable-lora", "no adapters"),
        ("--lora-modules=a=b", "no adapters"),
        ("--speculative-config", "no speculative decoding"),
        ("--pipeline-parallel-size", "--tensor-parallel-size"),
        ("-pp", "-tp"),
        ("-O3", "--graph-sizes"),
        ("--generation-config", "--override-generation-config"),
        ("--max-model-length", "did you mean '--max-model-len'?"),
    ],
)
def test_a_flag_of_another_engine_says_what_there_is_instead(flag: str, expected: str, capsys: Any) -> None:
    assert cli.main(["serve", "demo", flag]) == 2
    assert expected in capsys.readouterr().err


def test_a_checkpoints_own_quantisation_needs_no_option(capsys: Any) -> None:
    assert cli.main(["serve", "demo", "--quantization", "awq"]) == 2
    assert "says so itself" in capsys.readouterr().err


def test_an_option_of_another_engine_in_python_says_it_too() -> None:
    with pytest.raises(UnknownOptionError, match="no adapters"):
        LLM("demo", enable_lora=True)


def test_a_name_that_is_nowhere_has_no_advice() -> None:
    assert instead("options", "--xyzzy") is None
