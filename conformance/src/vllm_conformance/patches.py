"""Counts patches: names of core, torch and others that a plugin has changed. The count must be 0.

    before = snapshot()
    ...  # load the plugin, serve a request
    changes = before.changes(device_type="toy")

Of core everything is compared: dictionaries of modules and classes, recursively; code, defaults and closures of
functions; callables in module-level containers. Of other packages the public functions and classes are compared. All
modules of core are imported first, since a module that was not loaded before cannot be compared after.

Not seen: changed data inside containers (caches are filled in normal use) and state behind C objects.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Literal

CORE = "vllm_core"
OTHERS = ("torch", "triton", "transformers")

Kind = Literal["added", "removed", "replaced", "code", "defaults", "closure"]

# Names that Python and libraries write into dictionaries themselves.
_OWN_NOTES = {"__warningregistry__", "__abstractmethods__", "_abc_impl", "__annotations__", "__annotations_cache__"}
_OWN_NOTES |= {"__slotnames__", "__static_attributes__", "__firstlineno__", "__parameters__"}
_OWN_NOTES |= {"__non_callable_proto_members__", "__protocol_attrs__", "__msgspec_cache__"}
# Exactly these: reading a subclass may run its code, and transformers' mappings import models when they are read.
_CONTAINERS = (dict, list, set)
_CODE = (FunctionType, BuiltinFunctionType, type, staticmethod, classmethod, property, ModuleType)
_PLAIN = (int, float, str, bytes, bool, type(None))
# What `torch.utils.generate_methods_for_privateuse1_backend` adds, and `torch._register_device_module`.
_DEVICE_OWNERS = {
    "torch",
    "torch.Tensor",
    "torch.nn.modules.module.Module",
    "torch.nn.utils.rnn.PackedSequence",
    "torch.storage.TypedStorage",
    "torch.storage.UntypedStorage",
    "torch.storage._StorageBase",
}


@dataclass(frozen=True, order=True)
class Change:
    """One patched name: `owner` is the module or class, `name` the attribute."""

    owner: str
    name: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}: {self.kind}"


@dataclass(frozen=True)
class _Function:
    function: FunctionType
    code: CodeType
    defaults: tuple[Any, ...] | None
    kwdefaults: dict[str, Any] | None
    cells: tuple[Any, ...]

    @classmethod
    def of(cls, function: FunctionType) -> _Function:
        kwdefaults = dict(function.__kwdefaults__) if function.__kwdefaults__ else None
        return cls(function, function.__code__, function.__defaults__, kwdefaults, _cells(function))

    def changes(self) -> Iterator[Kind]:
        if self.function.__code__ is not self.code:
            yield "code"
        if self.function.__defaults__ is not self.defaults or (self.function.__kwdefaults__ or None) != self.kwdefaults:
            yield "defaults"
        # A cell may hold a counter or a cache of core's own: only what can be called counts.
        pairs = zip(self.cells, _cells(self.function), strict=True)
        if any(old is not new and (callable(old) or callable(new)) for old, new in pairs):
            yield "closure"


@dataclass(frozen=True)
class _Namespace:
    owner: str
    holder: Any
    names: Mapping[str, Any]
    functions: Mapping[str, tuple[_Function, ...]]
    callables: Mapping[str, Mapping[Any, Any]]


@dataclass(frozen=True)
class Snapshot:
    """The state at one moment; holds references, so that no identity is reused."""

    core: str
    _namespaces: tuple[_Namespace, ...] = field(repr=False)

    def __len__(self) -> int:
        return sum(len(space.names) for space in self._namespaces)

    def changes(self, *, device_type: str | None = None) -> tuple[Change, ...]:
        """Compare with now. Names that register the plugin's own `device_type` with torch are no patches."""
        found = {change for space in self._namespaces for change in self._changes(space)}
        return tuple(sorted(change for change in found if not _registers_device(change, device_type)))

    def _changes(self, space: _Namespace) -> Iterator[Change]:
        whole = _within(space.owner, self.core)
        now = _names(space.holder, whole)
        for name, old in space.names.items():
            if name not in now:
                yield Change(space.owner, name, "removed")
            elif not _same(old, now[name]):
                yield Change(space.owner, name, "replaced")
        for name in now.keys() - space.names.keys():
            if not _is_lazy(space.owner, now[name], whole):
                yield Change(space.owner, name, "added")
        for name, functions in space.functions.items():
            for kind in (kind for function in functions for kind in function.changes()):
                yield Change(space.owner, name, kind)
        for name, old_items in space.callables.items():
            items = _callables_in(now.get(name))
            for key in old_items.keys() | items.keys():
                if old_items.get(key) is not items.get(key):
                    how: Kind = "added" if key not in old_items else "removed" if key not in items else "replaced"
                    yield Change(space.owner, f"{name}[{key!r}]", how)


def snapshot(core: str = CORE, others: tuple[str, ...] = OTHERS) -> Snapshot:
    """Import all of `core` and record it, and those of `others` that are loaded."""
    import_all(core)
    seen: set[int] = set()
    spaces: list[_Namespace] = []
    for name, module in sorted(sys.modules.items()):
        root = name.split(".")[0]
        if isinstance(module, ModuleType) and (root == core or (root in others and _is_public(name))):
            spaces.extend(_record(name, module, root, whole=root == core, seen=seen))
    return Snapshot(core, tuple(spaces))


def import_all(package: str) -> None:
    """Import every module of a package but its `__main__`s."""
    root = importlib.import_module(package)
    for info in pkgutil.walk_packages(getattr(root, "__path__", ()), package + "."):
        if not info.name.endswith("__main__"):
            importlib.import_module(info.name)


def _record(owner: str, holder: Any, root: str, *, whole: bool, seen: set[int]) -> Iterator[_Namespace]:
    if id(holder) in seen:
        return
    seen.add(id(holder))
    names = _names(holder, whole)
    functions = {name: tuple(map(_Function.of, _functions(value))) for name, value in names.items()}
    containers = {name: _callables_in(value) for name, value in names.items() if whole and _is_container(value, root)}
    yield _Namespace(owner, holder, names, functions, containers)
    for value in names.values():
        if issubclass(type(value), type) and _within(value.__module__, root) and (whole or _is_public(value.__module__)):
            yield from _record(f"{value.__module__}.{value.__qualname__}", value, root, whole=whole, seen=seen)


def _names(holder: Any, whole: bool) -> dict[str, Any]:
    """All names of core; of others the public ones that are functions or classes."""
    names = dict(vars(holder))
    if whole:
        return {name: value for name, value in names.items() if name not in _OWN_NOTES and not name.startswith("__pydantic")}
    return {name: value for name, value in names.items() if not name.startswith("_") and _is_code(value)}


def _is_public(name: str) -> bool:
    return not any(part.startswith("_") for part in name.split("."))


def _is_code(value: Any) -> bool:
    # Not isinstance: it asks `__class__`, and deprecated stand-ins warn when they are asked anything.
    return issubclass(type(value), _CODE)


def _functions(value: Any) -> Iterator[FunctionType]:
    """Python functions reachable from a value: through descriptors, wrappers, partials and closures."""
    todo, seen = [value], set[int]()
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, FunctionType):
            yield item
            todo.extend(cell for cell in _cells(item) if isinstance(cell, FunctionType))
        elif isinstance(item, (staticmethod, classmethod, MethodType)):
            todo.append(item.__func__)
        elif isinstance(item, property):
            todo.extend((item.fget, item.fset, item.fdel))
        elif isinstance(item, (functools.partial, functools.cached_property)):
            todo.append(item.func)
        elif isinstance(item, functools._lru_cache_wrapper):
            todo.append(item.__wrapped__)


def _cells(function: FunctionType) -> tuple[Any, ...]:
    contents: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:  # not filled yet
            contents.append(None)
    return tuple(contents)


def _is_container(value: Any, core: str) -> bool:
    ours = _within(type(value).__module__, core) and not isinstance(value, type) and hasattr(value, "__dict__")
    return type(value) in _CONTAINERS or ours


def _callables_in(value: Any) -> dict[Any, Any]:
    if type(value) is dict:
        items: Any = value.items()
    elif type(value) is list:
        items = enumerate(value)
    elif type(value) is set:
        items = ((item, item) for item in value)
    else:
        items = getattr(value, "__dict__", {}).items()
    return {key: item for key, item in list(items) if callable(item)}


def _same(old: Any, new: Any) -> bool:
    return old is new or (isinstance(old, _PLAIN) and type(old) is type(new) and old == new)


def _is_lazy(owner: str, value: Any, whole: bool) -> bool:
    """Whether a new name is a package's own late import: a submodule, or an object defined in the same package."""
    root = owner.split(".")[0]
    if isinstance(value, ModuleType):
        return _within(value.__name__, root)
    return not whole and _within(str(getattr(value, "__module__", "")), root)


def _registers_device(change: Change, device_type: str | None) -> bool:
    names = {device_type, f"is_{device_type}"}
    return device_type is not None and change.kind == "added" and change.owner in _DEVICE_OWNERS and change.name in names


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")
