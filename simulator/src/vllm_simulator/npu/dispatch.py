"""Registers the simulated ops under the vendor's own schemas, and queues what they do on the device.

An op is a Python function with the names and defaults of its schema. It checks the documented rules at once, as the vendor's
host code does, makes its outputs, and queues a body that gets the memory behind the tensors when the device comes to it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

CALLS = "SIMULATOR_CALLS"
SCHEMAS = Path(__file__).with_name("schemas.txt")
OPS: dict[str, Callable[..., Any]] = {}
"""The simulated ops by qualified name, overload included."""

_native: list[ModuleType] = []
_libraries: list[Any] = []


class RuleError(RuntimeError):
    """A rule of the vendor's documentation is broken; the real device answers with an error code, or worse."""


def op(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a function as the simulation of ``name``."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        OPS[name] = function
        return function

    return mark


def schemas(path: Path = SCHEMAS) -> Mapping[str, str]:
    """Schemas by qualified name, as the wheel registers them."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return {line.partition("(")[0]: line for line in lines}


def rule(holds: bool, text: str) -> None:
    """Raise RuleError unless the documented rule holds."""
    if not holds:
        raise RuleError(f"{text} (EZ1001: a documented rule of the op is broken)")


def queue(name: str, body: Callable[..., None], *tensors: Tensor | None) -> None:
    """Queue ``body``; when it runs it gets the bytes of ``tensors`` as tensors of the host."""
    native = _native[0]
    device = next(tensor.device.index for tensor in tensors if tensor is not None)
    native.launch(device, name, lambda: body(*(None if one is None else native.memory(one) for one in tensors)), False)


def register(native: ModuleType) -> dict[str, Any]:
    """Register all published schemas, and the simulated ops for the device; returns the names that `torch_npu` has for them.

    An op that is published and not simulated raises when it is called.
    """
    from vllm_simulator.npu import attention, cache, moe, norm, quant, rotary  # noqa: F401 - each registers its ops

    _native.append(native)
    make: Any = torch.library.Library
    libraries = {space: make(space, "DEF") for space in ("npu", "atb")}
    _libraries.extend(libraries.values())
    names: dict[str, Any] = {}
    for name, schema in schemas().items():
        space, _, rest = name.partition("::")
        libraries[space].define(schema.partition("::")[2])
        if name in OPS:
            libraries[space].impl(rest, recorded(name, OPS[name]), "PrivateUse1")
        packet = rest.partition(".")[0]
        names[packet] = getattr(getattr(torch.ops, space), packet)
    return names


def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Write each new form of call into the file that `SIMULATOR_CALLS` names: arguments and results without their values."""
    file = os.environ.get(CALLS)
    if file is None:
        return function
    seen: set[str] = set()

    def call(*arguments: Any, **options: Any) -> Any:
        results = function(*arguments, **options)
        line = json.dumps({"op": name, "arguments": form(arguments), "options": form(options), "results": form(results)})
        if line not in seen:
            seen.add(line)
            with Path(file).open("a", encoding="utf-8") as out:
                out.write(line + "\n")
        return results

    return call


def form(value: Any) -> Any:
    """A value as JSON, tensors by their shape, strides and dtype."""
    if isinstance(value, Tensor):
        return {"tensor": [list(value.shape), list(value.stride()), str(value.dtype)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    if isinstance(value, dict):
        return {key: form(one) for key, one in value.items()}
    return [form(one) for one in value] if isinstance(value, (list, tuple)) else value
