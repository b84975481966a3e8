"""Judging an implementation of an op against its reference, over the op's generator and tolerances.

The reference runs in float32 on the same values. All arguments are compared afterwards, those that must not change
included, and so is what the op returns; KV through `kv_export`, weights and states by what their readers see.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_core.api import OPS, KVGroupSpec, KVLayout, Tolerance
from vllm_core.ops.inputs import KVContent, Weight
from vllm_core.ops.layouts import kv_layout

Layout = Callable[[KVGroupSpec, str, int], KVLayout]


@dataclass(frozen=True, slots=True)
class Provider:
    """Callables by op name, of one provider; `kv_layout` where it has the family ``kv``."""

    ops: Mapping[str, Callable[..., Any]]
    kv_layout: Layout | None = None

    def realize(self, value: Any) -> Any:
        """Turn a described weight or cache into this provider's own form."""
        if isinstance(value, Weight):
            return self.ops["linear_pack"](value.weight, value.bias, ("check",))
        return self._cache(value) if isinstance(value, KVContent) else value

    def _cache(self, content: KVContent) -> Any:
        assert self.kv_layout is not None, "a provider of the family kv gives its layout"
        count, _, size, heads, head_size = content.blocks.shape
        group = KVGroupSpec(index=0, kind="full", layers=(0,), num_kv_heads=heads, head_size=head_size)
        layout = self.kv_layout(group, content.dtype, size)
        memory = torch.zeros(count, layout.block_bytes, dtype=torch.uint8)
        kv = self.ops["kv_bind"](memory, heads, head_size, content.dtype, size)
        self.ops["kv_import"](kv, content.blocks, torch.arange(count))
        return kv

    def exported(self, kv: Any, content: KVContent) -> Tensor:
        """All blocks in the canonical layout."""
        out = torch.zeros_like(content.blocks)
        self.ops["kv_export"](out, kv, torch.arange(len(out)))
        return out


def reference() -> Provider:
    """Core's references."""
    return Provider({name: spec.load_reference() for name, spec in OPS.items()}, kv_layout)


def mismatches(op: str, provider: Provider, dtype: str, seed: int, shape_class: str) -> list[str]:
    """Run ``op`` of ``provider`` and its reference on generated inputs; one line per value out of tolerance."""
    spec = OPS[op]
    arguments = spec.load_generator()(dtype, seed, shape_class)
    oracle = reference()
    if op in ("linear_pack", "kv_bind"):
        return []  # private forms: judged through their readers
    ours = [provider.realize(copy.deepcopy(value)) for value in arguments]
    theirs = [oracle.realize(_widen(copy.deepcopy(value))) for value in arguments]
    returned, expected = provider.ops[op](*ours), oracle.ops[op](*theirs)
    problems = _compare("result", returned, expected, spec.tolerances[dtype])
    for index, value in enumerate(arguments):
        if isinstance(value, KVContent):
            pair = provider.exported(ours[index], value), oracle.exported(theirs[index], value)
        elif isinstance(value, Weight):
            continue
        else:
            pair = ours[index], theirs[index]
        problems += _compare(f"argument {index}", *pair, spec.tolerances[dtype])
    return problems


def _widen(value: Any) -> Any:
    """Floating tensors in float32; a described weight too, a cache keeps its dtype."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, Weight):
        return Weight(value.weight.float(), None if value.bias is None else value.bias.float())
    return value


def _compare(name: str, actual: Any, expected: Any, tolerance: Tolerance) -> list[str]:
    if isinstance(expected, Tensor):
        return _compare_tensors(name, actual, expected, tolerance)
    if isinstance(expected, (tuple, list)):
        pairs = zip(actual, expected, strict=True)
        return [line for i, pair in enumerate(pairs) for line in _compare(f"{name}[{i}]", *pair, tolerance)]
    if is_dataclass(expected):
        names = [field.name for field in fields(expected)]
        return [line for n in names for line in _compare(f"{name}.{n}", getattr(actual, n), getattr(expected, n), tolerance)]
    return [] if actual == expected else [f"{name}: {actual!r}, expected {expected!r}"]


def _compare_tensors(name: str, actual: Tensor, expected: Tensor, tolerance: Tolerance) -> list[str]:
    if actual.shape != expected.shape:
        return [f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"]
    if not expected.is_floating_point():
        if actual.dtype != expected.dtype:
            return [f"{name}: {actual.dtype}, expected {expected.dtype}"]
        wrong = actual != expected
    else:
        close = torch.isclose(actual.float(), expected, tolerance.relative, tolerance.absolute, equal_nan=True)
        wrong = ~close
    count = int(wrong.sum())
    if not count:
        return []
    at = tuple(int(i) for i in wrong.nonzero()[0])
    return [f"{name}: {count} of {wrong.numel()} values; at {at}: {actual[at]}, expected {expected[at]}"]
