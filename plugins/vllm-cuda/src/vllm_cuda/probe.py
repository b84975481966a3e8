"""What is here: driver, NVML, device files, torch's build. Each is checked and reported on its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vllm_core.api import DeviceFacts, ProbeReport
from vllm_cuda.backends.families import ARCHITECTURES, family_of
from vllm_cuda.driver import Driver, DriverError, Gpu, nvml_version
from vllm_cuda.mig import CutGpu, cut_gpus
from vllm_triton import installed
from vllm_triton.looking import Looking

_INSTALL = "install a torch build for CUDA: https://pytorch.org/get-started/locally"


def probe(
    root: Path = Path("/"),
    driver: Callable[[], Driver] = Driver,
    nvml: Callable[[], str] = nvml_version,
    torch_build: Callable[[], tuple[str, str | None] | None] | None = None,
    mig: Callable[[], tuple[CutGpu, ...]] = cut_gpus,
) -> ProbeReport:
    """Look at this machine. The arguments stand for it in tests."""
    look = Looking()
    found, supported = _driver(look, driver)
    version = _nvml(look, nvml)
    _device_files(look, root, bool(found))
    runtime = _torch(look, torch_build or installed_torch, supported)
    _architectures(look, found, runtime)
    _instances(look, found)
    _cut(look, found, mig)
    _fp8(look, found, supported, runtime)
    usable = runtime is not None and (supported is None or runtime <= (supported[0], 99))
    facts = tuple(_facts(gpu, version, runtime) for gpu in found if not _too_new(gpu, runtime)) if usable else ()
    return ProbeReport(devices=facts, checks=tuple(look.checks))


def _driver(look: Looking, make: Callable[[], Driver]) -> tuple[tuple[Gpu, ...], tuple[int, int] | None]:
    try:
        driver = make()
        version, gpus = driver.version(), driver.gpus()
    except OSError as error:
        look.failed("driver", f"libcuda.so.1: {error}", "install the NVIDIA driver; in a container, start it with --gpus all")
        return (), None
    except DriverError as error:
        look.failed("driver", str(error), "CUDA_VISIBLE_DEVICES, the device files and `nvidia-smi` show why")
        return (), None
    listing = ", ".join(f"{gpu.name} ({gpu.architecture}, {gpu.memory_bytes >> 20} MiB)" for gpu in gpus)
    look.ok("driver", f"libcuda.so.1 supports CUDA {version[0]}.{version[1]}; {len(gpus)} visible: {listing or 'none'}")
    return gpus, version


def _nvml(look: Looking, nvml: Callable[[], str]) -> str:
    try:
        version = nvml()
    except (OSError, DriverError, AttributeError) as error:
        look.skipped("NVML", f"not reachable ({error}); the driver API was used", "only nvidia-smi and monitoring need it")
        return ""
    look.ok("NVML", f"driver {version}")
    return version


def _device_files(look: Looking, root: Path, found: bool) -> None:
    files = sorted(path.name for path in root.glob("dev/nvidia*") if not path.is_dir())
    if files:
        look.ok("device files", ", ".join(files))
    elif found:
        look.skipped("device files", "no /dev/nvidia*; the driver is reached another way")
    else:
        look.failed("device files", "no /dev/nvidia*", "no GPU, or the container was started without it (--gpus all)")


def _torch(
    look: Looking, build: Callable[[], tuple[str, str | None] | None], supported: tuple[int, int] | None
) -> tuple[int, int] | None:
    found = build()
    if found is None:
        look.failed("torch", "not installed", _INSTALL)
        return None
    version, cuda = found
    if cuda is None:
        look.failed("torch", f"{version} is built without CUDA", _INSTALL)
        return None
    major, minor = (int(part) for part in cuda.split(".")[:2])
    if supported is not None and major > supported[0]:
        look.failed(
            "torch",
            f"{version} needs a driver for CUDA {major}, this one supports {supported[0]}.{supported[1]}",
            "update the driver, or install torch for the older CUDA",
        )
    else:
        look.ok("torch", f"{version}, built for CUDA {cuda}")
    return major, minor


def installed_torch() -> tuple[str, str | None] | None:
    """Version and CUDA version of the installed torch, read from its files: importing it takes seconds."""
    return installed.torch_build("cuda")


def _too_new(gpu: Gpu, runtime: tuple[int, int] | None) -> bool:
    """Whether torch was built before there were such chips: its first kernel would end with "no kernel image"."""
    family = family_of(gpu.architecture)
    return family is not None and runtime is not None and runtime < family.toolkit


def _architectures(look: Looking, gpus: tuple[Gpu, ...], runtime: tuple[int, int] | None) -> None:
    for gpu in gpus:
        name, family = f"kernels for device {gpu.index}", family_of(gpu.architecture)
        if family is None:
            look.failed(
                name,
                f"{gpu.name} is {gpu.architecture}; kernels are tuned for {', '.join(ARCHITECTURES)}",
                "a newer vllm-cuda may have them",
            )
        elif runtime is not None and _too_new(gpu, runtime):
            needed, built = (".".join(map(str, one)) for one in (family.toolkit, runtime))
            look.failed(
                name, f"{gpu.name} is {gpu.architecture}, known since CUDA {needed}; torch is built for {built}", _INSTALL
            )
        else:
            look.ok(name, f"{gpu.architecture}")


def _instances(look: Looking, gpus: tuple[Gpu, ...]) -> None:
    for gpu in gpus:
        if gpu.instance:
            size = f"{gpu.multiprocessors} multiprocessors, {gpu.memory_bytes >> 20} MiB"
            look.ok(f"MIG of device {gpu.index}", f"{gpu.id}, an instance {gpu.instance}: {size}")


def _cut(look: Looking, gpus: tuple[Gpu, ...], mig: Callable[[], tuple[CutGpu, ...]]) -> None:
    """Instances of the whole machine: a process that sees none, or another than was meant, has no other way to know."""
    try:
        cut = mig()
    except (OSError, DriverError):
        return  # said by the check of NVML
    visible = {gpu.id for gpu in gpus}
    for gpu in cut:
        name = f"MIG of {gpu.id}"
        here = [f"{id_} ({profile}{', visible' if id_ in visible else ''})" for id_, profile in gpu.instances]
        if not here:
            look.skipped(name, f"{gpu.name} is in MIG mode and has no instance", "nvidia-smi mig -cgi PROFILE -C makes one")
        elif any(id_ in visible for id_, _ in gpu.instances):
            look.ok(name, f"{gpu.name}: {', '.join(here)}")
        else:
            look.skipped(name, f"{gpu.name}: {', '.join(here)}", "CUDA_VISIBLE_DEVICES makes the one visible that it names")


def _fp8(look: Looking, gpus: tuple[Gpu, ...], supported: tuple[int, int] | None, runtime: tuple[int, int] | None) -> None:
    """FP8 needs three things; which one is missing is told apart."""
    for gpu in gpus:
        missing = []
        if gpu.capability < (8, 9):
            missing.append(f"hardware: {gpu.architecture}, needs sm_89")
        if supported is None or supported < (11, 8):
            missing.append("driver: needs CUDA 11.8")
        if runtime is None or runtime < (11, 8):
            missing.append("toolkit: torch needs CUDA 11.8")
        if missing:
            look.skipped(f"fp8 on device {gpu.index}", "; ".join(missing))
        else:
            look.ok(f"fp8 on device {gpu.index}", "hardware, driver and toolkit have it")


def _facts(gpu: Gpu, driver: str, runtime: tuple[int, int] | None) -> DeviceFacts:
    return DeviceFacts(
        id=gpu.id,
        name=gpu.name,
        device_type="cuda",
        architecture=gpu.architecture,
        memory_kind="unified" if gpu.integrated else "discrete",
        memory_bytes=gpu.memory_bytes,
        driver_version=driver,
        runtime_version="" if runtime is None else f"{runtime[0]}.{runtime[1]}",
        links=dict(gpu.links),
        properties={
            "index": str(gpu.index),
            "multiprocessors": str(gpu.multiprocessors),
            "l2_bytes": str(gpu.l2_bytes),
            "shared_bytes": str(gpu.shared_bytes),
        },
    )
