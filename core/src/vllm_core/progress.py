"""The progress bar of offline batches: requests done, tokens per second. Silent where nobody looks."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vllm_core.outputs import EmbeddingRequestOutput, RequestOutput

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

DELAY_S = 0.5
"""Work that takes less shows no bar."""

REFRESH_S = 0.1


class Progress:
    """Context manager around a batch; the bar appears on a terminal once the work is long."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._enabled = enabled and sys.stderr.isatty()
        self._total = total
        self._bar: RichProgress | None = None
        self._task: Any = None
        self._started = time.monotonic()
        self._shown = 0.0
        self._done = self._read = self._written = 0
        self._tokens: dict[str, int] = {}

    def update(self, output: RequestOutput | EmbeddingRequestOutput) -> None:
        """Count the tokens of a touched request, and the request where it has finished."""
        if not self._enabled:
            return
        written = sum(len(o.token_ids) for o in output.outputs) if isinstance(output, RequestOutput) else 0
        self._written += written - self._tokens.get(output.request_id, 0)
        self._tokens[output.request_id] = written
        if output.finished:
            self._done += 1
            self._read += len(output.prompt_token_ids)
            del self._tokens[output.request_id]
        now = time.monotonic()
        if now - self._shown > REFRESH_S:
            self._shown = now
            self._show(now - self._started)

    def _show(self, elapsed: float) -> None:
        if self._bar is None and elapsed > DELAY_S:
            self._open()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, speed=self._speed(elapsed))

    def _speed(self, elapsed: float) -> str:
        return f"{self._read / elapsed:,.0f} tok/s in, {self._written / elapsed:,.0f} tok/s out"

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
            console=Console(stderr=True),
        )
        self._bar.start()
        self._task = self._bar.add_task("requests", total=self._total, speed="")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._show(time.monotonic() - self._started)
            self._bar.stop()
