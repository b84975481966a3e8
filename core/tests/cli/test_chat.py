"""`chat` in a terminal: its commands, lines that go on, history, and whom it talks to."""

from __future__ import annotations

import builtins
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_core.cli import chat
from vllm_core.cli.main import main
from vllm_core.errors import ConfigError, EngineError


class Parrot:
    """Says what was said last, in capitals; fails for the text "bad"."""

    def __init__(self) -> None:
        self.seen: list[list[dict[str, str]]] = []

    def __call__(self, messages: list[dict[str, str]]) -> Iterator[str]:
        self.seen.append(list(messages))
        if messages[-1]["content"] == "bad":
            raise EngineError("Server refused the request", on="url", found="HTTP 503", expected="an answer", fix="wait")
        yield from messages[-1]["content"].upper()


@pytest.fixture
def typed(monkeypatch: Any) -> Any:
    """What a person types, then the end of the input."""

    def run(*lines: str, history: Path | None = None) -> Parrot:
        left = iter(lines)

        def read(prompt: str = "") -> str:
            line = next(left, None)
            if line is None:
                raise EOFError
            return line

        parrot = Parrot()
        monkeypatch.setattr(builtins, "input", read)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        chat._talk(chat.Conversation(parrot, None), history)
        return parrot

    return run


def texts(messages: list[dict[str, str]]) -> list[str]:
    return [message["content"] for message in messages]


def test_answers_stream_and_turns_are_remembered(typed: Any, capsys: Any) -> None:
    parrot = typed("one", "two")
    assert texts(parrot.seen[1]) == ["one", "ONE", "two"]
    assert capsys.readouterr().out.split() == ["ONE", "TWO"]


def test_retry_asks_again_and_undo_forgets(typed: Any) -> None:
    parrot = typed("one", "two", "/retry", "/undo", "three", "/clear", "four")
    assert [texts(seen) for seen in parrot.seen] == [
        ["one"],
        ["one", "ONE", "two"],
        ["one", "ONE", "two"],
        ["one", "ONE", "three"],
        ["four"],
    ]


def test_retry_and_undo_of_nothing_do_nothing(typed: Any) -> None:
    assert typed("/retry", "/undo").seen == []


def test_the_system_message_can_be_changed(typed: Any) -> None:
    parrot = typed("/system Be brief.", "one", "/system", "two")
    assert texts(parrot.seen[0]) == ["Be brief.", "one"]
    assert texts(parrot.seen[1]) == ["one", "ONE", "two"]


def test_a_backslash_joins_lines_and_exit_leaves(typed: Any) -> None:
    parrot = typed("one\\", "two", "/exit", "three")
    assert [texts(seen) for seen in parrot.seen] == [["one\ntwo"]]


def test_an_error_is_said_and_the_conversation_goes_on(typed: Any, capsys: Any) -> None:
    parrot = typed("bad", "one")
    assert texts(parrot.seen[1]) == ["one"]
    assert "HTTP 503" in capsys.readouterr().err


def test_history_is_kept_only_where_asked_and_for_its_owner_alone(typed: Any, tmp_path: Path) -> None:
    typed("one")
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "history"
    typed("one", history=file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_history_that_cannot_be_kept_is_named(typed: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--history"):
        typed("one", history=tmp_path / "nowhere" / "history")


@pytest.mark.parametrize(
    ("argv", "mentions"),
    [
        (["chat"], "neither a model nor --url"),
        (["chat", "--url", "http://127.0.0.1:9", "--max-model-len", "64"], "--max-model-len"),
        (["chat", "--url", "nowhere"], "Server does not answer"),
    ],
)
def test_what_cannot_be_is_said(argv: list[str], mentions: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert main(argv) == 2
    assert mentions in capsys.readouterr().err
