"""What is here: kernel driver, device files, Level Zero, torch's build, vllm-xpu-kernels. Each is checked on its own.

Devices are those that torch counts, since it will run on them. Graphics that are a part of the processor are counted
apart: they are devices of this platform only where the user has chosen them by a variable. This runs in a child process,
so that torch may open the GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from vllm_core.api import DeviceFacts, ProbeReport
from vllm_triton import installed
from vllm_triton.looking import Looking
from vllm_xpu import sysfs, versions
from vllm_xpu.backends.families import ARCHITECTURES, INTEGRATED, architecture_of, family_of
from vllm_xpu.driver import Driver, DriverError, Visible
from vllm_xpu.sysfs import Card

_INSTALL = "install a torch build for XPU: https://pytorch.org/get-started/locally"
_CONTAINER = "start the container with --device=/dev/dri --group-add render"
CHOOSING = ("ONEAPI_DEVICE_SELECTOR", "ZE_AFFINITY_MASK")
"""Variables by which a user names devices."""

SHAPING = ("ZE_FLAT_DEVICE_HIERARCHY", "SYCL_DEVICE_FILTER")


@dataclass(frozen=True, slots=True)
class TorchDevice:
    """One device as torch counts it; `integrated` is None where torch does not say."""

    index: int
    name: str
    device_id: int
    memory_bytes: int
    subslices: int
    driver_version: str = ""
    integrated: bool | None = None
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The installed torch: version, its XPU version (None: another build), its devices or why none."""

    version: str
    xpu: str | None
    devices: tuple[TorchDevice, ...] = ()
    error: str = ""


def probe(
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    zero: Callable[[], Driver] = Driver,
    torch_build: Callable[[], TorchBuild | None] | None = None,
    kernels: Callable[[], str | None] | None = None,
) -> ProbeReport:
    """Look at this machine. The arguments stand for it in tests."""
    look = Looking()
    build = (torch_build or installed_torch)()
    seen = bool(build and build.devices)
    found = _cards(look, root, seen)
    _device_files(look, root, found)
    chosen = _environment(look, environ)
    visible = _level_zero(look, zero, seen)
    usable = _torch(look, build)
    extra = _xpu_kernels(look, kernels or installed_kernels)
    devices = build.devices if build is not None and usable else ()
    facts = []
    for device in devices:
        twin = _twin(device, visible)
        integrated = _integrated(device, twin)
        if integrated and not chosen:
            detail = f"{device.name} is a part of the processor and shares its memory: not used unless it is asked for"
            look.skipped(f"device {device.index}", detail, f"{CHOOSING[0]}=level_zero:{device.index}")
            continue
        _kernels(look, device)
        facts.append(_facts(device, twin, integrated, sysfs.driver_version(root), extra))
    if devices and not facts:
        detail = "graphics that are a part of the processor, and no card"
        look.failed("devices", detail, f"to use them all the same: {CHOOSING[0]}=level_zero:{devices[0].index}")
    return ProbeReport(devices=tuple(facts), checks=tuple(look.checks))


def _cards(look: Looking, root: Path, seen: bool) -> tuple[Card, ...]:
    found = sysfs.cards(root)
    if not found:
        if seen:
            look.skipped("PCI", "no GPU of Intel's in /sys; the runtime reaches the devices another way")
        else:
            look.failed("PCI", "no GPU of Intel's in /sys", "no GPU, or the machine's /sys is not visible here")
        return ()
    kinds = [f"{card.architecture} at {card.pci} ({'integrated' if card.integrated else 'discrete'})" for card in found]
    look.ok("PCI", ", ".join(kinds))
    idle = [card.pci for card in found if not card.driver]
    if idle:
        look.failed(
            "kernel driver", f"none for {', '.join(idle)}", "load xe or i915: `dmesg | grep -i -e xe -e i915` says why not"
        )
    else:
        version = sysfs.driver_version(root) or "that of the kernel"
        look.ok("kernel driver", f"{', '.join(sorted({card.driver for card in found}))}, version {version}")
    return found


def _device_files(look: Looking, root: Path, found: Sequence[Card]) -> None:
    states = {card: sysfs.device_file(root, card) for card in found}
    missing = [card.pci for card, usable in states.items() if usable is None]
    closed = [f"/dev/dri/{card.render}" for card, usable in states.items() if usable is False]
    if missing:
        look.failed("device files", f"none in /dev/dri for {', '.join(missing)}", _CONTAINER)
    elif closed:
        hint = f"add the user to the group that owns it (`ls -l {closed[0]}`), usually render"
        look.failed("device files", f"may not be opened: {', '.join(closed)}", hint)
    elif states:
        look.ok("device files", ", ".join(f"/dev/dri/{card.render}" for card in found))
    else:
        look.skipped("device files", "nothing to look for", _CONTAINER)


def _environment(look: Looking, environ: Mapping[str, str]) -> bool:
    """Whether the user has chosen devices."""
    chosen = [f"{name}={environ[name]}" for name in CHOOSING if environ.get(name)]
    shaped = [f"{name}={environ[name]}" for name in SHAPING if environ.get(name)]
    if chosen:
        look.ok("visible devices", ", ".join(chosen))
    if shaped:
        look.ok("device hierarchy", ", ".join(shaped))
    return bool(chosen)


def _level_zero(look: Looking, make: Callable[[], Driver], seen: bool) -> tuple[Visible, ...]:
    try:
        devices = make().devices()
    except OSError as error:
        if seen:
            look.skipped("Level Zero", f"not reachable on its own ({error}); torch has one")
        else:
            look.failed(
                "Level Zero", f"libze_loader.so.1: {error}", "install Intel's compute runtime and the Level Zero loader"
            )
        return ()
    except DriverError as error:
        look.failed("Level Zero", str(error), "the device files, ZE_AFFINITY_MASK and `sycl-ls` show why")
        return ()
    kinds = [f"{one.name} ({'integrated' if one.integrated else 'discrete'}, {one.memory_bytes >> 20} MiB)" for one in devices]
    look.ok("Level Zero", f"{len(devices)} GPU{'' if len(devices) == 1 else 's'}: {', '.join(kinds) or 'none'}")
    return devices


def _torch(look: Looking, build: TorchBuild | None) -> bool:
    if build is None:
        look.failed("torch", "not installed", _INSTALL)
        return False
    if build.xpu is None:
        look.failed("torch", f"{build.version} is built without XPU", _INSTALL)
        return False
    wrong = versions.TORCH.refusal(build.version)
    if wrong:
        look.failed("torch", wrong, _INSTALL)
        return False
    if build.error:
        look.failed("torch", f"{build.version} for XPU {build.xpu}: {build.error}", "the checks above say what it lacks")
        return False
    count = len(build.devices)
    look.ok("torch", f"{build.version}, built for XPU {build.xpu}; {count} device{'' if count == 1 else 's'}")
    return True


def _xpu_kernels(look: Looking, find: Callable[[], str | None]) -> str:
    """The version of vllm-xpu-kernels that may be used; empty where there is none."""
    name, version = versions.KERNELS_DISTRIBUTION, find()
    if version is None:
        look.skipped(name, "not installed; this package's kernels serve every op without it")
        return ""
    wrong = versions.KERNELS.refusal(version)
    if wrong:
        look.failed(name, wrong, "pip install that range; this package's kernels serve every op without it")
        return ""
    look.ok(name, f"{version}: may be chosen with --provider")
    return version


def _kernels(look: Looking, device: TorchDevice) -> None:
    name, architecture = f"kernels for device {device.index}", architecture_of(device.device_id)
    if family_of(architecture) is None:
        detail = f"{device.name} is {architecture}; kernels are tuned for {', '.join(ARCHITECTURES)}"
        look.failed(name, detail, "a newer vllm-xpu may have them")
    else:
        look.ok(name, architecture)


def _twin(device: TorchDevice, visible: Sequence[Visible]) -> Visible | None:
    """The same device as Level Zero counts it: by UUID, or by position where all are of one kind."""
    same = [one for one in visible if device.uuid and one.uuid == device.uuid]
    if same:
        return same[0]
    place = visible[device.index] if device.index < len(visible) else None
    return place if place is not None and place.device_id == device.device_id else None


def _integrated(device: TorchDevice, twin: Visible | None) -> bool:
    if twin is not None:
        return twin.integrated
    if device.integrated is not None:
        return device.integrated
    return architecture_of(device.device_id) in INTEGRATED


def _facts(device: TorchDevice, twin: Visible | None, integrated: bool, driver: str, kernels: str) -> DeviceFacts:
    architecture = architecture_of(device.device_id)
    family = family_of(architecture)
    properties = {
        "index": str(device.index),
        "multiprocessors": str(max(1, device.subslices)),
        "slm_bytes": str(family.slm_bytes if family else 0),
        "device_id": f"{device.device_id:#06x}",
    }
    if kernels:
        properties["xpu_kernels"] = kernels
    uuid = device.uuid or (twin.uuid if twin is not None else "")
    return DeviceFacts(
        id=f"GPU-{uuid}" if uuid else f"xpu:{device.index}",
        name=device.name,
        device_type="xpu",
        architecture=architecture,
        memory_kind="unified" if integrated else "discrete",
        memory_bytes=device.memory_bytes,
        driver_version=driver,
        runtime_version=device.driver_version or (twin.driver_version if twin is not None else ""),
        properties=properties,
    )


def installed_torch() -> TorchBuild | None:
    """What the installed torch says of itself and of its devices; None where it is not installed."""
    build = installed.torch_build("xpu")
    if build is None:
        return None
    if build[1] is None and not installed.torch_is_extended():
        return TorchBuild(build[0], None)
    try:
        import torch
    except (ImportError, OSError) as error:
        return TorchBuild("unknown version", "unknown", error=f"import torch: {error}")
    xpu = getattr(torch.version, "xpu", None)
    if xpu is None:
        return TorchBuild(torch.__version__, None)
    try:
        devices = tuple(_torch_device(index) for index in range(torch.xpu.device_count()))
    except RuntimeError as error:
        return TorchBuild(torch.__version__, xpu, error=str(error).splitlines()[0])
    return TorchBuild(torch.__version__, xpu, devices)


def _torch_device(index: int) -> TorchDevice:
    import torch

    found = torch.xpu.get_device_properties(index)
    integrated = getattr(found, "is_integrated", None)
    return TorchDevice(
        index=index,
        name=found.name,
        device_id=int(found.device_id),
        memory_bytes=found.total_memory,
        subslices=found.gpu_subslice_count,
        driver_version=found.driver_version,
        integrated=None if integrated is None else bool(integrated),
        uuid=str(getattr(found, "uuid", "")).replace("-", ""),
    )


def installed_kernels() -> str | None:
    """The installed version of vllm-xpu-kernels, read from its metadata."""
    try:
        return metadata.version(versions.KERNELS_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None
