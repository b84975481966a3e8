"""Judging an implementation of an op against its reference, over the op's generator and tolerances.

The reference runs on the host, in float32 on the same values. All arguments are compared afterwards, those that must not
change included, and so is what the op returns; KV through `kv_export`, weights by what their readers see. What an op
wrote beside its arguments is a difference too.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vllm_core.api import OPS, BatchState, DecoderLayer, DecoderLayers, Device, KVGroupSpec, KVLayout, QuantTensor, Tolerance
from vllm_core.ops.dtypes import TORCH_DTYPES
from vllm_core.ops.inputs import KV_DTYPES, ExpertWeights, KVContent, Weight
from vllm_core.ops.layouts import kv_layout
from vllm_core.ops.linear import linear_pack_fp8
from vllm_core.ops.place import Copy, Placement, arguments_of, on_device, on_host
from vllm_core.ops.quant import moved
from vllm_core.ops.ties import is_tie

Layout = Callable[[KVGroupSpec, str, int], KVLayout]

PRIVATE = frozenset({"linear_pack", "moe_pack", "kv_bind"})
"""Ops whose result is the provider's own form; they are judged through the ops that read it."""


_APPROXIMATE = {"int8": Tolerance(0.06, 0.03)}
"""KV dtypes whose values depend on scales of the provider's own: tolerances for random normal content."""

_ROUNDED = Tolerance(0.1, 1e-2)
"""Of products whose inputs are rounded to fp8: some lie between two codes, and the last bit of a scale decides for one."""

_ROUNDED_OTHERS = {
    "gated_linear": Tolerance(0.2, 0.05),
    "rms_norm_linear": Tolerance(0.2, 0.02),
    "rms_norm_gated_linear": Tolerance(0.2, 0.12),
}
"""The same of two products, and where inputs are made in between: a row whose largest number differs in its last bit has
another scale, with which all of it is rounded anew, by 0.03 of what the product is."""


@dataclass(frozen=True, slots=True)
class Provider:
    """Callables by op name, of one provider; `kv_layout` where it has the family ``kv``."""

    ops: Mapping[str, Callable[..., Any]]
    kv_layout: Layout | None = None

    def realize(self, value: Any, place: Copy = on_host) -> Any:
        """Turn a described weight or cache into this provider's own form, its tensors copied by ``place``."""
        if isinstance(value, Weight):
            bias = None if value.bias is None else place(value.bias)
            return self.ops["linear_pack"](moved(value.weight, place), bias, ("check",))
        if isinstance(value, ExpertWeights):
            return self.ops["moe_pack"](place(value.gate_up), place(value.down), value.num_experts, ("check",))
        if isinstance(value, DecoderLayers):
            return _each(value, lambda one: place(one) if isinstance(one, Tensor) else self.realize(one, place))
        return self._cache(value, place) if isinstance(value, KVContent) else value

    def _cache(self, content: KVContent, place: Copy) -> Any:
        assert self.kv_layout is not None, "a provider of the family kv gives its layout"
        count, _, size, heads, head_size = content.blocks.shape
        group = KVGroupSpec(index=0, kind="full", layers=(0,), num_kv_heads=heads, head_size=head_size)
        layout = self.kv_layout(group, content.dtype, size)
        memory = place(torch.zeros(count, layout.block_bytes, dtype=torch.uint8))
        kv = self.ops["kv_bind"](memory, heads, head_size, content.dtype, size)
        self.ops["kv_import"](kv, place(content.blocks), place(torch.arange(count)))
        return kv

    def exported(self, kv: Any, content: KVContent, place: Copy = on_host) -> Tensor:
        """All blocks in the canonical layout, on the host."""
        out = place(torch.zeros_like(content.blocks))
        self.ops["kv_export"](out, kv, place(torch.arange(len(out))))
        return out.to("cpu")


@dataclass(frozen=True, slots=True)
class Where:
    """Where and how arguments are given: on ``device`` (None: in host memory), strided, the output on an input's memory.

    `graph`: the call is captured with other contents, then replayed with the right ones at the same addresses.
    """

    device: Device | None = None
    strided: bool = False
    in_place: bool = False
    graph: bool = False


@dataclass(slots=True)
class Judgement:
    """`problems` has one line per value out of tolerance; `digest` is the SHA-256 of all that the op wrote or returned.

    `ties` counts sampled tokens that differ where rounding decides.
    """

    problems: list[str] = field(default_factory=list)
    digest: str = ""
    ties: int = 0


def reference() -> Provider:
    """Core's references."""
    return Provider({name: spec.load_reference() for name, spec in OPS.items()}, kv_layout)


def mismatches(op: str, provider: Provider, dtype: str, seed: int, shape_class: str) -> list[str]:
    """Run ``op`` of ``provider`` and its reference on generated inputs; one line per value out of tolerance."""
    return judge(op, provider, dtype, seed, shape_class).problems


@torch.inference_mode()
def judge(op: str, provider: Provider, dtype: str, seed: int, shape_class: str, where: Where = Where()) -> Judgement:
    """Run ``op`` of ``provider`` where it is asked to and its reference on the host, and compare all that they touched."""
    if op in PRIVATE:
        return Judgement()
    spec = OPS[op]
    arguments = list(spec.load_generator()(dtype, seed, shape_class))
    if where.in_place:
        arguments[0] = arguments[1]
    oracles = [_expected(op, arguments, oracle) for oracle in _oracles(arguments)]
    place = on_host if where.device is None else on_device(where.device)
    placement = Placement(place, where.strided)
    ours = placement.arguments(spec, arguments, provider.realize)
    if where.graph:
        returned = _replayed(op, provider, placement, arguments, ours, where)
    else:
        returned = provider.ops[op](*ours)
    returned = placement.fetched(returned, None)
    if where.device is not None:
        where.device.synchronize()
    found = [_now(provider, placement, value, ours[i]) for i, value in enumerate(arguments)]
    kv = next((value.dtype for value in arguments if isinstance(value, KVContent)), "")
    tolerance = _APPROXIMATE.get(kv, spec.tolerances[dtype])
    if len(oracles) > 1:
        tolerance = _looser(tolerance, _ROUNDED_OTHERS.get(op, _ROUNDED))
    unread = {index for index, name in enumerate(arguments_of(spec)) if name.endswith("~")}

    def differences(theirs: Sequence[Any], expected: Any) -> list[str]:
        lines = _compare("result", returned, expected, tolerance)
        for index, value in enumerate(arguments):
            if not isinstance(value, (Weight, ExpertWeights)) and index not in unread:
                lines += _compare(f"argument {index}", found[index], _seen(value, theirs[index]), tolerance)
        return lines

    theirs = oracles[0][0]
    judged = [differences(*one) for one in oracles]
    problems = next((lines for lines in judged if not lines), judged[-1])
    if spilled := placement.spilled():
        problems.append(f"{spilled} elements beside the arguments were overwritten")
    result = Judgement(problems, _digest([returned, found]))
    if op == "sample" and problems:
        _forgive_ties(result, arguments, found, theirs)
    return result


def _oracles(arguments: Sequence[Any]) -> tuple[Provider, ...]:
    """The reference; where inputs may be rounded to fp8, the one that rounds them too: a call is as either has it."""
    exact = reference()
    if not any(isinstance(value, Weight) and isinstance(value.weight, QuantTensor) for value in arguments):
        return (exact,)
    return exact, Provider({**exact.ops, "linear_pack": linear_pack_fp8}, exact.kv_layout)


def _looser(one: Tolerance, other: Tolerance) -> Tolerance:
    return Tolerance(max(one.absolute, other.absolute), max(one.relative, other.relative))


def _expected(op: str, arguments: Sequence[Any], oracle: Provider) -> tuple[list[Any], Any]:
    """The oracle's arguments after its call, widened, and what it returned."""
    memo: dict[int, Any] = {}
    theirs = []
    for value in copy.deepcopy(list(arguments)):
        if id(value) not in memo:
            memo[id(value)] = oracle.realize(_widen(value))
        theirs.append(memo[id(value)])
    return theirs, oracle.ops[op](*theirs)


def _replayed(
    op: str, provider: Provider, placement: Placement, arguments: Sequence[Any], ours: Sequence[Any], where: Where
) -> Any:
    """What the op returned while it was captured; its results are those of a replay."""
    device, results = where.device, []
    assert device is not None, "graphs are a device's"
    placement.blur()
    provider.ops[op](*ours)
    device.synchronize()
    graph = device.capture(lambda: results.append(provider.ops[op](*ours)))
    placement.refill()
    pairs = list(zip(arguments, ours, strict=True))
    stacks = [pair for pair in pairs if isinstance(pair[0], DecoderLayers)]
    pairs += [(one.kv, mine.kv) for stack in stacks for one, mine in zip(stack[0].layers, stack[1].layers, strict=True)]
    for value, mine in pairs:
        if isinstance(value, KVContent):
            provider.ops["kv_import"](mine, placement.copy(value.blocks), placement.copy(torch.arange(len(value.blocks))))
    graph.replay()
    device.synchronize()
    return results[0]


def _now(provider: Provider, placement: Placement, value: Any, ours: Any) -> Any:
    """What an argument holds after the call, on the host."""
    if isinstance(value, DecoderLayers):
        pairs = zip(value.layers, ours.layers, strict=True)
        return [_now(provider, placement, one.kv, mine.kv) for one, mine in pairs]
    if isinstance(value, KVContent):
        return provider.exported(ours, value, placement.copy)
    return None if isinstance(value, (Weight, ExpertWeights)) else placement.fetched(ours, value)


def _seen(value: Any, theirs: Any) -> Any:
    """What the reference's argument holds, as its readers see it."""
    if isinstance(value, DecoderLayers):
        return [_seen(one.kv, mine.kv) for one, mine in zip(value.layers, theirs.layers, strict=True)]
    if not isinstance(value, KVContent):
        return theirs
    blocks = reference().exported(theirs, value)
    return blocks if value.dtype in _APPROXIMATE else blocks.to(KV_DTYPES[value.dtype]).float()


def _widen(value: Any) -> Any:
    """Floating tensors in float32; a described weight too, a cache keeps its dtype where references have it."""
    if isinstance(value, DecoderLayers):
        return _each(value, _widen)
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, Weight):
        weight = value.weight.float() if isinstance(value.weight, Tensor) else value.weight
        return Weight(weight, None if value.bias is None else value.bias.float())
    if isinstance(value, ExpertWeights):
        return ExpertWeights(value.gate_up.float(), value.down.float(), value.num_experts)
    if isinstance(value, KVContent) and value.dtype not in TORCH_DTYPES:
        return KVContent(value.blocks, "float32")
    return value


def _each(value: DecoderLayers, change: Callable[[Any], Any]) -> DecoderLayers:
    """With ``change`` of all weights, caches and tables."""
    names = [one.name for one in fields(DecoderLayer)]
    layers = tuple(replace(one, **{name: change(getattr(one, name)) for name in names}) for one in value.layers)
    return replace(value, layers=layers, cos_sin=change(value.cos_sin), made={})


def _compare(name: str, actual: Any, expected: Any, tolerance: Tolerance) -> list[str]:
    if isinstance(expected, Tensor):
        return _compare_tensors(name, actual, expected, tolerance)
    if isinstance(expected, (tuple, list)):
        if len(actual) != len(expected):
            return [f"{name}: {len(actual)} items, expected {len(expected)}"]
        pairs = zip(actual, expected, strict=True)
        return [line for i, pair in enumerate(pairs) for line in _compare(f"{name}[{i}]", *pair, tolerance)]
    if is_dataclass(expected):
        if isinstance(expected, BatchState):
            actual, expected = _without_padding(actual), _without_padding(expected)
        names = [one.name for one in fields(expected)]
        return [line for n in names for line in _compare(f"{name}.{n}", getattr(actual, n), getattr(expected, n), tolerance)]
    return [] if actual == expected else [f"{name}: {actual!r}, expected {expected!r}"]


def _without_padding(state: BatchState) -> BatchState:
    """The padding row holds anything, except that its `computed` stays 0."""
    cut = {one.name: getattr(state, one.name) for one in fields(state) if one.name != "computed"}
    for name, value in cut.items():
        if isinstance(value, Tensor):
            cut[name] = value[: state.num_slots]
    cut["block_tables"] = tuple(table[: state.num_slots] for table in state.block_tables)
    return replace(state, **cut)


def _compare_tensors(name: str, actual: Any, expected: Tensor, tolerance: Tolerance) -> list[str]:
    if not isinstance(actual, Tensor):
        return [f"{name}: {type(actual).__name__}, expected a tensor"]
    if actual.shape != expected.shape:
        return [f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"]
    if not expected.is_floating_point():
        if actual.dtype != expected.dtype:
            return [f"{name}: {actual.dtype}, expected {expected.dtype}"]
        wrong = actual != expected
    else:
        wrong = ~torch.isclose(actual.float(), expected, tolerance.relative, tolerance.absolute, equal_nan=True)
    count = int(wrong.sum())
    if not count:
        return []
    at = tuple(int(i) for i in wrong.nonzero()[0])
    return [f"{name}: {count} of {wrong.numel()} values; at {at}: {actual[at]}, expected {expected[at]}"]


def _forgive_ties(result: Judgement, arguments: Sequence[Any], found: Sequence[Any], theirs: Sequence[Any]) -> None:
    """Drop the difference in tokens where each is one that rounding decides."""
    _, _, logits, state, slots, lengths, _ = arguments
    rows = (found[0] != theirs[0]).nonzero()[:, 0].tolist()
    if all(is_tie(logits[r], state.params[slots[r]], int(lengths[r]), int(found[0][r, 0])) for r in rows):
        result.problems = [line for line in result.problems if not line.startswith("argument 0")]
        result.ties = len(rows)


def _digest(value: Any) -> str:
    hashed = hashlib.sha256()
    for tensor in _tensors(value):
        hashed.update(tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    if is_dataclass(value) and not isinstance(value, type):
        return [tensor for one in fields(value) for tensor in _tensors(getattr(value, one.name))]
    return []
