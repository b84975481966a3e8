"""Messages between the engine process and its owner: two-part ZeroMQ frames, a kind and a msgpack payload."""

from __future__ import annotations

from typing import Any

import msgspec

from vllm_core import errors
from vllm_core.errors import EngineError, VLLMCoreError

# owner to engine
ADD, ABORT, STATS, RESET, SLEEP, WAKE, STOP = b"add", b"abort", b"stats?", b"reset?", b"sleep?", b"wake?", b"stop"
# engine to owner
READY, UPDATES, STATS_REPLY, RESET_REPLY, REFUSED, FAILED = b"ready", b"updates", b"stats", b"reset", b"refused", b"failed"
SLEEP_REPLY, WAKE_REPLY = b"sleep", b"wake"
"""With a `Failure`, or nothing where it was done."""
BEAT = b"beat"
"""With the seconds that the engine's thread has been at one thing."""

MAX_UNREAD = 64
"""Messages to the owner that wait at each end of the connection."""

encode = msgspec.msgpack.Encoder().encode


class Ready(msgspec.Struct, frozen=True):
    """The engine runs. Sizes as they came out; timings in seconds by stage; the Plan as JSON, demotions included."""

    max_model_len: int
    num_blocks: list[int]
    kv_bytes: int
    timings: dict[str, float]
    plan: bytes


class Failure(msgspec.Struct, frozen=True):
    """An error of four parts; `op` and `role` where a provider failed, `request_id` where one request did."""

    kind: str
    what: str
    on: str
    found: str
    expected: str
    fix: str
    op: str = ""
    role: str = ""
    request_id: str = ""

    @classmethod
    def of(cls, error: BaseException, *, request_id: str = "") -> Failure:
        """Describe ``error``; one that is not ours becomes an EngineError."""
        if not isinstance(error, VLLMCoreError):
            found = f"{type(error).__name__}: {error}"
            error = EngineError(
                "Engine failed", on="engine process", found=found, expected="no error", fix="see the log above; report it"
            )
        binding = getattr(error, "binding", None)
        op, role = (binding.op, binding.role) if binding is not None else ("", "")
        kind = type(error).__name__
        return cls(kind, error.what, error.on, error.found, error.expected, error.fix, op, role, request_id)

    def to_error(self) -> VLLMCoreError:
        """The exception again; a class that only the engine knows becomes an EngineError."""
        cls: Any = getattr(errors, self.kind, None)
        if not (isinstance(cls, type) and issubclass(cls, VLLMCoreError)):
            cls = EngineError
        error: VLLMCoreError = cls(self.what, on=self.on, found=self.found, expected=self.expected, fix=self.fix)
        return error
