"""The contract of one version of core as plain data: names, fields, signatures, hooks, ops, capabilities, layouts.

    python describe.py        prints that of the `vllm_core` that this interpreter finds, as JSON

Imports nothing of core but `vllm_core.api`, which may be that of another version: `plugin diff-api` runs this file against it.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

API = "vllm_core.api"
FORMAT = 1
_PLAIN = (bool, int, float, str)


def describe() -> dict[str, Any]:
    """Describe the API that is imported here. Deterministic."""
    api = importlib.import_module(API)
    modules = [importlib.import_module(f"{API}.{info.name}") for info in pkgutil.iter_modules(api.__path__)]
    return {
        "format": FORMAT,
        "version": ".".join(map(str, api.API_VERSION)),
        "names": {name: _name(getattr(api, name)) for name in sorted(api.__all__)},
        "hooks": dict(sorted(_hooks(api))),
        "constants": {key: value for module in modules for key, value in sorted(_constants(module))},
        "ops": {name: _op(spec) for name, spec in sorted(api.OPS.items())},
        "capabilities": {
            name: {"since": list(row.since), "required": row.required} for name, row in sorted(api.CAPABILITIES.items())
        },
    }


def _name(value: Any) -> dict[str, Any]:
    if inspect.isclass(value):
        return _class(value)
    if inspect.isfunction(value):
        return {"kind": "function", "signature": _signature(value)}
    if isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(one, _PLAIN) for one in value)):
        return {"kind": "constant", "value": value if isinstance(value, _PLAIN) else list(value)}
    if type(value).__module__ == "typing" or type(value).__name__ in ("UnionType", "Union"):
        return {"kind": "type", "value": str(value)}
    return {"kind": "object", "type": type(value).__name__}


def _class(cls: type) -> dict[str, Any]:
    entry: dict[str, Any] = {"kind": "dataclass" if dataclasses.is_dataclass(cls) else "class"}
    entry["bases"] = [base.__name__ for base in cls.__bases__ if base is not object]
    if issubclass(cls, enum.Enum):
        entry["members"] = sorted(cls.__members__)
    if dataclasses.is_dataclass(cls):
        entry["fields"] = {one.name: _field(one) for one in dataclasses.fields(cls)}
    else:
        entry["attributes"] = {name: str(text) for name, text in sorted(_annotations(cls).items())}
    entry["methods"] = {
        name: {"signature": _signature(value), "abstract": bool(getattr(value, "__isabstractmethod__", False))}
        for name, value in sorted(vars(cls).items())
        if inspect.isfunction(value) and not name.startswith("_")
    }
    return entry


def _annotations(cls: type) -> dict[str, Any]:
    return {name: text for name, text in inspect.get_annotations(cls).items() if not name.startswith("_")}


def _field(field: dataclasses.Field[Any]) -> dict[str, Any]:
    required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    entry: dict[str, Any] = {"type": field.type if isinstance(field.type, str) else str(field.type), "required": required}
    if not required:
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        entry["default"] = repr(sorted(default)) if isinstance(default, (set, frozenset)) else repr(default)
    return entry


def _signature(function: Any) -> str:
    return str(inspect.signature(function))


def _hooks(api: ModuleType) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every hook, with its arguments by name: they are passed by keyword."""
    for spec in (api.PlatformSpec, api.DeviceSpec, api.BackendSpec):
        for name, function in vars(spec).items():
            if inspect.isfunction(function) and not name.startswith("_"):
                parameters = list(inspect.signature(function).parameters.values())[1:]
                returns = inspect.signature(function).return_annotation
                yield name, {"arguments": {one.name: str(one.annotation) for one in parameters}, "returns": str(returns)}


def _constants(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Numbers and names in capitals: they are the layout of the packed buffer, and limits."""
    for name, value in vars(module).items():
        if name.isupper() and isinstance(value, _PLAIN) and not name.startswith("_"):
            yield f"{module.__name__.rpartition('.')[2]}.{name}", value


def _op(spec: Any) -> dict[str, Any]:
    return {
        "schema": spec.schema,
        "version": spec.version,
        "family": spec.family,
        "decomposition": list(spec.decomposition),
        "features": sorted(spec.features),
        "since": list(spec.since),
        "tolerances": {dtype: [one.absolute, one.relative] for dtype, one in sorted(spec.tolerances.items())},
    }


def to_text(description: dict[str, Any]) -> str:
    """As it is recorded: every value on a line of its own, so that a change of the record shows what changed."""
    return json.dumps(description, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(to_text(describe()))
