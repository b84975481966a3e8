"""Arguments of an op on a device: copied there, pure outputs poisoned, guards behind every tensor, views of wider rows.

Nothing here computes on the device. Tensors are made on the host and copied there whole; what comes back is copied
whole and cut on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vllm_core.api import Device, OpSpec

Copy = Callable[[Tensor], Tensor]
"""Copies a host tensor to where the op runs."""

GUARD = 128
"""Elements behind each tensor, and on both sides of each row of a strided one, that no op may change."""

ACTIVATIONS = frozenset({"x", "a", "b", "q", "q!", "k", "k!", "v"})
"""Arguments that may be views of wider rows: q, k and v of one buffer, halves of a gated product."""

OUTPUTS = frozenset({"out!", "tokens!", "nonfinite!", "experts!", "weights!"})
"""Arguments that are written and never read: what they hold before must not matter."""

_POISON_INT = -7777
_POISON_BYTE = 0xA5


def on_host(host: Tensor) -> Tensor:
    """A copy in host memory."""
    return host.clone()


def on_device(device: Device) -> Copy:
    """Copies into the pool ``workspace``; releasing the pool gives all of them back."""

    def copy(host: Tensor) -> Tensor:
        target = device.allocate("workspace", tuple(host.shape), host.dtype)
        target.copy_(host)
        return target

    return copy


def poison(tensor: Tensor) -> Tensor:
    """Fill a host tensor with what no result is: NaN, an odd number, True."""
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    if tensor.dtype is torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(_POISON_BYTE if tensor.dtype is torch.uint8 else _POISON_INT)


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor on the device: `view` is what the op is given, `base` all of its memory, `host` the base as it was copied."""

    view: Tensor
    base: Tensor
    host: Tensor
    shape: tuple[int, ...]
    strided: bool

    def fetch(self) -> Tensor:
        """The values now, on the host."""
        return _cut(self.base.to("cpu"), self.shape, self.strided)

    def spilled(self) -> int:
        """How many elements outside the view have changed."""
        after, before = self.base.to("cpu").clone(), self.host.clone()
        _cut(after, self.shape, self.strided).zero_()
        _cut(before, self.shape, self.strided).zero_()
        return int((_bits(after) != _bits(before)).sum())


def _cut(base: Tensor, shape: tuple[int, ...], strided: bool) -> Tensor:
    if not strided:
        return base[: math.prod(shape)].view(shape)
    return base[: shape[0], GUARD : GUARD + math.prod(shape[1:])].view(shape)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dtype is not torch.bool else tensor


@dataclass(slots=True)
class Placement:
    """Puts the arguments of one call on the device. `strided`: `ACTIVATIONS` become views of wider rows."""

    copy: Copy = on_host
    strided: bool = False
    _placed: dict[int, Placed] = field(default_factory=dict)

    def tensor(self, host: Tensor, *, output: bool = False, strided: bool = False) -> Placed:
        """Place one tensor, once; a pure output is poisoned."""
        found = self._placed.get(id(host))
        if found is None:
            found = self._placed[id(host)] = self._place(host, output=output, strided=strided)
        return found

    def _place(self, host: Tensor, *, output: bool, strided: bool) -> Placed:
        shape = tuple(host.shape)
        strided = strided and host.dim() > 1 and host.is_floating_point()
        size = (shape[0] + 1, math.prod(shape[1:]) + 2 * GUARD) if strided else (host.numel() + GUARD,)
        base = poison(torch.empty(size, dtype=host.dtype))
        if not output:
            _cut(base, shape, strided).copy_(host)
        there = self.copy(base)
        return Placed(_cut(there, shape, strided), there, base, shape, strided)

    def arguments(self, spec: OpSpec, values: Sequence[Any], realize: Callable[[Any, Copy], Any]) -> list[Any]:
        """Place all arguments that are given; ``realize`` makes weights and caches, which are private to the provider."""
        names = arguments_of(spec)
        placed = []
        for name, value in zip(names[: len(values)], values, strict=True):
            if isinstance(value, Tensor):
                in_place = sum(value is other for other in values) > 1
                strided = self.strided and name in ACTIVATIONS
                placed.append(self.tensor(value, output=name in OUTPUTS and not in_place, strided=strided).view)
            else:
                placed.append(self._nested(value, realize))
        return placed

    def _nested(self, value: Any, realize: Callable[[Any, Copy], Any]) -> Any:
        if isinstance(value, Tensor):
            return self.tensor(value).view
        if isinstance(value, (tuple, list)):
            return type(value)(self._nested(item, realize) for item in value)
        made = realize(value, self.copy)
        if made is value and is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{one.name: self._nested(getattr(value, one.name), realize) for one in fields(value)})
        return made

    def fetched(self, value: Any, host: Any) -> Any:
        """What an argument holds now, on the host, from its host original ``host``; results have none."""
        if isinstance(value, Tensor):
            placed = self._placed.get(id(host))
            return value.to("cpu") if placed is None else placed.fetch()
        if isinstance(value, (tuple, list)):
            originals = host if isinstance(host, (tuple, list)) else [None] * len(value)
            return type(value)(self.fetched(*pair) for pair in zip(value, originals, strict=True))
        if is_dataclass(value) and not isinstance(value, type):
            names = [one.name for one in fields(value)]
            return replace(value, **{n: self.fetched(getattr(value, n), getattr(host, n, None)) for n in names})
        return value

    def blur(self) -> None:
        """Give all floats other values than those asked for."""
        for placed in self._placed.values():
            if placed.host.is_floating_point():
                placed.base.copy_(placed.host * 0.5)

    def refill(self) -> None:
        """Give every tensor what it was placed with."""
        for placed in self._placed.values():
            placed.base.copy_(placed.host)

    def spilled(self) -> int:
        """Elements outside of all views that have changed."""
        return sum(placed.spilled() for placed in self._placed.values())


def needed_of(spec: OpSpec) -> list[str]:
    """Names of the arguments that every call gives; those with a default come after them."""
    names = arguments_of(spec)
    return names[: len(names) - spec.schema.count(" = None")]


def arguments_of(spec: OpSpec) -> list[str]:
    """Names of the schema's arguments, mutated ones with their mark."""
    return [text.partition("=")[0].split()[-1] for text in declared(spec)]


def declared(spec: OpSpec) -> list[str]:
    """The schema's arguments as it writes them: kind, name and mark, default."""
    depth, found, word = 0, [], ""
    for char in spec.schema.partition(" -> ")[0].strip("()") + ",":
        depth += (char == "[") - (char == "]")
        if char == "," and not depth:
            found.append(word.strip())
            word = ""
        else:
            word += char
    return found
