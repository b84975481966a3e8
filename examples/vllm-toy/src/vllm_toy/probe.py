"""What is here: whether the simulated device can be compiled, and how large it is. Opens nothing, imports no torch."""

from __future__ import annotations

from vllm_core.api import Check, DeviceFacts, ProbeReport, UnsupportedError
from vllm_toy import extension, settings
from vllm_toy.version import __version__


def probe() -> ProbeReport:
    """Check the library or the compiler, then the environment; report every check."""
    checks = (*_library(), _environment())
    usable = all(check.outcome != "failed" for check in checks)
    return ProbeReport(devices=tuple(map(_facts, settings.visible())) if usable else (), checks=checks)


def _library() -> tuple[Check, ...]:
    library = extension.library()
    if library.exists():
        return (Check(name="library", outcome="ok", detail=f"compiled: {library}"),)
    found, header = extension.compiler(), extension.header()
    return (
        Check(name="library", outcome="skipped", detail="not compiled yet: about 30 s when an engine first starts"),
        _check("compiler", found, found or "no C++ compiler in PATH"),
        _check("Python.h", header.exists(), str(header)),
    )


def _environment() -> Check:
    try:
        settings.faults()
    except UnsupportedError as error:
        return Check(name="VLLM_TOY_FAIL", outcome="failed", detail=error.found, hint=error.expected)
    return Check(name="devices", outcome="ok", detail=f"{len(settings.visible())} of {settings.memory_bytes() >> 20} MiB")


def _check(name: str, found: object, detail: str) -> Check:
    return Check(name=name, outcome="ok" if found else "failed", detail=detail, hint="" if found else extension.NEEDED)


def _facts(index: int) -> DeviceFacts:
    peers = {str(other): f"{settings.LINK_BYTES_PER_S / 1e6:.0f} MB/s" for other in settings.visible() if other != index}
    return DeviceFacts(
        id=str(index),
        name="Toy accelerator",
        device_type="toy",
        architecture="toy1",
        memory_kind="discrete",
        memory_bytes=settings.memory_bytes(),
        driver_version=__version__,
        links=peers,
    )
