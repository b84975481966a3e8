"""Products whose inputs are rounded to fp8: on which chips, of which weights, and from how many rows on. Imports no kernel."""

from __future__ import annotations

from vllm_core.api import Accepted, CallSite, DeviceFacts, Rejected, Verdict
from vllm_core.api.ops import FP8_ACTIVATION

CHIPS = frozenset({"sm_89", "sm_90", "sm_100", "sm_103"})
"""Those with FP8 in their tensor cores on which torch multiplies with a scale a row of either side; on sm_120 it fails."""

HOPPER = "sm_90"
"""The chip whose cuBLASLt has scales of 128 inputs and of squares, and results in float16 and float32."""

TOOLKIT = (12, 9)
"""CUDA whose cuBLASLt has such scales (its release notes)."""

FEW, FEW_ON_HOPPER = 128, 256
"""Rows up to which kernels that widen the weight in registers are the faster ones."""


def offered(site: CallSite, device: DeviceFacts) -> Verdict:
    """Whether the device does it, and the call site asks for it: others serve those that do not."""
    if FP8_ACTIVATION not in site.features:
        return Rejected("inputs", "exact", "rounded to fp8")
    found = tuple(int(part) for part in device.runtime_version.split(".")[:2] if part.isdecimal())
    if found < TOOLKIT:
        return Rejected("toolkit of torch", ".".join(map(str, TOOLKIT)), device.runtime_version or "unknown")
    return Accepted()


def few(chip: str) -> int:
    """Rows up to which products stay exact."""
    return FEW_ON_HOPPER if chip == HOPPER else FEW


def note(chip: str) -> str:
    """What the Plan says of it."""
    return f"of more than {few(chip)} rows: fewer are exact, and as fast"


def takes(form: str, rows: int, columns: int, chip: str) -> bool:
    """Whether a weight [rows, columns] can be multiplied in fp8."""
    if form == "fp8_block128":
        # Scales of a row are read by pieces of 16 bytes.
        return chip == HOPPER and rows % 128 == 0 and columns % 512 == 0
    return form in ("fp8_tensor", "fp8_channel") and rows % 16 == 0 and columns % 16 == 0


def results(dtype: str, chip: str) -> bool:
    """Whether a product can have results in this dtype."""
    return chip == HOPPER or dtype == "bfloat16"
