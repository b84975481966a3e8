"""A tiny host device, reference ops, and steps over a paged KV that is filled with NaN and handed out in shuffled order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from vllm_core.api import OPS, Device, DeviceFacts, Eager, Event, MemoryStats, StepInputs
from vllm_core.layers.shard import ALONE, Shard
from vllm_core.models import transformers_track

TOKENS_PER_BLOCK = 4
NUM_BLOCKS = 64
MAX_TOKENS = 64


class HostDevice(Device):
    """Memory of the host, nothing asynchronous."""

    facts = DeviceFacts(
        id="host", name="host", device_type="host", architecture="any", memory_kind="host", memory_bytes=1 << 30
    )
    torch_device = "cpu"
    eager = Eager("full")
    asynchronous = False
    stable_addresses = True
    supports_graphs = False

    def allocate(self, pool, shape, dtype):
        return torch.zeros(tuple(shape), dtype=dtype)

    def adopt(self, pool, host):
        return host

    def release(self, pool):
        return 0

    def pinned(self, shape, dtype):
        return torch.zeros(tuple(shape), dtype=dtype)

    def statistics(self):
        return MemoryStats(1 << 30, 1 << 30, {}, 0)

    def synchronize(self):
        return None

    def event(self) -> Event:
        raise AssertionError("a synchronous device has no use for events")

    def seed(self, value):
        torch.manual_seed(value)


class ReferenceOps:
    """Every call site bound to the reference; remembers what was asked for."""

    def __init__(self) -> None:
        self.asked: set[tuple[str, str]] = set()

    def get(self, op: str, role: str) -> Callable[..., Any]:
        self.asked.add((op, role))
        return OPS[op].load_reference()

    def has(self, op: str, role: str) -> bool:
        return op != "decode_layers"

    def formats(self, op: str, role: str) -> frozenset[str]:
        return frozenset()


@dataclass
class Prompt:
    """One sequence: its tokens, how many are computed, and its blocks in each group."""

    tokens: list[int]
    blocks: list[list[int]]
    computed: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)


class Runner:
    """Runs steps of a built model, as the engine's program would."""

    def __init__(self, model: Any, spec: Any, ops: ReferenceOps, seed: int = 0) -> None:
        self.model, self.spec, self.ops = model, spec, ops
        self.groups = spec.kv_groups()
        order = random.Random(seed)
        self.free = [order.sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1) for _ in self.groups]
        self.kv: list[Any] = [None] * len(spec.layers)
        width = torch.empty(0, dtype=getattr(torch, spec.dtype)).element_size()
        for group in self.groups:
            bind = OPS["kv_bind"].load_reference()
            for layer in group.layers:
                block_bytes = 2 * TOKENS_PER_BLOCK * group.num_kv_heads * group.head_size * width
                memory = torch.full((NUM_BLOCKS, block_bytes), 255, dtype=torch.uint8)  # NaN
                self.kv[layer] = bind(memory, group.num_kv_heads, group.head_size, spec.dtype, TOKENS_PER_BLOCK)

    def sequence(self, tokens: Sequence[int]) -> Prompt:
        return Prompt(list(tokens), [[] for _ in self.groups])

    def step(self, rows: Sequence[tuple[Prompt, int]]) -> torch.Tensor:
        """Compute the next ``count`` tokens of each sequence; returns hidden states."""
        inputs = self._inputs(rows)
        hidden = self.model.forward(inputs, self.kv)
        assert hidden.shape == (inputs.num_tokens, self.spec.hidden_size)
        begin = 0
        for sequence, count in rows:
            if self.spec.pooling is None:
                out = torch.empty(count, self.spec.vocab_size)
                self.model.logits(out, hidden[begin : begin + count])
                sequence.logits.append(out)
            sequence.computed += count
            begin += count
        return hidden

    def _inputs(self, rows: Sequence[tuple[Prompt, int]]) -> StepInputs:
        starts, lengths, ids, positions = [0], [], [], []
        slots: list[list[int]] = [[] for _ in self.groups]
        for sequence, count in rows:
            new = range(sequence.computed, sequence.computed + count)
            ids += [sequence.tokens[p] for p in new]
            positions += new
            starts.append(starts[-1] + count)
            lengths.append(new.stop)
            for index, blocks in enumerate(sequence.blocks):
                while len(blocks) * TOKENS_PER_BLOCK < new.stop:
                    blocks.append(self.free[index].pop())
                slots[index] += [blocks[p // TOKENS_PER_BLOCK] * TOKENS_PER_BLOCK + p % TOKENS_PER_BLOCK for p in new]
        return StepInputs(
            token_ids=_int32(ids),
            positions=_int32(positions),
            slots=_int32(range(len(rows))),
            query_start=_int32(starts),
            seq_lens=_int32(lengths),
            sample_rows=torch.tensor(starts[1:]) - 1,
            sample_slots=torch.arange(len(rows)),
            sample_lengths=_int32(lengths),
            slot_mapping=tuple(torch.tensor(s) for s in slots),
            block_tables=tuple(self._table(rows, index) for index in range(len(self.groups))),
            num_tokens=len(ids),
            num_rows=len(rows),
            max_query_len=max(count for _, count in rows),
            max_seq_len=max(lengths),
        )

    def _table(self, rows: Sequence[tuple[Prompt, int]], index: int) -> torch.Tensor:
        """Block table of a group; blocks wholly behind the window of the step's first query are the null block."""
        window = self.groups[index].window
        table = torch.zeros(len(rows), max(len(s.blocks[index]) for s, _ in rows), dtype=torch.int32)
        for row, (sequence, _) in enumerate(rows):
            blocks = sequence.blocks[index]
            gone = 0 if window is None else max(0, sequence.computed - window + 1) // TOKENS_PER_BLOCK
            table[row, gone : len(blocks)] = _int32(blocks[gone:])
        return table


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def eager_model(config: Any, *, headless: bool = False, seed: int = 0) -> Any:
    """transformers' own model in float32 with eager attention, small random weights, no biases or norms left at 0 or 1."""
    torch.manual_seed(seed)
    factory = transformers.AutoModel if headless else transformers.AutoModelForCausalLM
    model = factory.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    return model


def rewired(
    config: dict[str, Any],
    weights: dict[str, torch.Tensor] | None,
    seed: int = 0,
    *,
    shard: Shard = ALONE,
    ops: ReferenceOps | None = None,
    bound: float | None = None,
    **changes: Any,
) -> Runner:
    """Describe, build and load as the engine does, or one worker's part; random weights where none are given."""
    import dataclasses

    spec = dataclasses.replace(transformers_track.describe(config, dtype="float32", path="here"), **changes)
    ops, source = ops or ReferenceOps(), SimpleNamespace(config=config, name="here")
    sizes = {"max_tokens": MAX_TOKENS, "max_model_len": spec.max_position}
    model = transformers_track.build(spec, source, HostDevice(), ops, **sizes, shard=shard)
    if weights is None:
        model.load_dummy(seed, bound)
    else:
        model.load(iter(weights.items()))
    return Runner(model, model.spec, ops, seed)


def checkpoint(model: Any, folder: Any) -> dict[str, torch.Tensor]:
    """The weights by the names of a saved checkpoint, which may differ from those of the modules."""
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.fixture
def track():
    """Everything above, by name: test modules cannot import one another."""
    return SimpleNamespace(
        eager_model=eager_model,
        rewired=rewired,
        checkpoint=checkpoint,
        host_device=HostDevice,
        reference_ops=ReferenceOps,
        runner=Runner,
    )
