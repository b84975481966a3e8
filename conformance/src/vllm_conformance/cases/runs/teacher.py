"""What a model must answer: its logits by core's references, in float32 on the host, with no platform involved.

Tokens are judged by teacher forcing: each must be the most likely one after those before it, or so close to it that the
engine's dtype may decide otherwise. Such near-ties are counted and capped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from vllm_conformance.cases.runs import models
from vllm_core.api import OPS, Device, DeviceFacts, Eager, Event, KVGroupSpec, MemoryStats, Pool, StepInputs, UnsupportedError
from vllm_core.config import ModelConfig
from vllm_core.loader.source import open_model
from vllm_core.models import catalog
from vllm_core.models.build import Model, build_model
from vllm_core.models.spec import ModelSpec
from vllm_core.ops.layouts import kv_layout

BLOCK = 16

TIE = {"float32": 1e-3, "float16": 0.015, "bfloat16": 0.1, "int8": 0.15, "fp8": 0.4}
"""How far behind the largest logit a chosen one may be, by the engine's dtype or, if that is
coarser, its KV cache's. Logits here have a deviation of 1.5."""

MOST_TIES = {"float32": 0.02, "float16": 0.05, "bfloat16": 0.15, "int8": 0.2, "fp8": 0.3}
"""Largest share of near-ties."""

PRECISIONS = tuple(TIE)
"""From the finest to the coarsest."""


class _Host(Device):
    """Just memory."""

    torch_device = "cpu"
    eager = Eager("full")
    asynchronous = stable_addresses = supports_graphs = False

    def __init__(self) -> None:
        self.facts = DeviceFacts(
            id="0", name="host", device_type="cpu", architecture="any", memory_kind="host", memory_bytes=1 << 30
        )

    def allocate(self, pool: Pool, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def adopt(self, pool: Pool, host: Tensor) -> Tensor:
        return host.contiguous()

    def release(self, pool: Pool) -> int:
        return 0

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def statistics(self) -> MemoryStats:
        return MemoryStats(1 << 30, 1 << 30, {}, 0)

    def synchronize(self) -> None:
        return None

    def event(self) -> Event:
        raise UnsupportedError("No events", on="the teacher's host", found="none queued", expected="no call", fix="report this")

    def seed(self, value: int) -> None:
        torch.manual_seed(value)


class _References:
    """Every call site is served by its reference."""

    def get(self, op: str, role: str) -> Callable[..., Any]:
        return OPS[op].load_reference()

    def has(self, op: str, role: str) -> bool:
        """Each layer's ops, one after the other."""
        return op != "decode_layers"

    def formats(self, op: str, role: str) -> frozenset[str]:
        """None: weights are decoded."""
        return frozenset()


@dataclass(frozen=True, slots=True)
class Teacher:
    """A model in float32 on the host."""

    spec: ModelSpec
    model: Model

    @torch.inference_mode()
    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """float32 [n, H] after the last norm, of one sequence computed at once."""
        inputs = _whole(tokens, self.spec)
        return self.model.forward(inputs, _caches(self.spec, len(tokens))).clone()

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """float32 [n, V]."""
        out = torch.empty(len(tokens), self.spec.vocab_size)
        self.model.logits(out, self.hidden(tokens))
        return out

    @torch.inference_mode()
    def vector(self, tokens: Sequence[int]) -> Tensor:
        """float32 [H], pooled and normalised as the model asks."""
        out = torch.empty(1, self.spec.hidden_size)
        starts = torch.tensor([0, len(tokens)], dtype=torch.int32)
        pool = OPS["pool"].load_reference()
        pool(out, self.hidden(tokens), starts, self.spec.pooling, self.spec.normalize_pooled)
        return out[0]


@cache
def teacher_of(name: str) -> Teacher:
    """The teacher of a model of `models`, made once in a process."""
    source = open_model(ModelConfig(model=str(models.folder_of(name))))
    longest, device = models.MAX_LEN, _Host()
    ops: Any = _References()
    if name in models.TRANSFORMERS:
        from vllm_core.models import transformers_track

        spec: ModelSpec = transformers_track.describe(source.config, dtype="float32", path=str(source.path))
        model: Any = transformers_track.build(spec, source, device, ops, max_tokens=longest, max_model_len=longest)
    else:
        pooling: Any = source.pooling
        spec = catalog.describe(source.config, dtype="float32", pooling=pooling)
        model = build_model(spec, device, ops, max_tokens=longest, max_model_len=longest)
    model.load(source.weights())
    return Teacher(spec, model)


def _caches(spec: ModelSpec, length: int) -> list[Any]:
    """One KV of each layer, with room for ``length`` tokens behind the null block."""
    bind = OPS["kv_bind"].load_reference()
    caches: list[Any] = [None] * len(spec.layers)
    for group in spec.kv_groups():
        for layer in group.layers:
            caches[layer] = _cache(bind, group, length)
    return caches


def _cache(bind: Callable[..., Any], group: KVGroupSpec, length: int) -> Any:
    layout = kv_layout(group, "float32", BLOCK)
    memory = torch.zeros(-(-length // BLOCK) + 1, layout.block_bytes, dtype=torch.uint8)
    return bind(memory, group.num_kv_heads, group.head_size, "float32", BLOCK)


def _whole(tokens: Sequence[int], spec: ModelSpec) -> StepInputs:
    """One row of all tokens, in blocks 1, 2, 3..."""
    length = len(tokens)
    groups = len(spec.kv_groups())
    table = torch.arange(1, -(-length // BLOCK) + 1, dtype=torch.int32)[None]
    int32 = torch.int32
    return StepInputs(
        token_ids=torch.tensor(list(tokens), dtype=int32),
        positions=torch.arange(length, dtype=int32),
        slots=torch.zeros(1, dtype=int32),
        query_start=torch.tensor([0, length], dtype=int32),
        seq_lens=torch.tensor([length], dtype=int32),
        sample_rows=torch.tensor([length - 1]),
        sample_slots=torch.zeros(1, dtype=torch.int64),
        sample_lengths=torch.tensor([length], dtype=int32),
        slot_mapping=(torch.arange(length) + BLOCK,) * groups,
        block_tables=(table,) * groups,
        num_tokens=length,
        num_rows=1,
        max_query_len=length,
        max_seq_len=length,
    )


@lru_cache(maxsize=256)
def _logits(name: str, tokens: tuple[int, ...]) -> Tensor:
    return teacher_of(name).logits(tokens)


def logits_after(name: str, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """float32 [len(output), V]: what the reference says before each token of ``output``."""
    return _logits(name, (*prompt, *output))[len(prompt) - 1 : -1]


@dataclass(slots=True)
class Marks:
    """What judging a number of tokens found."""

    tokens: int = 0
    ties: int = 0
    wrong: str = ""

    def add(self, name: str, dtype: str, prompt: Sequence[int], output: Sequence[int], what: str = "") -> None:
        """Judge the tokens that an engine of ``dtype`` generated greedily with the model ``name`` after ``prompt``."""
        if not output or self.wrong:
            return
        logits = logits_after(name, prompt, output)
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        behind = logits.amax(1) - chosen
        self.tokens += len(output)
        self.ties += int((behind > 0).sum())
        far = (behind > TIE[dtype]).nonzero()[:, 0].tolist()
        if far:
            at, best = far[0], int(logits[far[0]].argmax())
            self.wrong = (
                f"{what or name}: token {at} of {len(output)} after a prompt of {len(prompt)} is {output[at]}, the reference "
                f"says {best}, whose logit is larger by {float(behind[at]):.3g}"
            )

    def problem(self, dtype: str) -> str:
        """What is wrong with all of them, or nothing."""
        if self.wrong:
            return self.wrong
        most = max(1, int(MOST_TIES[dtype] * self.tokens))
        return f"{self.ties} of {self.tokens} tokens are near-ties, at most {most} may be" if self.ties > most else ""
