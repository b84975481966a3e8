"""Writes the folder that stands for a vendor's installation: entry points, tools, and version files of its toolkit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vllm_simulator.settings import Settings

TORCH_NPU_VERSION = "2.13.0"
CANN_VERSION = "8.5.0"
NPU_DRIVER_VERSION = "25.5.0"


PRELOAD = '''"""Loads the simulated device before torch, which asks once, while it is imported, what it was built with."""

import ctypes
import importlib.util
import sys
from pathlib import Path

LIBRARY = {library!r}


class BeforeTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            folder = Path(importlib.util.find_spec("torch").origin).parent / "lib"
            for needed in ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so"):
                ctypes.CDLL(str(folder / needed))
            ctypes.CDLL(LIBRARY)
        return None


sys.meta_path.insert(0, BeforeTorch())
'''


def make_installation(settings: Settings, folder: Path, library: Path) -> Mapping[str, str]:
    """Write it, unless it is there; returns the variables that the vendor's set-up script would set."""
    settings_file = folder / "settings.json"
    if settings_file.exists():
        return _variables(settings, folder)
    (folder / "bin").mkdir(exist_ok=True)
    if settings.pose == "npu":
        _backend(
            folder,
            "torch_npu",
            TORCH_NPU_VERSION,
            "from vllm_simulator.poses.npu import become\n\nbecome(__name__, __path__[0])\n",
        )
        _tool(folder / "bin" / "npu-smi", smi(settings))
        toolkit = folder / "ascend-toolkit"
        toolkit.mkdir(exist_ok=True)
        text = f"package_name=Ascend-cann-toolkit\nversion={CANN_VERSION}\ninnerversion=V100R001C25\narch=x86_64\nos=linux\n"
        (toolkit / "ascend_toolkit_install.info").write_text(text, encoding="utf-8")
    else:
        (folder / "sitecustomize.py").write_text(PRELOAD.format(library=str(library)), encoding="utf-8")
        _backend(
            folder,
            "simulated_backend",
            "0",
            f"from vllm_simulator.poses.{settings.pose} import become\n\nbecome(__path__[0])\n",
        )
    settings.write(settings_file)
    return _variables(settings, folder)


def _variables(settings: Settings, folder: Path) -> Mapping[str, str]:
    if settings.pose == "npu":
        return {"ASCEND_HOME_PATH": str(folder / "ascend-toolkit")}
    return {"TRITON_INTERPRET": "1"} if settings.interpret else {}


def _backend(folder: Path, package: str, version: str, code: str) -> None:
    """A package with the entry point through which torch loads it."""
    (folder / package).mkdir(exist_ok=True)
    more = "\n\ndef _autoload() -> None:\n    pass  # importing is all\n"
    doc = '"""Stands for the vendor\'s package of this name; made by vllm-simulator."""\n\n'
    (folder / package / "__init__.py").write_text(doc + code + more, encoding="utf-8")
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{package} = {package}:_autoload\n", encoding="utf-8")


def _tool(path: Path, output: str) -> None:
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{output}END\n", encoding="utf-8")
    path.chmod(0o755)


def smi(settings: Settings) -> str:
    """What `npu-smi info` prints on an Atlas A2 server with ``settings.devices`` chips, in the form of its public reference."""
    name = settings.data.properties["smi_name"]
    rule = "+---------------------------+---------------+----------------------------------------------------+"
    lines = [
        "+" + "-" * 96 + "+",
        f"| npu-smi {NPU_DRIVER_VERSION:<25}Version: {NPU_DRIVER_VERSION:<53}|",
        rule,
        "| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|",
        "| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |",
        rule.replace("-", "="),
    ]
    for index in range(settings.devices):
        lines += [
            f"| {index:<5} {name:<19} | OK            | 91.3        33                0    / 0             |",
            f"| {'0':<26}| 0000:{0xC1 + index:02X}:00.0  | {'0':<12}{'0    / 0':<19}0    / {settings.memory_mib:<14}|",
            rule.replace("-", "="),
        ]
    lines += [
        "| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |",
        rule.replace("-", "="),
    ]
    return "\n".join(lines) + "\n"
