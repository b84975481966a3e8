"""What README and docs show works: their code runs, their commands exist, their links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*/README.md"))]
PAGES += sorted(ROOT.glob("plugins/*/README.md"))
CHECK = """
import torch, sys
from vllm_conformance import opcheck
from vllm_core.registry.discover import find
from vllm_core.registry.load import Loaded, load
found, = [one for one in find() if one.entry_point == "example"]
loaded = load(found)
assert isinstance(loaded, Loaded), loaded
candidate = opcheck.candidate_of("example")
device = loaded.create_device(candidate.devices[0])
assert device.allocate("kv", (3, 5), torch.float32).sum() == 0
assert device.statistics().own_bytes["kv"] == 60
assert device.release("kv") == 60
rows = list(opcheck.check_platform(candidate, seeds=(0,)))
assert opcheck.passed(rows), opcheck.table(rows)
print("ran", len(rows))
"""


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def example(tmp_path):
    """The plugin of the guide, laid out as pip would install it; returns an environment that finds it."""
    guide = ROOT / "docs" / "writing-a-plugin.md"
    for block in blocks(guide, "python"):
        path = tmp_path / block.splitlines()[0].removeprefix("# ")
        path.parent.mkdir(exist_ok=True)
        path.write_text(block)
    (project,) = blocks(guide, "toml")
    name, value = re.search(r'"vllm.platforms"\]\n(\w+) = "(\w+)"', project).groups()
    info = tmp_path / "vllm_example-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-example\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[vllm.platforms]\n{name} = {value}\n")
    return {**os.environ, "PYTHONPATH": str(tmp_path), "VLLM_CORE_CACHE": str(tmp_path / "cache")}


def run(environment, *command):
    result = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False, timeout=250
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_plugin_of_the_guide_is_loaded_opened_and_checked(example):
    pytest.importorskip("torch")
    assert "ran " in run(example, "-c", CHECK)


def test_the_plugin_of_the_guide_is_checked_by_the_command(example):
    main = "import sys; from vllm_core.cli.main import main; sys.exit(main(sys.argv[1:]))"
    assert "example" in run(example, "-c", main, "plugin", "check", "example")


@pytest.mark.model
def test_the_python_of_the_readme_runs(capsys):
    pytest.importorskip("torch")
    from vllm_core.errors import ModelNotFoundError
    from vllm_core.loader.locate import locate

    try:
        locate("demo")
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    (code,) = blocks(ROOT / "README.md", "python")
    assert len([line for line in code.splitlines() if line]) == 6
    exec(compile(code, "README.md", "exec"), {})
    assert "Paris" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_are_shown_exist(page):
    from vllm_core.cli.main import COMMANDS

    text = page.read_text()
    shown = set(re.findall(r"vllm-core ([a-z]+)", "\n".join(re.findall(r"```\n.*?```|`[^`\n]+`", text, re.DOTALL))))
    assert shown - set(COMMANDS) == set()
    assert [path for path in re.findall(r"python3? ((?:tools/)?\w+\.py)", text) if not (ROOT / path).is_file()] == []


def test_every_session_of_nox_is_explained_and_listed_for_contributors():
    text = (ROOT / "noxfile.py").read_text()
    sessions = re.findall(r'@nox\.session\ndef (\w+)\(session: nox\.Session\) -> None:\n    """(.+)"""', text)
    assert " ".join(name for name, _ in sessions) == "lint types tests conformance kernels wheels docs bench full"
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    assert [name for name, _ in sessions if f"| `{name}` |" not in guide] == []
