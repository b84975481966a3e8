"""`generate` and `chat` with the demo model, as a person runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_core.cli.chat import Conversation, local
from vllm_core.cli.main import main
from vllm_core.errors import RequestError
from vllm_core.outputs import CompletionOutput, RequestOutput
from vllm_core.sampling_params import SamplingParams

SMALL = ["--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", "100000000"]


@pytest.fixture
def command(model_file: Callable[[str], Path]) -> Callable[..., subprocess.CompletedProcess[str]]:
    model = str(model_file("SmolLM2-135M-Instruct.Q4_1.gguf"))

    def run(name: str, *argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-m", "vllm_core.cli.main", name, "--model", model, *SMALL, *argv]
        env = {name: value for name, value in os.environ.items() if name != "VLLM_CORE_LOG_LEVEL"}
        return subprocess.run(program, input=stdin, capture_output=True, text=True, check=False, timeout=240, env=env)

    return run


@pytest.mark.model
def test_generate_prints_the_text_and_the_speed_beside_it(command: Any, tmp_path: Path) -> None:
    done = command("generate", "--prompt", "The capital of France is", "--temperature", "0", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "8 out" in done.stderr
    assert "tokens/s" in done.stderr
    assert "Traceback" not in done.stderr
    (tmp_path / "prompt").write_text("The capital of France is", encoding="utf-8")
    argv = ["--prompt-file", str(tmp_path / "prompt"), "--temperature", "0", "--max-tokens", "8", "--json"]
    row = json.loads(command("generate", *argv).stdout)
    assert row["text"].strip() == done.stdout.strip()
    assert row["completion_tokens"] == len(row["token_ids"]) == 8
    assert row["finish_reason"] == "length"


@pytest.mark.model
@pytest.mark.parametrize(("prompt", "expected"), [("", "empty"), ("a " * 400, "longer than the context"), ("\udcff", "prompt")])
def test_prompts_that_cannot_be_used_are_errors_with_status_2(command: Any, prompt: str, expected: str) -> None:
    done = command("generate", "--prompt", prompt)
    assert done.returncode == 2, done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.model
def test_chat_answers_each_line_of_a_pipe(command: Any) -> None:
    done = command("chat", "--temperature", "0", "--max-tokens", "8", stdin="What is the capital of France?\n\nAnd of Italy?\n")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.split("\n") if line]
    assert len(lines) >= 2
    assert "Paris" in lines[0]


class Talker:
    """Answers "one", "two", ... in two pieces; fails for the text "bad"."""

    def __init__(self) -> None:
        self.seen: list[list[dict[str, str]]] = []
        self.closed = 0

    def stream_chat(self, messages: list[dict[str, str]], params: SamplingParams) -> Any:
        self.seen.append(messages)
        if messages[-1]["content"] == "bad":
            raise RequestError("Prompt is longer than the context", on="prompt", found="x", expected="y", fix="z")
        try:
            for text in ("on", "one"):
                yield RequestOutput("0", None, [1], [CompletionOutput(0, text, [1])], text == "one")
        finally:
            self.closed += 1


def test_a_conversation_remembers_what_was_said() -> None:
    talker = Talker()
    talk = Conversation(local(talker, SamplingParams()), "Be brief.")  # type: ignore[arg-type]
    assert list(talk.say("Hi")) == ["on", "e"]
    assert list(talk.say("More")) == ["on", "e"]
    assert talker.seen[1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "More"},
    ]


def test_an_interrupted_answer_is_kept_as_far_as_it_came() -> None:
    talker = Talker()
    talk = Conversation(local(talker, SamplingParams()), None)  # type: ignore[arg-type]
    pieces = talk.say("Hi")
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert talker.closed == 1, "the request was aborted"
    assert talk.messages[-1] == {"role": "assistant", "content": "on"}


def test_a_turn_that_fails_leaves_no_trace() -> None:
    talk = Conversation(local(Talker(), SamplingParams()), None)  # type: ignore[arg-type]
    with pytest.raises(RequestError):
        list(talk.say("bad"))
    assert talk.messages == []


def test_clearing_keeps_what_the_model_was_told_first() -> None:
    talk = Conversation(local(Talker(), SamplingParams()), "Be brief.")  # type: ignore[arg-type]
    list(talk.say("Hi"))
    talk.clear()
    assert talk.messages == [{"role": "system", "content": "Be brief."}]


def test_a_prompt_file_that_is_no_utf8_is_refused(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "prompt").write_bytes(b"\xff\xfe")
    assert main(["generate", "--model", "m", "--prompt-file", str(tmp_path / "prompt")]) == 2
    assert "expected: a prompt in UTF-8" in capsys.readouterr().err
