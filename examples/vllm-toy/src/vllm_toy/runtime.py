"""The devices of this process: opened once, known to torch as ``toy:0``, ``toy:1``, ...; and the launch of kernels."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch.utils.backend_registration import rename_privateuse1_backend

from vllm_core.api import UnsupportedError
from vllm_toy import extension, settings

log = logging.getLogger(__name__)
_wrong: set[str] = set()


@functools.cache
def native() -> ModuleType:
    """The compiled part, with the devices opened and the failures of `VLLM_TOY_FAIL` armed."""
    if not extension.library().exists():
        log.warning("compiling the simulated device, once: about 30 s")
    module = extension.load()
    module.install(settings.NUM_DEVICES, settings.memory_bytes(), settings.LINK_BYTES_PER_S, settings.blocking())
    _arm(module)
    rename_privateuse1_backend("toy")
    register: Any = torch._register_device_module
    register("toy", _torch_module(module))
    return module


def _torch_module(module: ModuleType) -> ModuleType:
    """What torch asks of ``torch.toy``."""
    found = ModuleType("torch.toy")
    for name in ("device_count", "current_device", "set_device"):
        setattr(found, name, getattr(module, name))
    found.is_available = found.is_initialized = lambda: True  # type: ignore[attr-defined]
    found._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    found.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
    return found


def _arm(module: ModuleType) -> None:
    for fault in settings.faults():
        if fault.kind == "wrong":
            _wrong.add(fault.op)
        elif fault.kind == "oom":
            module.fail_allocation(fault.number)
        else:
            module.fail_launch(fault.kind, fault.op, fault.number)


def kernel(body: Callable[..., None]) -> Callable[..., None]:
    """Make a kernel of ``body``: calling it queues one launch, in which ``body`` gets the memory behind the tensors.

    ``body`` is this device's machine code: it alone sees the bytes, as tensors of the host.
    """

    @functools.wraps(body)
    def launch(*arguments: Any) -> None:
        launch_on(device_of(body.__name__, arguments), body, arguments)

    return launch


def launch_on(device: int, body: Callable[..., None], arguments: tuple[Any, ...], *, urgent: bool = False) -> None:
    """Queue ``body``; ``urgent`` where another process waits for what it does."""

    def run() -> None:
        on_device = tuple(map(_memory, arguments))
        body(*on_device)
        if body.__name__ in _wrong:
            on_device[0].add_(1)  # outputs come first

    native().launch(device, body.__name__, run, urgent)


def _memory(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return native().memory(value)
    if dataclasses.is_dataclass(value):
        make: Any = type(value)
        return make(**{f.name: _memory(getattr(value, f.name)) for f in dataclasses.fields(value)})
    return tuple(map(_memory, value)) if isinstance(value, tuple) else value


def device_of(op: str, arguments: tuple[Any, ...]) -> int:
    """The one device of all tensors. Raises UnsupportedError for tensors of the host, or of two devices."""
    devices = {tensor.device for tensor in _tensors(arguments)}
    if len(devices) == 1 and next(iter(devices)).type == "toy":
        return int(next(iter(devices)).index)
    raise UnsupportedError(
        "Kernel cannot reach its tensors",
        on=op,
        found=f"tensors on {', '.join(sorted(map(str, devices))) or 'no device'}",
        expected="all on one toy device",
        fix="copy them to the device first",
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from _tensors(one)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
