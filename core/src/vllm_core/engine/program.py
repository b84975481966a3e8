"""Core's own step program: composes bound ops, eagerly.

One step: the packed difference is staged and applied (`batch_update`), the inputs gathered (`build_step`), the model
run, and the tail (`logit_adjust`, `sample`, `advance`, or `pool`) brings tokens that stay on the device for the next
step and are copied to the host for the reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from vllm_core.api import (
    BatchState,
    Device,
    Event,
    HostLogprobs,
    Logprobs,
    MemoryBudgetError,
    StepDelta,
    StepHandle,
    StepInputs,
    StepKey,
    StepProgram,
    StepResult,
)
from vllm_core.api import batch as layout
from vllm_core.engine.captured import FORWARD, CapturedStep, CapturedSteps
from vllm_core.errors import UnsupportedError
from vllm_core.ops.dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    import numpy.typing as npt

    from vllm_core.engine.binding import BoundOps
    from vllm_core.models.spec import ModelSpec

STAGES = 4
"""Staging buffers: one more than the steps that can be in flight, plus one being filled."""

_ADJUST = layout.F_PENALTIES | layout.F_BIAS | layout.F_MIN_LEN | layout.F_BAD_WORDS


class Model(Protocol):
    """What the program needs of a model."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the weights."""

    def forward(self, inputs: StepInputs, kv: Sequence[Any], rows: torch.Tensor | None = None) -> torch.Tensor:
        """Return hidden states [T, H] after the final norm, or [R, H] of ``rows``."""

    def logits(self, out: torch.Tensor, rows: torch.Tensor) -> None:
        """Write float32 [R, V] from hidden rows [R, H]."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """Sizes of the batch state. `max_blocks` per group is the longest block table."""

    num_slots: int
    max_len: int
    max_blocks: tuple[int, ...]
    tokens_per_block: tuple[int, ...]


def allocate_state(device: Device, shape: StateShape) -> BatchState:
    """Allocate the batch state of ``shape`` in the pool ``state``."""
    rows = shape.num_slots + 1

    def table(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return device.allocate("state", (rows, *size), dtype)

    return BatchState(
        num_slots=shape.num_slots,
        tokens=table(shape.max_len + 1),
        computed=table(),
        params=table(layout.ADMIT_WORDS),
        bias_ids=table(layout.MAX_BIAS),
        bias_values=table(layout.MAX_BIAS, dtype=torch.float32),
        stop_ids=table(layout.MAX_STOP),
        bad_words=table(layout.MAX_BAD_WORDS),
        block_tables=tuple(table(n) for n in shape.max_blocks),
        tokens_per_block=shape.tokens_per_block,
    )


def bytes_of(spec: ModelSpec, shape: StateShape, rows: int) -> int:
    """What the batch state and the tail of a program take of the device at most, in steps of up to ``rows`` sequences."""
    words = shape.max_len + 2 + layout.ADMIT_WORDS + 2 * layout.MAX_BIAS + layout.MAX_STOP + layout.MAX_BAD_WORDS
    state = 4 * (shape.num_slots + 1) * (words + sum(shape.max_blocks))
    numbers = spec.vocab_size if spec.pooling is None else STAGES * spec.pooled_size
    return state + rows * (spec.hidden_size * TORCH_DTYPES[spec.dtype].itemsize + 4 * numbers + 5 * STAGES)


class _Rows:
    """Where sampled tokens and flags go, on the device and on the host, cut to ``count`` rows.

    Both lie in one buffer, so that one copy brings them: int32 tokens [rows], then bool flags [rows].
    """

    __slots__ = ("_host", "_whole", "arrays", "count", "counts", "host_bytes", "nonfinite", "raw", "tokens")

    def __init__(self, device: Device, rows: int, raw: torch.Tensor | None) -> None:
        self.raw = device.allocate("workspace", (5 * rows,), torch.uint8) if raw is None else raw
        self.host_bytes = self.raw if raw is None else device.pinned((5 * rows,), torch.uint8)
        self._whole, self._host = _split(self.raw, rows), _split(self.host_bytes, rows)
        self.cut(rows)

    def cut(self, count: int) -> None:
        """Steps often have as many rows as the one before: then nothing is cut again."""
        self.count = count
        self.counts = np.ones(count, dtype=np.int32)
        self.tokens, self.nonfinite = self.first(count)
        tokens, nonfinite = (tensor[:count] for tensor in self._host)
        self.arrays = tokens.numpy(), nonfinite.numpy()

    def first(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and flags of the first rows, on the device."""
        tokens, nonfinite = self._whole
        return tokens[:count], nonfinite[:count]


def _split(raw: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return raw[: 4 * rows].view(torch.int32).view(rows, 1), raw[4 * rows :].view(torch.bool)


class _Stages:
    """Buffers through which int32 words go to the device in one copy, from pinned memory where that is not the host itself."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host_memory = device.facts.memory_kind == "host"
        self._stages: list[tuple[torch.Tensor, torch.Tensor, Event] | None] = [None] * STAGES

    def bring(self, words: npt.NDArray[np.int32], turn: int) -> torch.Tensor:
        """Copy ``words`` by the stage of this turn; it may still be on its way to the device."""
        host = torch.from_numpy(words)
        if self._host_memory:
            return host
        stage, count = self._stages[turn], host.numel()
        if stage is None or stage[0].numel() < count:
            size = max(4096, 1 << (count - 1).bit_length())
            stage = (
                self._device.pinned((size,), torch.int32),
                self._device.allocate("state", (size,), torch.int32),
                self._device.event(),
            )
            self._stages[turn] = stage
        else:
            stage[2].wait()
        pinned, target, event = stage
        pinned[:count].copy_(host)
        target[:count].copy_(pinned[:count], non_blocking=True)
        event.record()
        return target[:count]


class _Handle:
    """A step whose results are on the host once the event (if any) has passed."""

    __slots__ = ("_event", "_finish")

    def __init__(self, finish: StepResult, event: Event | None) -> None:
        self._finish = finish
        self._event = event

    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def result(self) -> StepResult:
        if self._event is not None:
            self._event.wait()
        return self._finish


class ComposedProgram(StepProgram):
    """Runs steps by calling bound ops one after the other. `longest` is the context in tokens that its model was made for."""

    def __init__(
        self,
        spec: ModelSpec,
        model: Model,
        device: Device,
        ops: BoundOps,
        state: BatchState,
        kv: Sequence[Any],
        rows: int,
        graph_sizes: Sequence[int] = (),
        kv_memory: Sequence[torch.Tensor | None] = (),
        longest: int = 0,
    ) -> None:
        self.spec = spec
        self.longest = longest
        self.state = state
        self.kv_memory = kv_memory
        self._model = model
        self._device = device
        self._kv = kv
        self._host_memory = device.facts.memory_kind == "host"
        self._batch_update = ops.get("batch_update", "state")
        self._build_step = ops.get("build_step", "state")
        self._advance = ops.get("advance", "state")
        self._gather = ops.get("gather_rows", "tail")
        self._adjust = ops.get("logit_adjust", "tail")
        self._mask = ops.get("grammar_mask", "tail")
        self._sample = ops.get("sample", "tail")
        self._logprobs = ops.get("log_probabilities", "tail")
        self._pool = ops.get("pool", "tail") if spec.pooling is not None else None
        self._features = np.zeros(state.num_slots + 1, dtype=np.int32)
        sizes = [size for size in graph_sizes if size <= rows] if spec.pooling is None else []
        self._allocate_tail(rows, captures=bool(sizes))
        self._stages, self._mask_stages = _Stages(device), _Stages(device)
        self._turn = 0
        self._no_autograd = torch.inference_mode()
        self._captured = CapturedSteps(device, state, self._decode, sizes, STAGES) if sizes else None

    def _allocate_tail(self, rows: int, *, captures: bool) -> None:
        spec, device = self.spec, self._device
        dtype = TORCH_DTYPES[spec.dtype]
        self._rows = rows
        self._hidden = device.allocate("workspace", (rows, spec.hidden_size), dtype)
        if spec.pooling is None:
            self._logits = self._all_logits = device.allocate("workspace", (rows, spec.vocab_size), torch.float32)
        else:
            self._pooled = [device.allocate("workspace", (rows, spec.pooled_size), torch.float32) for _ in range(STAGES)]
        # Tokens and flags of steps in flight must not be overwritten, so they rotate with the staging buffers. On a device
        # with memory of its own only the host's side rotates: the device itself keeps steps and copies in order. So it is with
        # captured steps, which write to one address.
        shared = None if self._host_memory and not captures else device.allocate("workspace", (5 * rows,), torch.uint8)
        self._results = [_Rows(device, rows, shared) for _ in range(STAGES)]

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Pass the weights to the model."""
        self._model.load(weights)

    def check_sleep(self) -> None:
        """Raises UnsupportedError where the device brings nothing back."""
        try:
            self._device.restore("weights")  # to a pool that is there nothing happens
        except UnsupportedError as error:
            raise UnsupportedError(
                "Engine cannot sleep here",
                on=error.on,
                found=error.found,
                expected=error.expected,
                fix="leave the engine awake, or stop it to give its memory back",
            ) from error

    def sleep(self) -> None:
        """Weights to the host, KV cache dropped. Raises MemoryBudgetError, with nothing given back, where the host is full."""
        device = self._device
        device.synchronize()
        if self._captured is not None and not device.stable_addresses:
            self._captured.clear()
        # What may fail comes first: steps go on after that.
        device.offload("weights")
        device.release("kv")

    def wake_up(self) -> None:
        """The reverse. Raises MemoryBudgetError, with nothing taken."""
        self._device.restore("weights")
        try:
            self._device.restore("kv")
        except MemoryBudgetError:
            self._device.offload("weights")
            raise

    def rehearse(self) -> None:
        """Within the device's rehearsal: run the body of every step that may be captured later."""
        if self._captured is not None:
            with self._no_autograd:
                self._captured.rehearse()

    @property
    def kv(self) -> Sequence[Any]:
        """The KV object of each layer, as its provider made it of `kv_memory`."""
        return self._kv

    @property
    def captured(self) -> CapturedSteps | None:
        """The captured steps; None where nothing is captured."""
        return self._captured

    def prepare(self, key: StepKey) -> StepKey | CapturedStep:
        """Capture a decode step on first use; the key itself says all of an eager one."""
        if self._captured is None:
            return key
        with self._no_autograd:
            return self._captured.find(key) or key

    def run(self, executable: Any, delta: StepDelta) -> StepHandle:
        """Run one step; returns before the device is done where it is asynchronous."""
        with self._no_autograd:
            return self._run(executable, delta)

    def _run(self, executable: StepKey | CapturedStep, delta: StepDelta) -> StepHandle:
        header: list[int] = delta.packed[: layout.HEADER_WORDS].tolist()
        if isinstance(executable, CapturedStep):
            if executable.serves(header):
                return self._replay(executable, delta, header)
            executable = executable.key
        return self._run_eagerly(executable, delta, header)

    def _replay(self, step: CapturedStep, delta: StepDelta, header: list[int]) -> StepHandle:
        """A captured decode step: one copy, the difference (if any), one replay."""
        assert self._captured is not None, "a captured step has its captured program"
        packed = self._captured.stage(step, delta.packed, header, self._turn)
        self._turn = (self._turn + 1) % STAGES
        if header[layout.H_ADMITTED]:
            self._mirror_features(delta.packed, header[layout.H_ADMITTED])
        if header[layout.H_ADMITTED] or header[layout.H_BLOCKS] or header[layout.H_EXTRA]:
            self._batch_update(self.state, packed, header)
        step.graph.replay()
        rows = self._results[self._turn]
        logprobs: Logprobs | None = None
        if step.has_eager_tail:
            rows.cut(step.size)
            logprobs = self._tail(rows, step.key, delta, step.inputs, self._all_logits[: step.size])
        if header[layout.H_NUM_SAMPLED] != rows.count:
            rows.cut(header[layout.H_NUM_SAMPLED])
        return self._finish(rows, logprobs, None)

    def _decode(self, packed: torch.Tensor, header: list[int], features: int) -> StepInputs:
        """What a captured step repeats: a decode step whose rows all sample, on fixed addresses; without `FORWARD`'s tail."""
        inputs: StepInputs = self._build_step(self.state, packed, header)
        count = header[layout.H_NUM_SAMPLED]
        hidden = self._model.forward(inputs, self._kv)
        tokens, nonfinite = self._results[0].first(count)
        logits = self._all_logits[:count]
        self._model.logits(logits, hidden)
        if features == FORWARD:
            return inputs
        slots, lengths = inputs.sample_slots, inputs.sample_lengths
        if features & _ADJUST:
            self._adjust(logits, self.state, slots, lengths, features)
        self._sample(tokens, nonfinite, logits, self.state, slots, lengths, features)
        self._advance(self.state, inputs, tokens)
        return inputs

    def _run_eagerly(self, key: StepKey, delta: StepDelta, header: list[int]) -> StepHandle:
        packed = self._stages.bring(delta.packed, self._turn)
        self._turn = (self._turn + 1) % STAGES
        if header[layout.H_ADMITTED]:
            self._mirror_features(delta.packed, header[layout.H_ADMITTED])
        self._batch_update(self.state, packed, header)
        inputs: StepInputs = self._build_step(self.state, packed, header)
        count = header[layout.H_NUM_SAMPLED]
        hidden = self._model.forward(inputs, self._kv, self._wanted(key, inputs, count))
        rows = self._results[self._turn]
        if count != rows.count:
            rows.cut(count)
        if key.tail == "pool":
            return self._pool_tail(rows, inputs, hidden)
        return self._sample_tail(rows, key, delta, inputs, hidden)

    def _wanted(self, key: StepKey, inputs: StepInputs, count: int) -> torch.Tensor | None:
        """Rows whose hidden states are all that the step's tail reads; None is all of them, as where gathering gains little."""
        few = 2 * count <= inputs.num_tokens
        return inputs.sample_rows if few and key.tail != "pool" and not key.features & layout.F_PROMPT_LOGPROBS else None

    def _mirror_features(self, packed: npt.NDArray[np.int32], admitted: int) -> None:
        """Remember each slot's features on the host: prompt log-probabilities need rows without asking the device."""
        end = layout.HEADER_WORDS + admitted * layout.ADMIT_WORDS
        records = packed[layout.HEADER_WORDS : end].reshape(admitted, layout.ADMIT_WORDS)
        self._features[records[:, layout.A_SLOT]] = records[:, layout.A_FEATURES]

    def _sample_tail(self, rows: _Rows, key: StepKey, delta: StepDelta, inputs: StepInputs, hidden: torch.Tensor) -> StepHandle:
        prompt = self._prompt_logprobs(delta, inputs, hidden) if key.features & layout.F_PROMPT_LOGPROBS else None
        if not rows.count:
            self._advance(self.state, inputs, rows.tokens)
            return self._finish(rows, None, prompt)
        logprobs = self._tail(rows, key, delta, inputs, self._logits_of(inputs, hidden, rows.count))
        return self._finish(rows, logprobs, prompt)

    def _tail(self, rows: _Rows, key: StepKey, delta: StepDelta, inputs: StepInputs, logits: torch.Tensor) -> Logprobs | None:
        """From logits to tokens, and to their log-probabilities where the step asks for them."""
        tokens, slots, lengths = rows.tokens, inputs.sample_slots, inputs.sample_lengths
        changed = key.features & (_ADJUST | layout.F_MASK)
        raw = logits.clone() if key.features & layout.F_LOGPROBS and changed else logits
        if key.features & _ADJUST:
            self._adjust(logits, self.state, slots, lengths, key.features)
        # The masks are looked at here, not before: they wait for the tokens of the step before this one.
        if key.features & layout.F_MASK and delta.mask_rows:
            self._apply_masks(logits, delta)
        self._sample(tokens, rows.nonfinite, logits, self.state, slots, lengths, key.features)
        logprobs: Logprobs | None = None
        if key.features & layout.F_LOGPROBS:
            logprobs = self._logprobs(raw, tokens[:, 0].long(), delta.num_logprobs)
        self._advance(self.state, inputs, tokens)
        return logprobs

    def _logits_of(self, inputs: StepInputs, hidden: torch.Tensor, count: int) -> torch.Tensor:
        rows = hidden
        if count != len(hidden):
            rows = self._hidden[:count]
            self._gather(rows, hidden, inputs.sample_rows)
        if count != len(self._logits):
            self._logits = self._all_logits[:count]
        self._model.logits(self._logits, rows)
        return self._logits

    def _apply_masks(self, logits: torch.Tensor, delta: StepDelta) -> None:
        """Bring the masks in one copy: per constrained row the row (two words, int64), then its words, all rows first."""
        masks = delta.mask_rows
        count, width = len(masks), len(next(iter(masks.values())))
        packed = np.empty(count * (2 + width), dtype=np.int32)
        packed[: 2 * count].view(np.int64)[:] = list(masks)
        np.stack(list(masks.values()), out=packed[2 * count :].reshape(count, width))
        there = self._mask_stages.bring(packed, self._turn)
        self._mask(logits, there[2 * count :].view(count, width), there[: 2 * count].view(torch.int64))

    def _prompt_logprobs(self, delta: StepDelta, inputs: StepInputs, hidden: torch.Tensor) -> Logprobs | None:
        """Log-probabilities of each following token, for all tokens of the rows that want them."""
        packed = delta.packed
        steps = packed[len(packed) - 4 * int(packed[layout.H_SCHEDULED]) :].reshape(-1, 4)
        wanted = (self._features[steps[:, 0]] & layout.F_PROMPT_LOGPROBS) != 0
        starts = np.concatenate(([0], np.cumsum(steps[:, 1])))
        index = [np.arange(starts[row], starts[row + 1]) for row in np.flatnonzero(wanted)]
        if not index:
            return None
        where = torch.from_numpy(np.concatenate(index)).to(hidden.device)
        slots = torch.from_numpy(np.repeat(steps[:, 0], steps[:, 1]).astype(np.int64)).to(hidden.device)[where]
        following = self.state.tokens[slots, (inputs.positions[where] + 1).long()].long()
        parts = []
        for begin in range(0, len(where), self._rows):
            part = where[begin : begin + self._rows]
            rows = self._hidden[: len(part)]
            self._gather(rows, hidden, part)
            logits = self._all_logits[: len(part)]
            self._model.logits(logits, rows)
            parts.append(self._logprobs(logits, following[begin : begin + self._rows], delta.num_logprobs))
        return Logprobs(
            torch.cat([p.chosen for p in parts]),
            torch.cat([p.rank for p in parts]),
            torch.cat([p.top_ids for p in parts]),
            torch.cat([p.top for p in parts]),
        )

    def _pool_tail(self, rows: _Rows, inputs: StepInputs, hidden: torch.Tensor) -> StepHandle:
        assert self._pool is not None, "a pooling step of a model that does not pool"
        out = self._pooled[self._turn][: inputs.num_rows]
        self._pool(out, hidden, inputs.query_start, self.spec.pooling, self.spec.normalize_pooled)
        self._advance(self.state, inputs, rows.tokens)
        return self._finish(rows, None, None, pooled=out)

    def _finish(
        self, rows: _Rows, logprobs: Logprobs | None, prompt: Logprobs | None, pooled: torch.Tensor | None = None
    ) -> StepHandle:
        """Start the copies to the host and return the handle that waits for them."""
        if rows.host_bytes is not rows.raw:
            rows.host_bytes.copy_(rows.raw, non_blocking=True)
        tokens, nonfinite = rows.arrays
        result = StepResult(
            tokens,
            rows.counts,
            nonfinite,
            None if logprobs is None else self._host_logprobs(logprobs),
            None if prompt is None else self._host_logprobs(prompt),
            None if pooled is None else self._to_host(pooled),
        )
        if not self._device.asynchronous:
            return _Handle(result, None)
        event = self._device.event()
        event.record()
        return _Handle(result, event)

    def _host_logprobs(self, value: Logprobs) -> HostLogprobs:
        return HostLogprobs(*(self._to_host(t) for t in (value.chosen, value.rank, value.top_ids, value.top)))

    def _to_host(self, tensor: torch.Tensor) -> Any:
        if self._host_memory:
            return tensor.numpy()
        pinned = self._device.pinned(tuple(tensor.shape), tensor.dtype)
        pinned.copy_(tensor, non_blocking=True)
        return pinned.numpy()
