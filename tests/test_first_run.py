"""Each command of docs/first-run-on-hardware.md exists, and its arguments are ones that it takes."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools import matrix
from vllm_conformance.matrix import BEGIN, END

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "first-run-on-hardware.md").read_text("utf-8")
LINES = [
    line.partition("  #")[0].strip()
    for block in re.findall(r"^ *```\n(.*?)^ *```", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]
INLINE = re.findall(r"`(vllm-core [^`]+)`", PAGE)
COMMANDS = sorted({line for line in LINES + INLINE if line.startswith("vllm-core ")})
PLATFORMS = ("rocm", "xpu", "ascend")
VENDORS = ("npu-smi", "source")
"""Programs and shell words that come with the machine."""


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_takes_the_arguments_that_are_shown(line):
    from vllm_core.cli import main

    words = shlex.split(line)[1:]
    parser = main.Parser(prog="vllm-core")
    import_module(main.COMMANDS[words[0]][0]).add_parser(parser.add_subparsers())
    parser.parse_args(words)


def test_every_platform_ends_in_a_report_to_send():
    for platform in PLATFORMS:
        assert f"vllm-core conformance run --platform {platform} --out report" in COMMANDS
        assert "vllm-core doctor --json doctor.json" in COMMANDS
    assert PAGE.count("vllm-core conformance verify report/conformance.json") == len(PLATFORMS)


def test_what_is_installed_is_in_the_checkout():
    paths = [path for line in LINES if line.startswith("pip install ./") for path in re.findall(r"\./([\w/-]+)", line)]
    assert len(paths) >= 3 * len(PLATFORMS)
    assert [path for path in paths if not (ROOT / path / "pyproject.toml").is_file()] == []


def test_every_line_is_known():
    """Of Python's commands modules and files exist; the rest is the vendor's or the shell's."""
    left = [
        line for line in LINES if line and not line.startswith(("vllm-core ", "pip install ", "python3 -m venv ", *VENDORS))
    ]
    unknown = []
    for line in left:
        words = shlex.split(line)
        assert words[0] == "python", line
        if words[1] == "-m":
            fine = find_spec(words[2]) is not None
        else:
            fine = words[1] == "-c" or (ROOT / words[1]).is_file()
        unknown += [] if fine else [line]
    assert unknown == []


def test_the_compilers_commands_take_their_arguments():
    pytest.importorskip("triton")
    from vllm_rocm.machine_code import options_of

    lines = [line.partition(" > ")[0] for line in LINES if line.startswith("python -m vllm_rocm.machine_code")]
    assert [options_of(shlex.split(line)[3:]).architecture for line in lines] == ["gfx942"]


def test_manifest_readmes_matrix_and_page_say_the_same_of_what_was_never_run():
    """What may be claimed stands in the manifest, word for word in the README and under the matrix; people are sent there."""
    table = (ROOT / "README.md").read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    found = {name.removeprefix("vllm-"): one for name, one in matrix.manifests()}
    for platform in PLATFORMS:
        readme = " ".join((ROOT / "plugins" / f"vllm-{platform}" / "README.md").read_text("utf-8").split())
        head, _, claim = found[platform].note.partition(": ")
        assert head == "experimental, not run on hardware"
        assert f"**Experimental, not run on hardware**: {claim}" in readme
        assert "first-run-on-hardware.md" in readme
        assert "never executed" in claim
        assert f"vllm-{platform}: {found[platform].note}." in table
