"""Frames arrive as they were sent, whatever their size, and an end is seen from both sides."""

from __future__ import annotations

import contextlib
import socket
import threading

import numpy as np
import pytest

from vllm_core.api import StepDelta, StepKey
from vllm_core.engine.parallel import channel as frames
from vllm_core.engine.parallel.channel import Channel


@pytest.fixture
def ends():
    one, other = map(Channel, socket.socketpair())
    yield one, other
    one.close()
    other.close()


@pytest.mark.parametrize("size", [0, 1, 70_000, 5_000_000])
def test_frames_of_any_size_keep_their_borders(ends, size):
    one, other = ends
    payload = bytes(range(251)) * (size // 251 + 1)
    sender = threading.Thread(target=lambda: (one.send(frames.STEP, payload[:size]), one.send(frames.STOP)))
    sender.start()
    assert other.receive() == (frames.STEP, payload[:size])
    assert other.receive() == (frames.STOP, b"")
    sender.join()


def test_an_end_in_the_midst_of_a_frame_is_an_end(ends):
    one, other = ends
    one._socket.sendall(b"\x02\x10\x00\x00\x00half")
    one.close()
    with pytest.raises(EOFError, match="4 of 16"):
        other.receive()
    with pytest.raises(OSError, match=r"[Bb]roken pipe"):
        other.send(frames.STOP)
    other.try_send(frames.STOP)


def test_try_send_does_not_wait_for_a_reader(ends):
    one, _ = ends
    one._socket.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while one._socket.send(b"\0" * 65536):
            pass
    one._socket.setblocking(True)
    one.try_send(frames.STOP)


def test_the_end_is_seen_while_frames_wait(ends):
    one, other = ends
    waiter = threading.Thread(target=other.wait_for_end)
    waiter.start()
    one.send(frames.STEP, b"unread")
    waiter.join(0.2)
    assert waiter.is_alive(), "a frame is no end"
    one.close()
    waiter.join(30)
    assert not waiter.is_alive()


def test_a_stop_ends_whoever_waits_for_something_else(ends):
    one, other = ends
    one.send(frames.STOP)
    with pytest.raises(EOFError):
        other.expect(frames.AGREED)


def test_a_step_travels_whole():
    key = StepKey(slots=3, tokens=7, tokens_per_slot=5, tail="sample", features=9)
    mask = np.array([-1, 5], dtype=np.int32)
    delta = StepDelta(np.arange(40, dtype=np.int32) - 20, num_logprobs=4, mask_rows={2: mask})
    got_key, got = frames.decode_step(frames.encode_step(key, delta))
    assert got_key == key
    assert got.num_logprobs == 4
    assert np.array_equal(got.packed, delta.packed)
    assert got.packed.dtype == np.int32
    assert got.packed.flags.writeable
    assert got.mask_rows.keys() == {2}
    assert np.array_equal(got.mask_rows[2], mask)
