"""What is simulated: which vendor's modules, which chip, how many, how much memory, and how it fails. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_simulator.chips import CHIPS, DEFAULT_CHIP, POSES, Chip

KINDS = ("oom", "lost", "hang", "crash")


@dataclass(frozen=True, slots=True)
class Fault:
    """How the device is to fail: at the allocation or launch ``number``, or at the op named ``op``."""

    kind: str
    op: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One simulated machine. Raises ValueError for what cannot be simulated.

    `fail`: ``oom:N`` the N-th allocation fails; ``lost:N`` or ``lost:OP`` the device is gone from that launch on;
    ``hang:N``, ``hang:OP``, ``crash:N``, ``crash:OP``; several with commas. `blocking` runs each launch at once. `interpret`
    runs Triton's kernels on the device, in Triton's interpreter (poses hip and xpu); without it they cannot be compiled.
    """

    pose: str
    chip: str = ""
    devices: int = 1
    memory_mib: int = 2048
    fail: str = ""
    blocking: bool = False
    interpret: bool = False

    def __post_init__(self) -> None:
        if self.pose not in POSES:
            raise ValueError(f"pose {self.pose!r}: use one of {', '.join(POSES)}")
        object.__setattr__(self, "chip", self.chip or DEFAULT_CHIP[self.pose])
        if self.chip not in CHIPS or CHIPS[self.chip].pose != self.pose:
            fitting = ", ".join(name for name, chip in CHIPS.items() if chip.pose == self.pose)
            raise ValueError(f"chip {self.chip!r} does not pose as {self.pose}: use one of {fitting}")
        if not 1 <= self.devices <= 16 or self.memory_mib < 1:
            raise ValueError(f"{self.devices} devices of {self.memory_mib} MiB: use 1 to 16 devices with memory")
        if self.interpret and self.pose == "npu":
            raise ValueError("pose npu has no Triton: interpret goes with hip and xpu")
        self.faults  # noqa: B018 - raises where it cannot be read

    @property
    def data(self) -> Chip:
        """The chip's data."""
        return CHIPS[self.chip]

    @property
    def memory_bytes(self) -> int:
        """Memory of each device."""
        return self.memory_mib << 20

    @property
    def faults(self) -> tuple[Fault, ...]:
        """`fail`, read. Raises ValueError."""
        return tuple(_fault(one) for one in self.fail.split(",") if one)

    def write(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Settings:
        """The settings of a file."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def _fault(text: str) -> Fault:
    kind, _, what = text.partition(":")
    number = int(what) if what.isdecimal() else 0
    if kind not in KINDS or not what or (kind == "oom" and not number):
        raise ValueError(f"failure {text!r}: use oom:N, or lost, hang or crash with a launch's number or an op's name")
    return Fault(kind, "" if number else what, number)
