"""Small checks that say what differed; a failed one is a FAIL of the case."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_conformance.case import Evidence, Subject
from vllm_core.api import Device, is_available

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64, torch.uint8, torch.bool)


def expect(holds: bool, detail: str) -> None:
    """Raise AssertionError with the detail unless it holds."""
    if not holds:
        raise AssertionError(detail)


def first_dtype(subject: Subject) -> str:
    """The dtype of cases that are about something else: float32 where it is claimed, since near-ties are rare there."""
    return next(one for one in ("float32", "bfloat16", "float16") if is_available(subject.claims[f"dtype.{one}"]))


def dtypes_of(subject: Subject) -> tuple[torch.dtype, ...]:
    """Dtypes that tensors of this device have: those claimed, and the integers that the engine itself needs."""
    names = ("float32", "bfloat16", "float16")
    claimed = [dtype for name, dtype in zip(names, DTYPES, strict=True) if is_available(subject.claims[f"dtype.{name}"])]
    return (*claimed, *INTEGERS)


def pattern(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A host tensor whose every element tells where it is."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(*shape, generator=generator).to(dtype)
    high = 2 if dtype is torch.bool else 200
    return torch.randint(0, high, tuple(shape), generator=generator).to(dtype)


def put(device: Device, host: Tensor) -> Tensor:
    """A copy on the device, in the pool ``workspace``."""
    there = device.allocate("workspace", tuple(host.shape), host.dtype)
    there.copy_(host)
    return there


def same(found: Tensor, expected: Tensor, what: str) -> None:
    """Bit for bit; ``found`` may be anywhere."""
    here = found.to("cpu")
    expect(here.shape == expected.shape, f"{what}: shape {tuple(here.shape)}, expected {tuple(expected.shape)}")
    expect(here.dtype == expected.dtype, f"{what}: {here.dtype}, expected {expected.dtype}")
    wrong = bits(here) != bits(expected)
    count = int(wrong.sum())
    if count:
        at = int(wrong.nonzero()[0])
        raise AssertionError(f"{what}: {count} of {wrong.numel()} bytes differ, the first at byte {at}")


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a host tensor."""
    flat = tensor.flatten().clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def digest(*tensors: Tensor) -> str:
    """SHA-256 of the bytes of host tensors."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(bits(tensor.to("cpu")).numpy().tobytes())
    return hashed.hexdigest()


def passed(*tensors: Tensor, seed: int | None = None) -> Evidence:
    """PASS, with a digest of what was found."""
    return Evidence(seed=seed, digest=digest(*tensors) if tensors else "")
