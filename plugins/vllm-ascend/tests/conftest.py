"""Machines that this platform looks at, written down from public documentation; and children on simulated ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import vllm_simulator
from vllm_ascend import driver
from vllm_ascend.probe import probe
from vllm_core.api import ProbeReport
from vllm_simulator import extension

LIMIT_S = 240
A2_HEAD = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.5.0                   Version: 25.5.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
"""
A2_CHIP = """\
| {n}     {name:<20}| {health:<14}| 91.3        33                0    / 0             |
| 0                         | 0000:{bus}:00.0  | 0           0    / 0          3197 / 65536         |
+===========================+===============+====================================================+
"""
TAIL = """\
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 0       0                 | 4711          | python                   | 3210                    |
+===========================+===============+====================================================+
"""
A3 = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.5.0                   Version: 25.5.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     Ascend910           | OK            | 178.5       36                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3416 / 65536         |
+------------------------------------------------------------------------------------------------+
| 0     Ascend910           | OK            | -           36                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          3195 / 65536         |
+===========================+===============+====================================================+
"""
BROKEN = "DrvMngGetConsoleLogLevel failed. (g_conLogLevel=3)\ndcmi module initialize failed. ret is -8005"


def a2(count: int, name: str = "910B3", health: str = "OK") -> str:
    """What `npu-smi info` prints on a server with ``count`` chips."""
    buses = ("C1", "C2", "81", "82", "01", "02", "41", "42")
    return A2_HEAD + "".join(A2_CHIP.format(n=n, name=name, health=health, bus=buses[n]) for n in range(count)) + TAIL


class Machine:
    """A machine's files and tools."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environ: dict[str, str] = {}
        self.printed: str | Exception = a2(1)
        self.versions: dict[str, str | None] = {"torch": "2.13.0", "torch_npu": "2.13.0"}
        self.write("usr/local/Ascend/driver/version.info", "Version=25.5.0\n")
        self.toolkit("8.5.0")
        self.devices(1)

    def write(self, path: str, text: str = "") -> None:
        """Write a file of the machine."""
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def toolkit(self, version: str) -> None:
        """Install a CANN."""
        text = f"package_name=Ascend-cann-toolkit\nversion={version}\narch=x86_64\n"
        self.write("usr/local/Ascend/ascend-toolkit/latest/x86_64-linux/ascend_toolkit_install.info", text)

    def devices(self, count: int) -> None:
        """Make the device files."""
        for name in (*(f"davinci{n}" for n in range(count)), "davinci_manager", "devmm_svm", "hisi_hdc"):
            self.write(f"dev/{name}")

    def without(self, path: str) -> None:
        """Remove what matches."""
        for found in self.root.glob(path):
            found.unlink()

    def probe(self) -> ProbeReport:
        """Look at it."""

        def tool(environ: Mapping[str, str], root: Path) -> str:
            if isinstance(self.printed, Exception):
                raise self.printed
            return self.printed

        return probe(self.root, self.environ, tool, self.versions.get)


@pytest.fixture(scope="session")
def machine_in() -> Callable[[Path], Machine]:
    """A server with one Atlas A2 chip on which everything is right, with its files in a folder of one's choice."""
    return Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A server with one Atlas A2 chip on which everything is right."""
    return Machine(tmp_path)


@pytest.fixture(scope="session")
def listings() -> dict[str, Any]:
    """Outputs of the driver's tool, and how it fails."""
    return {"a2": a2, "a3": A3, "broken": driver.ToolError(BROKEN.splitlines()[-1]), "missing": FileNotFoundError("npu-smi")}


@pytest.fixture(scope="session")
def simulated() -> Callable[..., dict[str, str]]:
    """The environment of a child on a simulated NPU. Skips without a compiler."""
    if extension.compiler() is None:
        pytest.skip("no C++ compiler")

    def environment(**settings: Any) -> dict[str, str]:
        base = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        return vllm_simulator.environment(environ=base, pose="npu", **{"memory_mib": 512, **settings})

    return environment


@pytest.fixture(scope="session")
def child() -> Callable[..., Any]:
    """Run a file of this folder, or code, in a process; returns the JSON on its last line."""

    def run(what: str | Path, *arguments: str, environ: Mapping[str, str] | None = None) -> Any:
        command = [sys.executable, *([str(what)] if isinstance(what, Path) else ["-c", what]), *arguments]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run
