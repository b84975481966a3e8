"""Parsers by name, those of other distributions included."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from vllm_core.errors import ConfigError
from vllm_core.serve.features import make_features
from vllm_core.serve.reasoning.registry import reasoning_parser
from vllm_core.serve.tools.registry import tool_parser


def test_names_of_model_families_lead_to_their_format() -> None:
    assert tool_parser("qwen3") is tool_parser("hermes")
    assert tool_parser("llama4_json") is tool_parser("llama3_json")


def test_unknown_parsers_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="hermes"):
        tool_parser("hermess")
    with pytest.raises(ConfigError, match="qwen3"):
        reasoning_parser("qwen33")


@pytest.mark.parametrize(
    ("group", "find", "value"),
    [
        (
            "vllm_core.tool_parsers",
            tool_parser,
            "from vllm_core.serve.tools.registry import ToolParser as P\nit = P('mine', list)",
        ),
        (
            "vllm_core.reasoning_parsers",
            reasoning_parser,
            "from vllm_core.serve.reasoning.registry import ReasoningParser as P\nit = P('mine', list, '!')",
        ),
    ],
)
def test_another_distribution_may_bring_a_parser(
    group: str, find: Any, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"parsers_{group.rpartition('.')[2]}"
    (tmp_path / f"{module}.py").write_text(value, encoding="utf-8")
    info = tmp_path / "brings-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brings\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[{group}]\nmine = {module}:it\nwrong = {module}:P\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert find("mine").name == "mine"
    with pytest.raises(ConfigError, match="another kind"):
        find("wrong")


@pytest.mark.parametrize(
    ("options", "on"),
    [
        ({"enable_auto_tool_choice": True}, "--enable-auto-tool-choice"),
        ({"tool_call_parser": "none"}, "--tool-call-parser"),
        ({"reasoning_parser_name": "none"}, "--reasoning-parser"),
        ({"structured_outputs_config": {"backend": "other"}}, "--structured-outputs-config backend"),
        ({"structured_outputs_config": {"bakend": "auto"}}, "--structured-outputs-config bakend"),
        ({"structured_outputs_config": {"disable_any_whitespace": 1}}, "--structured-outputs-config disable_any_whitespace"),
    ],
)
def test_features_that_cannot_be_had_are_refused_at_the_start(options: dict[str, Any], on: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_features(**options)
    assert caught.value.on == on
