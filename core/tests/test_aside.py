"""Work beside a start: its result, its error, and an end that does not wait for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vllm_core.aside import begun


def test_the_result_and_the_error_come_where_they_are_asked_for() -> None:
    assert begun(lambda: 7, "seven").result() == 7
    failing = begun(lambda: {}["no"], "failing")
    with pytest.raises(KeyError):
        failing.result()


def test_a_process_ends_while_the_work_waits() -> None:
    code = (
        "import threading; from vllm_core.aside import begun; begun(threading.Event().wait, 'waits'); raise KeyboardInterrupt"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    assert "KeyboardInterrupt" in ended.stderr
