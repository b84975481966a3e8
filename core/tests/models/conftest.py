"""Models on the reference ops, driven by hand: a device of plain tensors, bound references, steps with paged KV."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_core.api import OPS, Eager, StepInputs
from vllm_core.layers.shard import Shard
from vllm_core.models import catalog
from vllm_core.models.build import build_model
from vllm_core.ops import comm

BLOCK = 4


class PlainDevice:
    """Just enough of a Device for a model: zero-filled tensors, counted by pool."""

    eager = Eager("full")
    facts = SimpleNamespace(memory_kind="host")

    def __init__(self) -> None:
        self.allocated: dict[str, int] = {}

    def allocate(self, pool, shape, dtype):
        tensor = torch.zeros(tuple(shape), dtype=dtype)
        self._count(pool, tensor)
        return tensor

    def adopt(self, pool, host):
        self._count(pool, host)
        return host

    def _count(self, pool, tensor):
        self.allocated[pool] = self.allocated.get(pool, 0) + tensor.nbytes


class References:
    """Every call site bound to the reference; `calls` counts what ran, `sites` what was fetched. `whole`: all layers too."""

    def __init__(self, *, whole: bool = False) -> None:
        self.whole = whole
        self.calls: list[str] = []
        self.sites: set[tuple[str, str]] = set()

    def get(self, op: str, role: str) -> Callable[..., Any]:
        self.sites.add((op, role))
        reference = OPS[op].load_reference()

        def counted(*arguments: Any) -> Any:
            self.calls.append(op)
            return reference(*arguments)

        return counted

    def has(self, op: str, role: str) -> bool:
        return self.whole or op != "decode_layers"

    def formats(self, op: str, role: str) -> frozenset[str]:
        return frozenset()


@dataclass
class Sequences:
    """A model with its paged KV. Blocks are handed out in a shuffled order, never two neighbours in a row."""

    spec: Any
    model: Any
    ops: References
    num_blocks: int = 128
    kv: list[Any] = field(default_factory=list)
    computed: dict[int, int] = field(default_factory=dict)
    tables: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec = self.spec
        size = torch.tensor([], dtype=getattr(torch, spec.dtype)).element_size()
        bind = OPS["kv_bind"].load_reference()
        for _ in spec.layers if spec.kind == "decoder" else ():
            memory = torch.zeros(self.num_blocks, 2 * BLOCK * spec.num_kv_heads * spec.head_size * size, dtype=torch.uint8)
            self.kv.append(bind(memory, spec.num_kv_heads, spec.head_size, spec.dtype, BLOCK))
        # Each group's blocks are numbered by its own layers' memory, so the groups' tables differ.
        self.free = [
            random.Random(7 + g.index).sample(range(1, self.num_blocks), self.num_blocks - 1) for g in spec.kv_groups()
        ]

    def step(self, rows: Sequence[tuple[int, Sequence[int]]]) -> list[torch.Tensor]:
        """Run one step of (sequence, its next tokens); returns each row's hidden states [n, H], copied."""
        inputs = self._inputs(rows)
        hidden = self.model.forward(inputs, self.kv)
        return [part.clone() for part in hidden.split([len(new) for _, new in rows])]

    def step_of(self, rows: Sequence[tuple[int, Sequence[int]]], wanted: Sequence[int]) -> torch.Tensor:
        """Run one step of which only some tokens' hidden states are wanted; returns these, copied."""
        inputs = self._inputs(rows)
        return self.model.forward(inputs, self.kv, torch.tensor(wanted, dtype=torch.int64)).clone()

    def logits(self, rows: Sequence[tuple[int, Sequence[int]]]) -> list[torch.Tensor]:
        """Like `step`, but float32 logits [n, V] of every token."""
        out = []
        for hidden in self.step(rows):
            logits = torch.empty(len(hidden), self.spec.vocab_size)
            self.model.logits(logits, hidden)
            out.append(logits)
        return out

    def _inputs(self, rows: Sequence[tuple[int, Sequence[int]]]) -> StepInputs:
        ids, positions, lengths, begins, starts = [], [], [], [], [0]
        groups = range(len(self.free))
        mapping: list[list[int]] = [[] for _ in groups]
        for sequence, new in rows:
            begin = self.computed.get(sequence, 0)
            for position in range(begin, begin + len(new)):
                for g in groups:
                    table = self.tables.setdefault((g, sequence), [])
                    if position // BLOCK == len(table):
                        table.append(self.free[g].pop())
                    mapping[g].append(table[position // BLOCK] * BLOCK + position % BLOCK)
                positions.append(position)
            ids.extend(new)
            self.computed[sequence] = begin + len(new)
            begins.append(begin)
            lengths.append(begin + len(new))
            starts.append(len(ids))
        width = -(-max(lengths) // BLOCK)
        int32 = torch.int32
        return StepInputs(
            token_ids=torch.tensor(ids, dtype=int32),
            positions=torch.tensor(positions, dtype=int32),
            slots=torch.tensor([s for s, _ in rows], dtype=int32),
            query_start=torch.tensor(starts, dtype=int32),
            seq_lens=torch.tensor(lengths, dtype=int32),
            sample_rows=torch.tensor(starts[1:], dtype=torch.int64) - 1,
            sample_slots=torch.tensor([s for s, _ in rows], dtype=torch.int64),
            sample_lengths=torch.tensor(lengths, dtype=int32),
            slot_mapping=tuple(torch.tensor(m, dtype=torch.int64) for m in mapping),
            block_tables=tuple(
                torch.tensor([self._row(g, s, begin, width) for (s, _), begin in zip(rows, begins, strict=True)], dtype=int32)
                for g in groups
            ),
            num_tokens=len(ids),
            num_rows=len(rows),
            max_query_len=max(len(new) for _, new in rows),
            max_seq_len=max(lengths),
        )

    def _row(self, group: int, sequence: int, begin: int, width: int) -> list[int]:
        """The block table; blocks wholly behind the first query's window are the null block, as in the engine."""
        table = list(self.tables[group, sequence])
        window = self.spec.kv_groups()[group].window
        behind = 0 if window is None else max(0, begin - window + 1) // BLOCK
        return ([0] * behind + table[behind:] + [0] * width)[:width]


@dataclass
class Builder:
    """Builds models for the tests; the device and the bound ops of the last one stay readable."""

    device: PlainDevice | None = None
    ops: References | None = None

    def __call__(
        self,
        config: dict[str, Any],
        weights: Any = None,
        *,
        dtype: str = "float32",
        pooling: str | None = None,
        max_model_len: int | None = None,
        seed: int = 0,
        whole: bool = False,
    ) -> Sequences:
        """Describe, build and load (``weights``: pairs of name and tensor; None draws dummy ones)."""
        self.device, self.ops = PlainDevice(), References(whole=whole)
        spec = catalog.describe(config, dtype=dtype, pooling=pooling)
        model = build_model(spec, self.device, self.ops, max_tokens=256, max_model_len=max_model_len)
        model.load_dummy(seed) if weights is None else model.load(weights)
        return Sequences(spec, model, self.ops)


class Meeting:
    """The process group of one of several threads: what torch.distributed would do, by a barrier."""

    def __init__(self, rank: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self._rank, self._barrier, self._slots = rank, barrier, slots

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self._slots)

    def wait(self) -> None:
        """Everything is done when a call returns."""

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._slots[self._rank] = x.clone()
        self._barrier.wait(timeout=60)
        found = list(self._slots)
        self._barrier.wait(timeout=60)
        return found

    def allreduce(self, tensors: list[torch.Tensor]) -> Meeting:
        tensors[0].copy_(sum(self._exchange(tensors[0])))
        return self

    def allgather(self, parts: list[list[torch.Tensor]], tensors: list[torch.Tensor]) -> Meeting:
        for part, found in zip(parts[0], self._exchange(tensors[0]), strict=True):
            part.copy_(found)
        return self


@dataclass
class Workers:
    """The same model on several threads, each with its part."""

    parts: list[Sequences]
    pool: ThreadPoolExecutor

    def run(self, work: Callable[[Sequences], list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Do the same on every worker at once."""
        return list(self.pool.map(work, self.parts))


@pytest.fixture
def shards() -> Iterator[Callable[[int], list[Shard]]]:
    """Makes the shards of so many workers, which are threads of this process."""
    handles = []

    def make(count: int) -> list[Shard]:
        barrier, slots = threading.Barrier(count), [None] * count
        mine = [comm.register(Meeting(rank, barrier, slots)) for rank in range(count)]
        handles.extend(mine)
        return [Shard(rank, count, handle) for rank, handle in enumerate(mine)]

    yield make
    for handle in handles:
        comm.forget(handle)


@pytest.fixture
def build_workers(shards: Callable[[int], list[Shard]]) -> Iterator[Callable[..., Workers]]:
    """Builds a model shared by several workers on the references; ``weights`` makes the pairs that each is given."""
    pools = []

    def make(config: dict[str, Any], count: int, weights: Callable[[Any], Any] | None = None, **options: Any) -> Workers:
        parts = []
        spec = catalog.describe(config, dtype=options.get("dtype", "float32"), pooling=options.get("pooling"))
        pools.append(ThreadPoolExecutor(count))
        for shard in shards(count):
            ops = References()
            model = build_model(spec, PlainDevice(), ops, max_tokens=256, shard=shard)
            model.load_dummy(0) if weights is None else model.load(weights(model))
            parts.append(Sequences(spec.shard(count), model, ops))
        return Workers(parts, pools[-1])

    yield make
    for pool in pools:
        pool.shutdown()


@pytest.fixture
def build() -> Builder:
    """Builds a model of a Hugging Face config on the references."""
    return Builder()


@pytest.fixture(scope="session")
def llama_config() -> dict[str, Any]:
    """A small Llama with grouped heads and odd sizes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 67,
        "hidden_size": 48,
        "intermediate_size": 71,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }


@dataclass(frozen=True)
class Reference:
    """A random-weight model of transformers, and its config as a checkpoint has it."""

    model: Any
    config: dict[str, Any]

    def weights(self) -> list[tuple[str, torch.Tensor]]:
        """As a checkpoint would have them: without tied copies."""
        tied = set(getattr(self.model, "_tied_weights_keys", None) or ()) if self.model.config.tie_word_embeddings else set()
        return [(name, tensor) for name, tensor in self.model.state_dict().items() if name not in tied]

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [n, V] of one sequence, computed at once."""
        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0].float()

    def hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [n, H] after the last norm."""
        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).last_hidden_state[0].float()


SIZES = {
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 71,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def reference() -> Callable[..., Reference]:
    """Makes a transformers model of an architecture, small and random with a fixed seed, eager attention."""
    transformers = pytest.importorskip("transformers")

    def make(architecture: str, **changes: Any) -> Reference:
        cls = getattr(transformers, architecture)
        config = cls.config_class(**{**SIZES, **changes}, attn_implementation="eager", experts_implementation="eager")
        model = cls(config).eval()
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                # Norm weights stay near what they are at initialisation, the others are large enough to matter.
                parameter.copy_(parameter + 0.2 * noise if "norm" in name.lower() and parameter.ndim == 1 else 0.15 * noise)
        return Reference(model, {**config.to_dict(), "architectures": [architecture]})

    return make
