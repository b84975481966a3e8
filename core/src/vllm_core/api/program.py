"""Step programs: what runs one engine step on a device.

Core's own composes ops; a platform may bring its own (a compiler of static graphs, a remote device, a flat
model). All are judged by the same conformance levels. Deltas and results are host bytes, so a program may live in
another process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from vllm_core.api.kv import KVGroupSpec, KVLayout
from vllm_core.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Tail = Literal["sample", "verify", "pool", "none"]


@dataclass(frozen=True, slots=True)
class StepKey:
    """What a captured or compiled step is specialised on; hashable and small.

    slots and tokens are padded counts (equal to the exact ones where a program does not pad), `tokens_per_slot` is
    the most tokens of one row, `features` the union of the bits `vllm_core.api.batch.F_*` over the sampled rows.
    """

    slots: int
    tokens: int
    tokens_per_slot: int
    tail: Tail
    features: int = 0


@dataclass(frozen=True, slots=True)
class StepDelta:
    """The packed buffer of `vllm_core.api.batch`, int32, plus what only the host knows.

    `num_logprobs` is the largest K asked for in this step. `mask_rows` maps sampled row to a packed bit mask
    (uint32 words over the vocabulary) for constrained steps, whose key has `F_MASK`. It may wait, when it is first looked at,
    for the tokens of the step before: a program looks at it after it has launched what does not depend on it. It may be empty.
    """

    packed: npt.NDArray[np.int32]
    num_logprobs: int = 0
    mask_rows: Mapping[int, npt.NDArray[np.int32]] = field(default_factory=dict)


@dataclass(slots=True)
class StepResult:
    """One step's results on the host; R sampled rows in the order of the delta.

    tokens int32 [R, T], counts int32 [R] (how many of the T are valid), nonfinite bool [R] (logits were NaN or inf:
    the request fails). Log-probabilities and pooled vectors only when the step asked for them. `prompt_logprobs`
    covers all tokens of rows that have `F_PROMPT_LOGPROBS`, in row order.
    """

    tokens: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]
    nonfinite: npt.NDArray[np.bool_]
    logprobs: HostLogprobs | None = None
    prompt_logprobs: HostLogprobs | None = None
    pooled: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class HostLogprobs:
    """`vllm_core.api.batch.Logprobs` on the host."""

    chosen: npt.NDArray[np.float32]
    rank: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top: npt.NDArray[np.float32]


class StepHandle(Protocol):
    """A step in flight."""

    def ready(self) -> bool:
        """Whether `result` would return without waiting."""

    def result(self) -> StepResult:
        """Wait for the step's copies and return them. Raises what the device raised."""


class Executable(Protocol):
    """What `prepare` returned; opaque to core."""


class StepProgram(ABC):
    """Runs steps. Called from the engine's thread; `run` must not wait for the device.

    A row may attend to blocks that another row of the same step fills with several tokens: a layer's KV is written for all rows
    before any of it is read. Where every row has one token, none attends to what another one writes.
    """

    @abstractmethod
    def load(self, weights: Any) -> None:
        """Take the model's weights: an iterable of (name, host tensor), read once.

        Names are those of the Hugging Face checkpoint without the model's prefix: ``layers.0.mlp.up_proj.weight``.
        """

    def reserve(self, num_blocks: tuple[int, ...], max_model_len: int) -> None:
        """Make room for the KV cache and the batch state; called once, after `load`, when memory has been measured.

        ``num_blocks`` per KV group, the null block included; sequences have up to ``max_model_len`` tokens. The default
        does nothing. Raises MemoryBudgetError.
        """
        return

    @abstractmethod
    def prepare(self, key: StepKey) -> Executable:
        """Return what runs steps of this key; captures or compiles on first use."""

    @abstractmethod
    def run(self, executable: Executable, delta: StepDelta) -> StepHandle:
        """Launch one step. Steps run in the order of these calls."""

    def check_sleep(self) -> None:
        """Raises UnsupportedError where `sleep` is not possible, which is the default."""
        raise self._keeps_its_memory()

    def sleep(self) -> None:
        """Give weights (kept on the host) and KV cache back; `check_sleep` has passed, and no step is in flight.

        Raises MemoryBudgetError, with nothing given back, where the host has no memory for the weights; steps then go on.
        """
        raise self._keeps_its_memory()

    def wake_up(self) -> None:
        """The reverse of `sleep`. Raises MemoryBudgetError; the program then sleeps on."""
        raise self._keeps_its_memory()

    def _keeps_its_memory(self) -> UnsupportedError:
        return UnsupportedError(
            "Engine cannot sleep",
            on=type(self).__name__,
            found="a step program that keeps its memory while its process runs",
            expected="one worker, and a platform that claims `sleep`",
            fix="stop the engine instead, or serve on one device of a platform that claims it",
        )

    def close(self) -> None:
        """End what the program runs elsewhere; called once, after the last step. The default does nothing."""
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramBudget:
    """What a program brought by a platform has to hold. KV groups are those of the Plan, with the layouts it gave."""

    num_slots: int
    max_tokens: int
    """Most tokens of one step."""
    max_model_len: int
    """Longest sequence asked for; `StepProgram.reserve` says what fits."""
    kv_groups: tuple[KVGroupSpec, ...]
    kv_layouts: tuple[KVLayout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOffer:
    """A step program or flat model that a platform brings.

    `entry` is ``"module:callable"``, called with keyword arguments: ``spec`` (the model, a `vllm_core.models.spec.ModelSpec`
    whose fields minors only add to), ``device``, ``bound`` (the Plan's call sites: none, a brought program has its own
    code) and ``budget`` (a ProgramBudget). It returns a StepProgram.
    `architectures` are model architectures, `devices` device architectures; empty means any. `dtypes` and `kv_dtypes`: None
    means any. `proven_faster` names the recorded comparison that shows it; without one it is used only when asked for by
    name, or where core's own program cannot run. `block_sizes` are tried in this order; `kv_layout` is as in `Offer`, and
    without one the program runs no model that has a KV cache.
    """

    name: str
    entry: str
    kind: Literal["program", "flat"]
    architectures: frozenset[str]
    devices: frozenset[str]
    proven_faster: str | None = None
    dtypes: frozenset[str] | None = None
    kv_dtypes: frozenset[str] | None = None
    block_sizes: tuple[int, ...] = (16, 32, 64, 128, 256)
    kv_layout: Callable[[KVGroupSpec, str, int], KVLayout] | None = None
