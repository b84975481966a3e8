"""Completion scripts name what the parsers have, and shells accept them."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from vllm_core.cli.main import COMMANDS, main

CASES = [
    (("vllm-core", ""), {"serve", "chat", "bench", "completion"}),
    (("vllm-core", "se"), {"serve"}),
    (("vllm-core", "serve", "demo", "--max-num-s"), {"--max-num-seqs"}),
    (("vllm-core", "bench", ""), {"serve", "host"}),
    (("vllm-core", "bench", "serve", "--request-r"), {"--request-rate"}),
]


@pytest.fixture
def script(capsys: Any) -> Any:
    def make(shell: str) -> str:
        assert main(["completion", shell]) == 0
        return str(capsys.readouterr().out)

    return make


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_is_in_the_script(script: Any, shell: str) -> None:
    text = script(shell)
    assert all(name in text for name in COMMANDS)


def test_a_command_whose_package_is_not_installed_is_left_out(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_core.cli.conformance.find_spec", lambda name: None)
    text = script("bash")
    assert "'serve'" in text
    assert "'conformance'" not in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_can_read_it(script: Any, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n"], input=script(shell), capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


def test_bash_completes_commands_and_options(script: Any) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    text = script("bash")
    for words, expected in CASES:
        typed = " ".join(f"'{word}'" for word in words)
        code = f'{text}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _vllm_core; printf "%s\\n" "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, timeout=30)
        assert expected <= set(done.stdout.split()), words


def test_fish_completes_commands_and_options(script: Any, tmp_path: Path) -> None:
    """fish says itself what it would offer for a line."""
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    file = tmp_path / "vllm-core.fish"
    file.write_text(script("fish"), encoding="utf-8")
    for words, expected in CASES:
        line = " ".join(words)
        code = f"source {file}; complete -C '{line}'"
        environment = {**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
        done = subprocess.run(
            ["fish", "--no-config", "-c", code], capture_output=True, text=True, check=True, timeout=60, env=environment
        )
        assert done.stderr == ""
        assert expected <= {one.partition("\t")[0] for one in done.stdout.splitlines()}, line


TYPED = [
    ("vllm-core comple", "vllm-core completion"),
    ("vllm-core serve --max-num-s", "--max-num-seqs"),
    ("vllm-core bench ho", "bench host"),
]
"""What is typed before the tabulator, and what stands there after it."""


def test_zsh_completes_what_a_person_types(script: Any, tmp_path: Path) -> None:
    """In a terminal, with the completion system that a person has."""
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    file = tmp_path / "vllm-core.zsh"
    file.write_text(script("zsh"), encoding="utf-8")
    terminal, inside = pty.openpty()
    environment = {**os.environ, "HOME": str(tmp_path), "TERM": "dumb", "COLUMNS": "200"}
    shell = subprocess.Popen(
        ["zsh", "-f", "-i"], stdin=inside, stdout=inside, stderr=inside, env=environment, start_new_session=True
    )
    os.close(inside)
    try:
        os.write(terminal, f"autoload -Uz compinit; compinit -u -D; source {file}; echo LOADED$((1+1))\n".encode())
        assert "LOADED2" in read_until(terminal, "LOADED2")
        for typed, shown in TYPED:
            os.write(terminal, f"{typed}\t".encode())
            found = read_until(terminal, shown)
            assert shown in found, (typed, found)
            os.write(terminal, b"\x15")  # the line is cleared
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)


def read_until(terminal: int, wanted: str, limit_s: float = 30.0) -> str:
    """What the terminal shows, up to ``wanted``."""
    found, ends = "", time.monotonic() + limit_s
    while wanted not in found and time.monotonic() < ends:
        if select.select([terminal], [], [], 0.2)[0]:
            found += os.read(terminal, 65536).decode(errors="replace")
    return found
