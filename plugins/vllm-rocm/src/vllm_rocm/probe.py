"""What is here: kernel driver, device files, AMD SMI, HIP runtime, torch's build, AITER. Each is checked on its own.

Devices are those that torch counts, since it will run on them; the kernel's topology adds what torch does not say. This
runs in a child process, so that torch may open the GPUs.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from vllm_core.api import DeviceFacts, ProbeReport
from vllm_rocm import topology, versions
from vllm_rocm.backends.families import ARCHITECTURES, family_of
from vllm_rocm.driver import Driver, DriverError, Visible, smi_sockets
from vllm_rocm.topology import Node
from vllm_triton import installed
from vllm_triton.looking import Looking

_INSTALL = "install a torch build for ROCm: https://pytorch.org/get-started/locally"
_CONTAINER = "start the container with --device=/dev/kfd --device=/dev/dri --group-add video --group-add render"
VARIABLES = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"


@dataclass(frozen=True, slots=True)
class TorchDevice:
    """One device as torch counts it. `architecture` is without its features (``gfx942``)."""

    index: int
    name: str
    architecture: str
    compute_units: int
    memory_bytes: int
    integrated: bool = False
    pci: str = ""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The installed torch: version, version of the HIP it was built for (None: another build), its devices or why none."""

    version: str
    hip: str | None
    devices: tuple[TorchDevice, ...] = ()
    error: str = ""


def probe(
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    hip: Callable[[], Driver] | None = None,
    smi: Callable[[], int] = smi_sockets,
    torch_build: Callable[[], TorchBuild | None] | None = None,
    aiter: Callable[[], str | None] | None = None,
) -> ProbeReport:
    """Look at this machine. The arguments stand for it in tests."""
    look = Looking()
    build = (torch_build or installed_torch)()
    nodes = _topology(look, root, bool(build and build.devices))
    _device_files(look, root, nodes)
    _environment(look, environ)
    visible, runtime = _hip(look, hip or (lambda: Driver(_torch_folders())), bool(build and build.devices))
    _smi(look, smi)
    usable = _torch(look, build)
    extra = _aiter(look, aiter or installed_aiter)
    driver = topology.driver_version(root)
    devices = build.devices if build is not None and usable else ()
    paired = _pair(devices, nodes)
    facts = [
        _facts(device, node, _memory(device, visible), driver, runtime or (build.hip if build else "") or "", extra)
        for device, node in paired
        if _kernels(look, device, build)
    ]
    return ProbeReport(devices=tuple(_with_links(facts, [node for _, node in paired])), checks=tuple(look.checks))


def _topology(look: Looking, root: Path, seen: bool) -> tuple[Node, ...]:
    if not topology.driver_loaded(root):
        if seen:
            look.skipped("kernel driver", "no /sys/module/amdgpu; the runtime reaches the devices another way")
        else:
            look.failed("kernel driver", "amdgpu is not loaded", "install the amdgpu driver (`modprobe amdgpu` says why not)")
        return ()
    version = topology.driver_version(root) or "that of the kernel"
    nodes = topology.nodes(root)
    if nodes:
        listing = ", ".join(f"{node.architecture} at {node.pci}" for node in nodes)
        look.ok("kernel driver", f"amdgpu, version {version}; {len(nodes)} in the KFD topology: {listing}")
    else:
        hint = "the GPU may be too old for ROCm, or its driver failed to start: `dmesg | grep -i -e amdgpu -e kfd`"
        look.failed("kernel driver", f"amdgpu, version {version}; no GPU in the KFD topology", hint)
    for node in nodes:
        if node.compute_partition or node.memory_partition:
            modes = f"compute {node.compute_partition or 'unknown'}, memory {node.memory_partition or 'unknown'}"
            look.ok(f"partition of node {node.number}", f"{modes}; {node.compute_units} compute units in {node.xccs} XCC")
    return nodes


def _device_files(look: Looking, root: Path, nodes: tuple[Node, ...]) -> None:
    files, missing = topology.device_files(root, nodes), topology.missing_files(root, nodes)
    closed = [name for name, usable in files.items() if not usable]
    if nodes and missing:
        look.failed("device files", f"missing: {', '.join(missing)}", _CONTAINER)
    elif closed:
        hint = f"add the user to the groups that own them (`ls -l {closed[0]}`), usually render and video"
        look.failed("device files", f"may not be opened: {', '.join(closed)}", hint)
    elif files:
        look.ok("device files", ", ".join(files))
    else:
        look.skipped("device files", "no /dev/kfd", _CONTAINER)


def _environment(look: Looking, environ: Mapping[str, str]) -> None:
    chosen = [f"{name}={environ[name]}" for name in VARIABLES if name in environ]
    if chosen:
        look.ok("visible devices", ", ".join(chosen))
    if len(chosen) > 1:
        look.skipped("visible devices, combined", "each variable counts within what the others leave", "set one of them")
    if OVERRIDE in environ:
        detail = f"{OVERRIDE}={environ[OVERRIDE]}: the runtime takes the chip for another, and kernels are built for that one"
        look.skipped("architecture override", detail, f"unset {OVERRIDE}")


def _hip(look: Looking, make: Callable[[], Driver], seen: bool) -> tuple[tuple[Visible, ...], str]:
    try:
        driver = make()
        version, devices = driver.version(), driver.devices()
    except OSError as error:
        if seen:
            look.skipped("HIP runtime", f"not reachable on its own ({error}); torch has one")
        else:
            look.failed("HIP runtime", f"libamdhip64.so: {error}", "install ROCm, or a torch build that brings it")
        return (), ""
    except DriverError as error:
        hint = "HIP_VISIBLE_DEVICES, the device files and `rocminfo` show why"
        look.failed("HIP runtime", str(error), hint)
        return (), ""
    listing = ", ".join(f"{one.name} ({one.memory_bytes >> 20} MiB)" for one in devices) or "none"
    look.ok("HIP runtime", f"{driver.library}, HIP {version[0]}.{version[1]}; {len(devices)} visible: {listing}")
    return devices, f"{version[0]}.{version[1]}"


def _smi(look: Looking, smi: Callable[[], int]) -> None:
    try:
        sockets = smi()
    except (OSError, DriverError) as error:
        look.skipped("AMD SMI", f"not reachable ({error})", "only amd-smi and monitoring need it")
    else:
        look.ok("AMD SMI", f"{sockets} socket{'' if sockets == 1 else 's'} with GPUs")


def _torch(look: Looking, build: TorchBuild | None) -> bool:
    if build is None:
        look.failed("torch", "not installed", _INSTALL)
        return False
    if build.hip is None:
        look.failed("torch", f"{build.version} is built without ROCm", _INSTALL)
        return False
    wrong = versions.TORCH.refusal(build.version)
    if wrong:
        look.failed("torch", wrong, _INSTALL)
        return False
    if build.error:
        look.failed("torch", f"{build.version} for HIP {build.hip}: {build.error}", "the checks above say what it lacks")
        return False
    count = len(build.devices)
    look.ok("torch", f"{build.version}, built for HIP {build.hip}; {count} device{'' if count == 1 else 's'}")
    return True


def _aiter(look: Looking, find: Callable[[], str | None]) -> str:
    """The version of AITER that may be used; empty where there is none."""
    version = find()
    if version is None:
        look.skipped("AITER", "not installed; this package's kernels serve every op without it")
        return ""
    wrong = versions.AITER.refusal(version)
    if wrong:
        look.failed("AITER", wrong, "pip install that range; this package's kernels serve every op without it")
        return ""
    look.ok("AITER", f"{version}: may be chosen with --provider")
    return version


def _kernels(look: Looking, device: TorchDevice, build: TorchBuild | None) -> bool:
    name = f"kernels for device {device.index}"
    if family_of(device.architecture) is None:
        detail = f"{device.name} is {device.architecture}; kernels are tuned for {', '.join(ARCHITECTURES)}"
        look.failed(name, detail, "a newer vllm-rocm may have them")
        return True  # core refuses it, with both named
    wrong = versions.wrong_hip(device.architecture, (build.hip if build else None) or "0")
    if wrong:
        look.failed(name, wrong, _INSTALL)
        return False
    look.ok(name, device.architecture)
    return True


def _pair(devices: Sequence[TorchDevice], nodes: Sequence[Node]) -> list[tuple[TorchDevice, Node | None]]:
    """Each device with its node: by PCI address, partitions of one address in their order; else by position."""
    left = list(nodes)
    pairs: list[tuple[TorchDevice, Node | None]] = []
    for device in devices:
        fits = [node for node in left if node.architecture == device.architecture]
        same = [node for node in fits if device.pci and node.pci.rpartition(".")[0] == device.pci.rpartition(".")[0]]
        # Hidden devices make positions meaningless, so that without an address all must be visible.
        node = same[0] if same else fits[0] if fits and not device.pci and len(devices) == len(nodes) else None
        if node is not None:
            left.remove(node)
        pairs.append((device, node))
    return pairs


def _memory(device: TorchDevice, visible: Sequence[Visible]) -> int:
    return device.memory_bytes or next((one.memory_bytes for one in visible if one.index == device.index), 0)


def _facts(device: TorchDevice, node: Node | None, memory_bytes: int, driver: str, runtime: str, aiter: str) -> DeviceFacts:
    family = family_of(device.architecture)
    properties = {
        "index": str(device.index),
        "multiprocessors": str(device.compute_units),
        "wave_size": str(family.wave_size if family else 0),
        "lds_bytes": str(family.lds_bytes if family else 0),
        "fp8": family.fp8 if family else "none",
    }
    if node is not None:
        properties |= {"pci": node.pci, "node": str(node.number), "xccs": str(node.xccs)}
        if node.compute_partition:
            properties["compute_partition"] = node.compute_partition
    if aiter and device.architecture in versions.AITER_ARCHITECTURES:
        properties["aiter"] = aiter
    integrated = device.integrated or (node is not None and node.integrated)
    return DeviceFacts(
        id=node.id if node is not None else f"hip:{device.index}",
        name=device.name,
        device_type="hip",
        architecture=device.architecture,
        memory_kind="unified" if integrated else "discrete",
        memory_bytes=memory_bytes,
        driver_version=driver,
        runtime_version=runtime,
        properties=properties,
    )


def _with_links(facts: Sequence[DeviceFacts], nodes: Sequence[Node | None]) -> list[DeviceFacts]:
    """Links between devices that both are here, by id."""
    ids = {one.properties["node"]: one.id for one in facts if "node" in one.properties}
    by_number = {str(node.number): node for node in nodes if node is not None}
    linked = []
    for one in facts:
        node = by_number.get(one.properties.get("node", ""))
        links = {ids[str(other)]: kind for other, kind in node.links.items() if str(other) in ids} if node else {}
        linked.append(replace(one, links=links))
    return linked


def installed_torch() -> TorchBuild | None:
    """What the installed torch says of itself and of its devices; None where it is not installed."""
    build = installed.torch_build("hip")
    if build is None:
        return None
    if build[1] is None and not installed.torch_is_extended():
        return TorchBuild(build[0], None)
    try:
        import torch
    except (ImportError, OSError) as error:
        return TorchBuild("unknown version", "unknown", error=f"import torch: {error}")
    hip = getattr(torch.version, "hip", None)
    if hip is None:
        return TorchBuild(torch.__version__, None)
    try:
        devices = tuple(_torch_device(index) for index in range(torch.cuda.device_count()))
    except RuntimeError as error:
        return TorchBuild(torch.__version__, hip, error=str(error).splitlines()[0])
    return TorchBuild(torch.__version__, hip, devices)


def _torch_device(index: int) -> TorchDevice:
    import torch

    found = torch.cuda.get_device_properties(index)
    bus = getattr(found, "pci_bus_id", None)
    pci = (
        "" if bus is None else f"{getattr(found, 'pci_domain_id', 0):04x}:{bus:02x}:{getattr(found, 'pci_device_id', 0):02x}.0"
    )
    return TorchDevice(
        index=index,
        name=found.name,
        architecture=found.gcnArchName.partition(":")[0],
        compute_units=found.multi_processor_count,
        memory_bytes=found.total_memory,
        integrated=bool(getattr(found, "is_integrated", False)),
        pci=pci,
    )


def _torch_folders() -> tuple[Path, ...]:
    spec = importlib.util.find_spec("torch")
    return () if spec is None else tuple(Path(place) / "lib" for place in spec.submodule_search_locations or ())


def installed_aiter() -> str | None:
    """The installed version of AITER, read from its metadata."""
    try:
        return metadata.version(versions.AITER_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None
