"""Where a program keeps what it has beside the KV cache, and how much that is."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from vllm_core.api import batch as layout
from vllm_core.engine.program import STAGES, ComposedProgram, StateShape, allocate_state, bytes_of

ROWS = 8
SHAPE = StateShape(num_slots=ROWS, max_len=100, max_blocks=(8, 3), tokens_per_block=(16, 64))


class Counting:
    """A device that counts what is allocated there."""

    asynchronous = False

    def __init__(self, memory_kind: str) -> None:
        self.facts = SimpleNamespace(memory_kind=memory_kind)
        self.count = 0

    def allocate(self, pool, shape, dtype):
        self.count += math.prod(shape) * dtype.itemsize
        return torch.zeros(tuple(shape), dtype=dtype)

    def pinned(self, shape, dtype):
        return torch.zeros(tuple(shape), dtype=dtype)


@pytest.mark.parametrize("pooling", [None, "mean"])
@pytest.mark.parametrize("memory_kind", ["discrete", "host"])
def test_memory_taken_after_the_kv_cache_is_known_before(pooling, memory_kind):
    spec = SimpleNamespace(dtype="bfloat16", hidden_size=64, vocab_size=1000, pooling=pooling, pooled_size=48)
    device = Counting(memory_kind)
    allocate_state(device, SHAPE)
    program = ComposedProgram.__new__(ComposedProgram)
    program.spec, program._device, program._host_memory = spec, device, memory_kind == "host"
    program._allocate_tail(ROWS, captures=False)
    known = bytes_of(spec, SHAPE, ROWS)
    assert device.count <= known <= device.count + 5 * STAGES * ROWS


def test_every_turn_of_a_captured_step_brings_what_it_wrote_also_where_the_device_is_the_host():
    spec = SimpleNamespace(dtype="float32", hidden_size=8, vocab_size=16, pooling=None)
    program = ComposedProgram.__new__(ComposedProgram)
    program.spec, program._device, program._host_memory, program._turn = spec, Counting("host"), True, 0
    program._allocate_tail(ROWS, captures=True)
    program._captured = SimpleNamespace(stage=lambda step, packed, header, turn: packed)
    written = iter(range(1, 2 * STAGES + 1))
    # A graph writes to the addresses that it was captured with.
    graph = SimpleNamespace(replay=lambda: program._results[0].raw[: 4 * ROWS].view(torch.int32).fill_(next(written)))
    step = SimpleNamespace(graph=graph, has_eager_tail=False)
    header = [0] * layout.HEADER_WORDS
    header[layout.H_NUM_SAMPLED] = 2
    brought = [program._replay(step, SimpleNamespace(packed=None), header).result().tokens.tolist() for _ in range(2 * STAGES)]
    assert brought == [[[turn], [turn]] for turn in range(1, 2 * STAGES + 1)]
