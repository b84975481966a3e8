"""The driver, its command-line tool and the toolkit, read from files and from what the tool prints: no device is opened.

Ascend "npu-smi Command Reference", section "Querying Basic Information"; CANN "Software Installation Guide".
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TOOL = "npu-smi"
TOOL_LIMIT_S = 15
TOOL_FOLDERS = ("usr/local/bin", "usr/local/sbin", "usr/local/Ascend/driver/tools")
TOOLKIT_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
TOOLKIT_FOLDERS = ("usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/latest")


class ToolError(Exception):
    """The tool is there and gives no answer; the text says how."""


@dataclass(frozen=True, slots=True)
class Chip:
    """One chip as the tool lists it. `number` is the driver's own count, which `ASCEND_RT_VISIBLE_DEVICES` takes."""

    number: int
    name: str
    bus: str
    memory_bytes: int
    health: str


@dataclass(frozen=True, slots=True)
class Listing:
    """What `npu-smi info` says: its version, which is the driver's, and the chips."""

    version: str
    chips: tuple[Chip, ...]


def run_tool(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> str:
    """What `npu-smi info` prints. Raises FileNotFoundError without the tool, ToolError where it fails."""
    places = os.pathsep.join([environ.get("PATH", ""), *(str(root / folder) for folder in TOOL_FOLDERS)])
    tool = shutil.which(TOOL, path=places)
    if tool is None:
        raise FileNotFoundError(TOOL)
    try:
        done = subprocess.run([tool, "info"], capture_output=True, text=True, timeout=TOOL_LIMIT_S, env=dict(environ))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolError(str(error)) from error
    if done.returncode != 0 or not done.stdout.strip():
        text = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()
        raise ToolError(text[-1])
    return done.stdout


def read_listing(text: str) -> Listing:
    """Read the table of `npu-smi info`. Raises ToolError for text that is none.

    A chip takes two lines: name and health, then its number, bus and memory; with a column Phy-ID that is its number.
    """
    version = re.search(r"Version:\s*(\S+)", text)
    if version is None:
        raise ToolError(next((line.strip() for line in text.splitlines() if line.strip()), "no output"))
    physical, name, health = "Phy-ID" in text, "", ""
    chips: list[Chip] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if "Process id" in line:
            break
        if len(cells) != 3 or not re.match(r"\d", cells[0]):
            continue
        memory = re.findall(r"(\d+)\s*/\s*(\d+)", cells[2])
        if re.match(r"[0-9A-Fa-fx]+:|NA$", cells[1]):
            numbers = cells[0].split()
            number = int(numbers[1]) if physical and len(numbers) > 1 else len(chips)
            chips.append(Chip(number, name, cells[1], int(memory[-1][1]) << 20 if memory else 0, health))
        else:
            name, health = cells[0].split()[-1], cells[1]
    return Listing(version.group(1), tuple(chips))


def driver_version(root: Path = Path("/")) -> str | None:
    """The installed driver package's version, from where its installer put it; None without one."""
    folder = _install_path(root) / "driver"
    return _value(folder / "version.info", "Version")


def _install_path(root: Path) -> Path:
    text = _text(root / "etc/ascend_install.info")
    found = re.search(r"^Driver_Install_Path_Param=(\S+)", text, re.MULTILINE)
    return root / found.group(1).lstrip("/") if found else root / "usr/local/Ascend"


def toolkit_version(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> tuple[str, Path] | None:
    """Version and folder of CANN's toolkit: where its set-up script says, else where its installer puts it; or None."""
    named = [Path(environ[name]) for name in TOOLKIT_VARIABLES if environ.get(name)]
    for folder in [*named, *(root / one for one in TOOLKIT_FOLDERS)]:
        for file in [folder / "ascend_toolkit_install.info", *sorted(folder.glob("*/ascend_toolkit_install.info"))]:
            version = _value(file, "version")
            if version:
                return version, folder
    return None


def _value(path: Path, name: str) -> str | None:
    found = re.search(rf"^{name}\s*=\s*(\S+)", _text(path), re.MULTILINE | re.IGNORECASE)
    return found.group(1) if found else None


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""  # a missing file is an answer
