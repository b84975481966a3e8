"""The progress bar counts requests and tokens, and stays away where nobody looks."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

import pytest

from vllm_core import progress
from vllm_core.outputs import CompletionOutput, RequestOutput


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def output(request_id: str, tokens: int, *, finished: bool) -> RequestOutput:
    out = CompletionOutput(index=0, text="", token_ids=list(range(tokens)))
    return RequestOutput(request_id=request_id, prompt=None, prompt_token_ids=[1, 2, 3], outputs=[out], finished=finished)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setattr(progress, "DELAY_S", -1.0)
    monkeypatch.setattr(progress, "REFRESH_S", -1.0)
    return Terminal()


def test_a_long_batch_shows_requests_and_speed(terminal: Terminal) -> None:
    with redirect_stderr(terminal), progress.Progress(2, enabled=True) as bar:
        bar.update(output("a", 2, finished=False))
        bar.update(output("a", 5, finished=True))
        bar.update(output("b", 1, finished=True))
    text = terminal.getvalue()
    assert "2/2" in text
    assert "tok/s in" in text
    assert "tok/s out" in text


def test_tokens_of_a_growing_output_are_counted_once(terminal: Terminal) -> None:
    with redirect_stderr(terminal), progress.Progress(1, enabled=True) as bar:
        for count in (1, 2, 3):
            bar.update(output("a", count, finished=count == 3))
        assert bar._written == 3
        assert bar._read == 3


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_shown_where_nobody_looks(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    stream: io.StringIO = Terminal() if not enabled else io.StringIO()
    monkeypatch.setattr(progress, "DELAY_S", -1.0)
    with redirect_stderr(stream), progress.Progress(1, enabled=enabled) as bar:
        bar.update(output("a", 1, finished=True))
    assert stream.getvalue() == ""


def test_short_work_shows_no_bar(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY_S", 1e9)
    with redirect_stderr(terminal), progress.Progress(1, enabled=True) as bar:
        bar.update(output("a", 1, finished=True))
    assert terminal.getvalue() == ""
