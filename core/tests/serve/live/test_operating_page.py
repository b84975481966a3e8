"""docs/operating.md: its commands run against a server, and its flags, paths and metrics are there."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

FILE = Path(__file__).parents[4] / "docs" / "operating.md"
pytestmark = pytest.mark.skipif(not FILE.exists(), reason="the page is in the repository, not in the distribution")


@pytest.fixture(scope="module")
def text() -> str:
    return FILE.read_text()


def commands(text: str) -> list[str]:
    return [line for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()]


def test_the_commands_run(served: Any, text: str, tmp_path: Path) -> None:
    program = tmp_path / "vllm-core"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m vllm_core.cli.main "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for line in commands(text):
        if "serve demo" in line or "doctor" in line or "chat" in line or (line.startswith("curl") and not shutil.which("curl")):
            continue  # the fixture has started one; doctor has tests of its own; the null model has no chat template
        line = line.replace("127.0.0.1:8000", f"127.0.0.1:{served.port}")
        done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False, timeout=120, env=environment)
        assert done.returncode == 0, (line, done.stderr)
        assert done.stdout, line


def test_every_flag_exists_and_those_of_the_server_are_all_explained(text: str) -> None:
    from vllm_core.cli import serve
    from vllm_core.cli.main import Parser

    parser = Parser()
    serve.add_parser(parser.add_subparsers())
    actions = next(one for one in parser._actions if isinstance(one, argparse._SubParsersAction)).choices["serve"]._actions
    known = {option for action in actions for option in action.option_strings}
    tables = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    shown = set(re.findall(r"`(--[\w-]+)", tables))
    assert shown - known == set()
    limits = {
        f"--{name}" for name in re.findall(r'"--([\w-]+-timeout-s|max-[\w-]+|h11[\w-]+)"', Path(serve.__file__).read_text())
    }
    assert limits - shown - {"--max-log-len"} == set()


def test_every_metric_and_path_is_served(served: Any, text: str) -> None:
    body = {"prompt": [1, 2], "max_tokens": 3}
    httpx.post(f"{served.url}/v1/completions", json=body, trust_env=False, timeout=60).raise_for_status()
    found = served.metrics()
    for name in set(re.findall(r"`(vllm:\w+)`", text)):
        assert name in found or f"{name}_count" in found, name
    for path in (
        "/health/live",
        "/health/ready",
        "/health",
        "/ping",
        "/plan",
        "/is_sleeping",
        "/metrics",
        "/",
        "/openapi.json",
    ):
        assert f"`{path}`" in text
        assert httpx.get(served.url + path, trust_env=False, timeout=60).status_code == 200, path
