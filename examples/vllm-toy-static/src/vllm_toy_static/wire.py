"""What travels between the engine and the device's process: bytes of arrays, and which compiled step they are for."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt


class Array(msgspec.Struct, frozen=True):
    """An array of the host."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> Array:
        """Pack a copy."""
        return cls(array.dtype.str, array.shape, array.tobytes())

    def array(self) -> npt.NDArray[Any]:
        """Unpack; writable."""
        return np.frombuffer(bytearray(self.data), dtype=self.dtype).reshape(self.shape)


class Weight(msgspec.Struct, frozen=True, tag=True):
    """A tensor of the checkpoint, in float32."""

    name: str
    value: Array


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Sizes of the KV cache and of the batch state."""

    num_slots: int
    num_blocks: int
    tokens_per_block: int
    max_model_len: int


class Run(msgspec.Struct, frozen=True, tag=True):
    """One step, for the compiled step of `rows` and `tokens`."""

    rows: int
    tokens: int
    features: int
    packed: Array | None = None
    num_logprobs: int = 0
    masks: dict[int, Array] = {}


class Result(msgspec.Struct, frozen=True, tag=True):
    """A step's arrays; or why it failed."""

    tokens: Array | None = None
    nonfinite: Array | None = None
    logprobs: tuple[Array, ...] | None = None
    prompt_logprobs: tuple[Array, ...] | None = None
    error: str = ""


Message: TypeAlias = Weight | Reserve | Run | Result
_decoder = msgspec.msgpack.Decoder(Weight | Reserve | Run | Result)


def send(connection: Connection, message: Message) -> None:
    """Send one message."""
    connection.send_bytes(msgspec.msgpack.encode(message))


def receive(connection: Connection) -> Message:
    """Wait for one message. Raises EOFError where the other process is gone."""
    message: Message = _decoder.decode(connection.recv_bytes())
    return message
