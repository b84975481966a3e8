"""What is loaded by the imports and commands that must be light, in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "pydantic", "transformers", "numpy.random", "fastapi", "tokenizers"}
REPORT = "import json, sys; print(json.dumps(sorted(sys.modules)))"


def modules_after(code):
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\n{REPORT}"], capture_output=True, text=True, check=True, timeout=120
    )
    return set(json.loads(result.stdout.splitlines()[-1]))


def plugins(modules):
    return {
        name for name in modules if name.startswith("vllm_") and name.split(".")[0] not in {"vllm_core", "vllm_conformance"}
    }


@pytest.mark.parametrize(
    "name", ["vllm_core", "vllm_core.api", "vllm_core.errors", "vllm_core.registry.plan", "vllm_core.models.spec"]
)
def test_light_imports_load_nothing_heavy(name):
    modules = modules_after(f"import {name}")
    assert modules & HEAVY == set()
    assert plugins(modules) == set()


@pytest.mark.parametrize("name", ["scheduler", "blocks", "prefix", "packing"])
def test_the_host_side_of_the_engine_loads_no_torch(name):
    assert "torch" not in modules_after(f"import vllm_core.engine.{name}")


@pytest.mark.parametrize("name", ["vllm_core.launch", "vllm_core.async_llm", "vllm_core.models.catalog"])
def test_planning_and_the_servers_own_process_load_no_torch(name):
    assert modules_after(f"import {name}") & {"torch", "transformers"} == set()


HELP = """
import contextlib, io
from vllm_core.cli.main import main
with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
    main(["--help"])
assert "generate" in text.getvalue()
"""


def test_help_loads_nothing_heavy():
    modules = modules_after(HELP)
    assert modules & HEAVY == set()
    assert plugins(modules) == set()


def test_the_package_does_not_take_the_name_of_another_project():
    modules = modules_after("import vllm_core.api")
    assert "vllm" not in modules
