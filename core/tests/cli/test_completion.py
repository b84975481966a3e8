"""Completion scripts name what the parsers have, and shells accept them."""

from __future__ import annotations

import shutil
import subprocess
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
