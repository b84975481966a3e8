"""docs/write-a-plugin.md from top to bottom: every file that it shows is written, every command run in its order.

The fast form, which CI runs, puts a folder on the path where the guide installs with pip, and runs short parts of the suite.
The slow form does what the guide says, in an environment of its own.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GUIDE = Path(__file__).parents[1] / "docs" / "write-a-plugin.md"
INCOMPLETE = 3
STATUS = {'vllm-core conformance run --platform acme --level 2 -k "L2/rms_norm/*"': INCOMPLETE}
# What CI runs in place of a command of the guide: the same with less of the suite.
SHORT = {
    'vllm-core conformance run --platform acme --level 2 -k "L2/rms_norm/*"': (
        'vllm-core conformance run --platform acme --level 2 -k "L2/rms_norm/float32/*"'
    ),
    "vllm-core conformance run --platform acme --out report": (
        "vllm-core conformance run --platform acme --out report --level 0"
    ),
    "pytest ./vllm-acme/tests": "pytest ./vllm-acme/tests/test_entrypoint.py",
}
VERIFY = "vllm-core conformance verify"
REFUSED = {"DIRTY", "REFUSED"}
"""All that `verify` may hold against a report that was made, as here, in a checkout somebody works in."""

MODULES = {"vllm-core": "vllm_core.cli.main", "pytest": "pytest", "pip": "pip"}


def steps():
    """(language, text) of each block, in order; a block without language is commands, a line each."""
    text = re.sub(r"\\\n\s*", "", GUIDE.read_text("utf-8"))
    return re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands():
    return [line for language, text in steps() if not language for line in text.splitlines()]


@dataclass
class Reader:
    """Somebody who follows the guide in a folder."""

    folder: Path
    environ: dict[str, str]
    python: str = sys.executable
    short: bool = True
    done: list[str] = field(default_factory=list)

    def follow(self, language: str, text: str) -> None:
        if language == "python":
            self.write(text)
        elif not language:
            for line in text.splitlines():
                self.run(line)

    def write(self, block: str) -> None:
        """A new file; or, in one that is there, the assignments that the block shows. The first line names the file."""
        first, _, text = block.partition("\n")
        path = self.folder / "vllm-acme" / first.removeprefix("# ")
        if not path.exists():
            path.write_text(text)
            return
        there = path.read_text()
        for line in filter(None, text.splitlines()):
            if line not in there.splitlines():
                left = re.escape(line.partition(" = ")[0])
                there, count = re.subn(rf"^{left} = .*$", lambda _, line=line: line, there, flags=re.MULTILINE)
                assert count == 1, f"{path.name} has no {line.partition(' = ')[0]}"
        path.write_text(there)

    def run(self, line: str) -> None:
        self.done.append(line)
        words = shlex.split(SHORT.get(line, line) if self.short else line)
        if self.short and words[0] == "pip":
            self.install() if words[1] == "install" else self.pack()
            return
        command = [self.python, "-m", MODULES[words[0]], *words[1:]]
        result = subprocess.run(command, env=self.environ, cwd=self.folder, capture_output=True, text=True, check=False)
        dirty = (
            line.startswith(VERIFY)
            and result.returncode == 1
            and set(re.findall(r"^[A-Z]+(?=:)", result.stdout, re.M)) <= REFUSED
        )
        assert dirty or result.returncode == STATUS.get(line, 0), f"{line}\n{result.stdout}{result.stderr}"

    def install(self) -> None:
        """What an editable installation leaves behind: metadata, and a folder on the path."""
        self.metadata(self.folder / "site" / "vllm_acme-0.1.0.dist-info")
        places = [self.folder / "site", self.folder / "vllm-acme" / "src", self.environ.get("PYTHONPATH", "")]
        self.environ["PYTHONPATH"] = os.pathsep.join(map(str, filter(None, places)))

    def metadata(self, info: Path) -> None:
        project = tomllib.loads((self.folder / "vllm-acme" / "pyproject.toml").read_text())["project"]
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}"]
        lines += [
            f"Requires-Python: {project['requires-python']}",
            *(f"Requires-Dist: {one}" for one in project["dependencies"]),
        ]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        ((name, value),) = project["entry-points"]["vllm.platforms"].items()
        (info / "entry_points.txt").write_text(f"[vllm.platforms]\n{name} = {value}\n")
        (info / "RECORD").write_text("")

    def pack(self) -> None:
        """The wheel that the build backend makes of the package."""
        source = self.folder / "vllm-acme" / "src"
        self.metadata(self.folder / "wheel" / "vllm_acme-0.1.0.dist-info")
        (self.folder / "dist").mkdir()
        with zipfile.ZipFile(self.folder / "dist" / "vllm_acme-0.1.0-py3-none-any.whl", "w") as archive:
            for root in (source, self.folder / "wheel"):
                for path in sorted(root.rglob("*")):
                    if path.is_file() and "__pycache__" not in path.parts:
                        archive.write(path, path.relative_to(root))


@pytest.fixture
def environ(tmp_path):
    """This environment, with a cache of its own and the demo model; skips where that has not been fetched."""
    pytest.importorskip("torch")
    from vllm_core.errors import ModelNotFoundError
    from vllm_core.loader.locate import locate

    try:
        model = locate("demo")
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return {**kept, "VLLM_CORE_CACHE": str(tmp_path / "cache"), "VLLM_CORE_DEMO_MODEL": str(model)}


@pytest.mark.model
@pytest.mark.timeout(900)
def test_the_guide_leads_from_nothing_to_a_badge(tmp_path, environ):
    reader = Reader(tmp_path, environ)
    for language, text in steps():
        reader.follow(language, text)
    assert reader.done == commands()
    assert "<svg" in (tmp_path / "badge.svg").read_text()


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(3600)
def test_the_guide_does_what_it_says_with_pip_and_the_whole_suite(tmp_path, environ):
    """In an environment that finds what is installed here, so that pip has only the new distribution to build."""
    venv.create(tmp_path / "venv", with_pip=True, symlinks=True)
    (folder,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    places = [place for place in sys.path if place.endswith("-packages")]
    # A line each: what a line of such a file names is not seen inside of its comprehensions.
    (folder / "here.pth").write_text("".join(f"import site; site.addsitedir({place!r})\n" for place in places))
    reader = Reader(tmp_path, environ, python=str(tmp_path / "venv" / "bin" / "python"), short=False)
    for language, text in steps():
        reader.follow(language, text)
    assert "<svg" in (tmp_path / "badge.svg").read_text()


def test_every_command_of_the_guide_can_be_run_and_every_short_form_is_of_one():
    lines = commands()
    assert {shlex.split(line)[0] for line in lines} <= set(MODULES)
    assert set(SHORT) | set(STATUS) <= set(lines)
