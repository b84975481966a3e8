"""A GPU that is not there: facts, a driver that answers from a table, and kernels in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from vllm_core.api import DeviceFacts
from vllm_cuda.driver import Gpu


def gpu(capability: tuple[int, int] = (9, 0), name: str = "NVIDIA H200") -> Gpu:
    return Gpu(
        index=0,
        id="GPU-394d5c4c-e2e3-22c8-1858-a900fe08625e",
        name=name,
        capability=capability,
        memory_bytes=150109880320,
        integrated=False,
        multiprocessors=132,
        l2_bytes=62914560,
        shared_bytes=232448,
    )


@dataclass
class FakeDriver:
    supports: tuple[int, int]
    found: tuple[Gpu, ...]

    def version(self) -> tuple[int, int]:
        return self.supports

    def gpus(self) -> tuple[Gpu, ...]:
        return self.found


@pytest.fixture
def make_gpu():
    return gpu


@pytest.fixture
def make_driver():
    return FakeDriver


@pytest.fixture
def make_facts():
    def make(architecture: str = "sm_90") -> DeviceFacts:
        return DeviceFacts(
            id="GPU-0",
            name="a GPU",
            device_type="cuda",
            architecture=architecture,
            memory_kind="discrete",
            memory_bytes=80 << 30,
            properties={"index": "0", "multiprocessors": "132"},
        )

    return make
