"""The device, opened once in this process; and child processes for what must not happen in this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from vllm_toy import extension, probe
from vllm_toy.device import ToyDevice


@pytest.fixture(scope="session")
def devices() -> list[ToyDevice]:
    """Both devices; skips without a compiler."""
    found = probe.probe()
    if not found.devices:
        pytest.skip("; ".join(check.detail for check in found.failures))
    torch.set_num_threads(1)
    return [ToyDevice(facts) for facts in reversed(found.devices)][::-1]


@pytest.fixture
def device(devices: list[ToyDevice]) -> ToyDevice:
    """The first device, current."""
    torch.accelerator.set_device_index(0)
    return devices[0]


@pytest.fixture(scope="session")
def child() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code with a device named `device`, in a process of its own, with more variables in its environment."""
    opened = "import torch; from vllm_toy import probe, ops; from vllm_toy.device import ToyDevice\n"
    opened += "device = ToyDevice(probe.probe().devices[0]); x = device.adopt('workspace', torch.ones(2, 4))\n"

    def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
        extension.load()  # compiled before a time limit runs
        command = [sys.executable, "-c", opened + code]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    return run
