"""What README and docs show works: their code runs, their commands exist, their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*/README.md"))]
PAGES += sorted(ROOT.glob("plugins/*/README.md"))


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


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
    shown = set(re.findall(r"vllm-core ([a-z]+(?:-[a-z]+)*)", "\n".join(re.findall(r"```\n.*?```|`[^`\n]+`", text, re.DOTALL))))
    assert shown - set(COMMANDS) == set()
    assert [path for path in re.findall(r"python3? ((?:tools/)?\w+\.py)", text) if not (ROOT / path).is_file()] == []


def test_every_session_of_nox_is_explained_and_listed_for_contributors():
    text = (ROOT / "noxfile.py").read_text()
    sessions = re.findall(r'@nox\.session\ndef (\w+)\(session: nox\.Session\) -> None:\n    """(.+)"""', text)
    listed = "lint types tests examples conformance kernels sanitize imitated neon vendors wheels docs bench full"
    assert " ".join(name for name, _ in sessions) == listed
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    assert [name for name, _ in sessions if f"| `{name}` |" not in guide] == []
