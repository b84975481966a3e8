"""What is here: device files, driver, `npu-smi`, CANN, torch and torch_npu. Each is checked and reported on its own."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from vllm_ascend import driver
from vllm_ascend.backends.families import ARCHITECTURES, family_named
from vllm_ascend.versions import CANN, TORCH_NPU
from vllm_core.api import DeviceFacts, ProbeReport
from vllm_triton.looking import Looking

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
_CONTAINER = (
    "in a container, start it with --device /dev/davinci0 (and davinci_manager, devmm_svm, hisi_hdc) and the driver mounted"
)


def installed_version(name: str) -> str | None:
    """Version of an installed distribution; None without it. Imports nothing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def probe(
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    tool: Callable[[Mapping[str, str], Path], str] = driver.run_tool,
    version_of: Callable[[str], str | None] = installed_version,
) -> ProbeReport:
    """Look at this machine. The arguments stand for it in tests."""
    look = Looking()
    listing = _tool(look, root, environ, tool)
    _driver(look, root, listing)
    _device_files(look, root, bool(listing and listing.chips))
    cann = _toolkit(look, root, environ)
    torch_fits = _torch(look, version_of, cann is not None)
    chips = _visible(look, listing.chips if listing else (), environ)
    usable = [(index, chip) for index, chip in enumerate(chips) if _chip(look, chip)]
    if cann is None or not torch_fits:
        usable = []
    version = listing.version if listing else ""
    facts = tuple(_facts(index, chip, chips, version, cann or "") for index, chip in usable)
    return ProbeReport(devices=facts, checks=tuple(look.checks))


def _tool(
    look: Looking, root: Path, environ: Mapping[str, str], tool: Callable[[Mapping[str, str], Path], str]
) -> driver.Listing | None:
    try:
        listing = driver.read_listing(tool(environ, root))
    except FileNotFoundError:
        look.failed("npu-smi", "not found", f"install the Ascend driver; {_CONTAINER}")
        return None
    except driver.ToolError as error:
        look.failed("npu-smi", str(error), f"`npu-smi info` and `dmesg` show why; reload or reinstall the driver; {_CONTAINER}")
        return None
    names = ", ".join(f"{chip.name} ({chip.memory_bytes >> 20} MiB)" for chip in listing.chips)
    look.ok("npu-smi", f"version {listing.version}; {len(listing.chips)} chips: {names or 'none'}")
    return listing


def _driver(look: Looking, root: Path, listing: driver.Listing | None) -> None:
    version = driver.driver_version(root)
    if version:
        look.ok("driver", f"version {version}")
    elif listing is not None:
        look.skipped("driver", "no version.info where the driver is installed; npu-smi answers", "mount the driver's folder")
    else:
        look.failed("driver", "no version.info under /usr/local/Ascend/driver", "install the Ascend driver and firmware")


def _device_files(look: Looking, root: Path, found: bool) -> None:
    files = sorted(path.name for path in root.glob("dev/davinci*"))
    if any(name != "davinci_manager" for name in files):
        look.ok("device files", ", ".join(files))
    elif found:
        look.skipped("device files", "no /dev/davinci*; the driver is reached another way")
    else:
        look.failed("device files", "no /dev/davinci*", f"no NPU; or, {_CONTAINER}")


def _toolkit(look: Looking, root: Path, environ: Mapping[str, str]) -> str | None:
    found = driver.toolkit_version(environ, root)
    if found is None:
        hint = "install the CANN toolkit and its kernels, then `source .../ascend-toolkit/set_env.sh`"
        look.failed("CANN", f"no toolkit; {' and '.join(driver.TOOLKIT_VARIABLES)} name none", hint)
        return None
    version, folder = found
    wrong = CANN.refusal(version)
    if wrong:
        look.failed("CANN", f"{wrong}, in {folder}", f"install CANN {CANN.versions}: torch_npu needs it")
        return None
    look.ok("CANN", f"{version} in {folder}")
    return version


def _torch(look: Looking, version_of: Callable[[str], str | None], toolkit: bool) -> bool:
    torch, torch_npu = version_of("torch"), version_of("torch_npu")
    wanted = TORCH_NPU.versions
    if torch_npu is None:
        look.failed("torch_npu", "not installed", f"pip install torch-npu{wanted} torch{wanted}, where CANN is installed")
        return False
    wrong = TORCH_NPU.refusal(torch_npu)
    if wrong:
        look.failed("torch_npu", wrong, f"install torch and torch_npu {wanted}")
        return False
    if torch is None or _numbers(torch) != _numbers(torch_npu):
        look.failed(
            "torch_npu",
            f"{torch_npu}, with torch {torch}",
            "install the torch_npu of the installed torch: both carry its number",
        )
        return False
    if not toolkit:
        hint = "until CANN is there: TORCH_DEVICE_BACKEND_AUTOLOAD=0, or uninstall torch_npu"
        look.failed("torch_npu", f"{torch_npu}, without a CANN that fits: its autoload makes `import torch` fail", hint)
        return False
    look.ok("torch_npu", f"{torch_npu}, with torch {torch}")
    return True


def _visible(look: Looking, chips: tuple[driver.Chip, ...], environ: Mapping[str, str]) -> tuple[driver.Chip, ...]:
    value = environ.get(VISIBLE)
    if value is None or not chips:
        return chips
    wanted = [part.strip() for part in value.split(",") if part.strip()]
    by_number = {str(chip.number): chip for chip in chips}
    unknown = [part for part in wanted if part not in by_number]
    if unknown:
        look.failed(
            VISIBLE, f"{value!r} names {unknown[0]!r}; there are {', '.join(by_number)}", f"unset {VISIBLE}, or name chips"
        )
    else:
        look.ok(VISIBLE, f"{value!r}: {len(wanted)} of {len(chips)} chips")
    return tuple(by_number[part] for part in wanted if part in by_number)


def _chip(look: Looking, chip: driver.Chip) -> bool:
    """Whether it is of a family that this package knows, and healthy."""
    name = f"chip {chip.number}"
    if family_named(chip.name) is None:
        look.failed(
            name, f"{chip.name} is neither Atlas A2 nor A3 ({', '.join(ARCHITECTURES)})", "a newer vllm-ascend may have it"
        )
        return False
    if chip.health not in ("OK", "Warning"):
        look.failed(name, f"{chip.name}, health {chip.health}", "`npu-smi info -t health` shows the fault; reset the chip")
        return False
    look.ok(name, f"{chip.name}, health {chip.health}")
    return True


def _facts(index: int, chip: driver.Chip, chips: tuple[driver.Chip, ...], version: str, cann: str) -> DeviceFacts:
    family = family_named(chip.name)
    distinct = len({one.bus for one in chips}) == len(chips)
    return DeviceFacts(
        id=chip.bus if distinct and chip.bus != "NA" else f"npu-{chip.number}",
        name=f"Ascend {chip.name.removeprefix('Ascend')}",
        device_type="npu",
        architecture=family.architecture if family else chip.name,
        memory_kind="discrete",
        memory_bytes=chip.memory_bytes,
        driver_version=version,
        runtime_version=cann,
        properties={"index": str(index), "number": str(chip.number), "health": chip.health},
    )


def _numbers(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)
