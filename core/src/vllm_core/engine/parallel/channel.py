"""Frames between the leading worker and one that follows it, over a pair of Unix stream sockets.

A socket pair has no name that could be taken or left behind, its kernel buffer lets the leader run ahead, and its end says
at once, and to either side, that the other process is gone. A frame is a kind, a length and bytes: msgpack, never pickle.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from vllm_core.api import StepDelta, StepKey
from vllm_core.engine.memory import KVBudget

if TYPE_CHECKING:
    import numpy.typing as npt

# leader to worker
START, AGREED, STEP, STOP = range(4)
# worker to leader
JOINING, BUDGET, READY, DIGEST, FAILED, BEAT = range(8, 14)

BEAT_S = 1.0
"""How often a worker says that its process runs."""

_HEAD = struct.Struct("<BI")
_MANY_BYTES = 1 << 16


class Start(msgspec.Struct, frozen=True):
    """Who the worker is, where the group meets, and the blueprint of the engine."""

    rank: int
    rendezvous: str
    design: bytes


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One step: a StepKey and a StepDelta, whose arrays travel as bytes."""

    key: StepKey
    packed: bytes
    num_logprobs: int
    mask_rows: dict[int, bytes]


class Digest(msgspec.Struct, frozen=True, array_like=True):
    """Check sum over the tokens of all steps so far."""

    steps: int
    value: int


encode = msgspec.msgpack.Encoder().encode
decode_start = msgspec.msgpack.Decoder(Start).decode
decode_budget = msgspec.msgpack.Decoder(KVBudget).decode
decode_digest = msgspec.msgpack.Decoder(Digest).decode
_decode_step = msgspec.msgpack.Decoder(Step).decode


def encode_step(key: StepKey, delta: StepDelta) -> bytes:
    """Pack a step."""
    masks = {int(row): mask.tobytes() for row, mask in delta.mask_rows.items()}
    return encode(Step(key, delta.packed.tobytes(), delta.num_logprobs, masks))


def decode_step(payload: bytes) -> tuple[StepKey, StepDelta]:
    """Unpack a step; its arrays may be written to."""
    step = _decode_step(payload)
    masks = {row: _words(mask) for row, mask in step.mask_rows.items()}
    return step.key, StepDelta(_words(step.packed), step.num_logprobs, masks)


def _words(raw: bytes) -> npt.NDArray[np.int32]:
    words: npt.NDArray[np.int32] = np.frombuffer(raw, dtype=np.int32).copy()
    return words


class Channel:
    """One end. Any thread sends, one receives; `wait_for_end` may be called from a third."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, kind: int, payload: bytes = b"") -> None:
        """Send a frame. Raises OSError where the other end is gone."""
        head = _HEAD.pack(kind, len(payload))
        with self._sending:
            if len(payload) < _MANY_BYTES:
                self._socket.sendall(head + payload)
            else:
                self._socket.sendall(head)
                self._socket.sendall(payload)

    def try_send(self, kind: int) -> None:
        """Send a frame without payload, unless the other end is gone or does not read, or another thread waits for it."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            with contextlib.suppress(OSError):
                self._socket.send(_HEAD.pack(kind, 0), socket.MSG_DONTWAIT)
        finally:
            self._sending.release()

    def beat_for_ever(self) -> None:
        """Send a sign of life every `BEAT_S`, for a thread of its own: it goes on while others wait or compute."""
        while True:
            self.try_send(BEAT)
            time.sleep(BEAT_S)

    def receive(self) -> tuple[int, bytes]:
        """Wait for a frame. Raises EOFError where the other end is gone."""
        kind, size = _HEAD.unpack(self._read(_HEAD.size))
        return kind, self._read(size)

    def expect(self, kind: int) -> bytes:
        """Wait for a frame of this kind and return its payload. Raises EOFError where the leader says stop instead."""
        found, payload = self.receive()
        if found == STOP:
            raise EOFError("stopped before it was ready")
        assert found == kind, f"frame {found} where {kind} was due"
        return payload

    def wait_for_end(self) -> None:
        """Return when the other end is gone, whatever else arrives."""
        poll: Any = select.poll()
        poll.register(self._socket, getattr(select, "POLLRDHUP", 0))
        poll.poll()

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _read(self, size: int) -> bytes:
        """Raises EOFError where the stream ends before."""
        buffer = bytearray(size)
        view, got = memoryview(buffer), 0
        while got < size:
            try:
                count = self._socket.recv_into(view[got:])
            except ConnectionError as error:
                raise EOFError(str(error)) from error
            if not count:
                raise EOFError(f"the stream ends after {got} of {size} bytes")
            got += count
        return bytes(buffer)
