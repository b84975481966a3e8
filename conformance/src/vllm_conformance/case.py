"""What a case is, what it is given, and what it hands back: the border between the levels' cases and the machinery.

A module of `vllm_conformance.cases` defines

    collect(claims: Mapping[str, Support], offers: Sequence[Offer], facts: DeviceFacts) -> Iterator[Case]

which touches no device and imports no torch. It must be monotone: which ids it yields depends on whether each claim is
available or absent, on which ops have an offer, and on nothing else (``facts`` may go into ``params``, not into ids), so
that the must-pass lists can say for each id under which conditions it is required (`vllm_conformance.lists`).

``run`` of a case names a function ``(subject: Subject, params: Mapping[str, Any]) -> Evidence``. It runs in a child process
that takes many cases, one after the other. What it raises is a FAIL, `MissingDeviceError` apart, which is NOT_RUN;
`pytest.skip` is an ILLEGAL_SKIP; death of the process is a CRASH and the end of the time limit a HANG, both seen by the parent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from vllm_core.errors import VLLMCoreError

if TYPE_CHECKING:
    from vllm_core.api import Device, DeviceFacts, Offer, Support
    from vllm_core.registry.discover import Found
    from vllm_core.registry.load import Loaded

Size = Literal["small", "medium", "large"]
TIME_LIMITS_S: Mapping[Size, float] = {"small": 20.0, "medium": 60.0, "large": 240.0}
"""Time limit of one case, in seconds, by size class. Opening the device is charged to no case, and has the largest."""


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to prove.

    `id` is unique and stable, ``L2/paged_attention/bfloat16/decode/seed3``: the must-pass lists hold ids. `group` names the
    op, capability or subject that it proves (``op:rms_norm``, ``capability:graphs``, ``device:streams``); `run` the function,
    ``module:name``; `params` its JSON values. A param ``ci`` that is True puts the case into the subset of that name.
    """

    id: str
    level: int
    group: str
    size: Size
    run: str
    params: Mapping[str, Any] = field(default_factory=dict)


class Subject(Protocol):
    """The platform under test, in the child process: its plugin is loaded, its devices are opened when first asked for."""

    @property
    def platform(self) -> str:
        """Name of the platform."""

    @property
    def found(self) -> Found:
        """The entry point and its distribution."""

    @property
    def loaded(self) -> Loaded:
        """The plugin, imported and checked; its `start` hook has been called before `device` is first returned."""

    @property
    def claims(self) -> Mapping[str, Support]:
        """The manifest's answer for every capability."""

    @property
    def offers(self) -> Sequence[Offer]:
        """What may serve an op here: the platform's offers, those of kernel packages, and core's references where the
        device is fully eager (``kind == "reference"``), in no particular order.
        """

    @property
    def facts(self) -> DeviceFacts:
        """The device under test, as probed."""

    @property
    def all_facts(self) -> Sequence[DeviceFacts]:
        """All devices of the platform with the same architecture, the one under test first."""

    @property
    def device(self) -> Device:
        """The device under test; opened once in a process, the same for all its cases."""

    def peer(self, index: int = 1) -> Device:
        """The device ``all_facts[index]``, opened once. Raises MissingDeviceError where there are fewer."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the run, JSON values."""


Outcome = Literal["PASS", "REFUSED", "FAIL", "UNDERCLAIMED", "BAD_REFUSAL", "ILLEGAL_SKIP"]
"""What a case can say of itself. A claim that is absent although the thing works is UNDERCLAIMED; a refusal that names no
reason, or not the right one, or leaves the device unusable, is a BAD_REFUSAL; not running what had to run an ILLEGAL_SKIP.
"""


@dataclass(slots=True)
class Evidence:
    """What a case found.

    `detail` says what differed, by position and value; `seed` is that of the inputs; `digest` a SHA-256 of the output, empty
    where outputs need not repeat; `calls` counts calls by kind of provider (``kernel``, ``vendor``, ``reference``, ``host``);
    `measured` holds numbers with their unit in the name (``decode_tokens_per_s``), reported and not judged.
    """

    outcome: Outcome = "PASS"
    detail: str = ""
    seed: int | None = None
    digest: str = ""
    calls: dict[str, int] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)


Run: TypeAlias = "Callable[[Subject, Mapping[str, Any]], Evidence]"
Collect: TypeAlias = "Callable[[Mapping[str, Support], Sequence[Offer], DeviceFacts], Iterator[Case]]"


class MissingDeviceError(VLLMCoreError):
    """A case needs a device that is not here. Its row is NOT_RUN, and the run INCOMPLETE."""
