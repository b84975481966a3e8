"""A model compiled by torch.compile: all of a step's layers are one graph, in which the call of an op is opaque.

Sizes of a step are symbols: a model has one graph for steps of which all rows are wanted, one for others, one for a single
token, and maybe one more where several KV groups lie together, whatever steps there are.

torch: "torch.library", "torch.compile", "torch._dynamo.mark_dynamic".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from types import FunctionType, MethodType
from typing import Any

import torch
from torch._dynamo import list_backends, mark_dynamic, mark_static
from torch.fx.experimental import _config as shapes

from vllm_core.api import OPS, Device, OpSpec, QuantTensor, StepInputs
from vllm_core.engine.binding import BoundOps
from vllm_core.engine.decompose import DECOMPOSITIONS
from vllm_core.errors import ConfigError, nearest
from vllm_core.models.build import Model
from vllm_core.ops.place import declared, needed_of

_TENSOR = re.compile(r"(float|int|uint|bool)\d*\[")
_WEIGHT = "Tensor data, Tensor? scale, Tensor? zero, str format, SymInt[] shape"
"""What an op is given in place of a quantised weight."""

_namespaces = count()

# What torch has no types for.
_Library: Any = torch.library.Library
_shapes: Any = shapes
_check: Any = torch._check


class CompiledOps:
    """The call sites of an engine as torch's ops. What providers made of weights and KV is passed by number.

    A layer's KV is a pair, with a tensor of one byte that stands for its memory: what writes to the one writes to the other, so
    that torch keeps calls, and their order, without looking at the memory.
    """

    def __init__(self, ops: BoundOps) -> None:
        self._ops = ops
        self._kept: list[Any] = []
        self._made: dict[tuple[str, str], Callable[..., Any]] = {}
        self.namespace = f"vllm_core_{next(_namespaces)}"
        self._library = _Library(self.namespace, "FRAGMENT")

    def formats(self, op: str, role: str) -> frozenset[str]:
        """As `BoundOps.formats`."""
        return self._ops.formats(op, role)

    def has(self, op: str, role: str) -> bool:
        """Not all layers at once: the compiler is given the calls of each."""
        return op != "decode_layers" and self._ops.has(op, role)

    def keep(self, value: Any) -> int:
        """The number by which ops find ``value``."""
        self._kept.append(value)
        return len(self._kept) - 1

    def get(self, op: str, role: str) -> Callable[..., Any]:
        """Return the op of a call site. Raises EngineError as `BoundOps.get`."""
        found = self._made.get((op, role))
        if found is None:
            found = self._made[op, role] = self._make(op, role)
        return found

    def _make(self, op: str, role: str) -> Callable[..., Any]:
        if self._ops.binding(op, role) is None and op in DECOMPOSITIONS:
            return DECOMPOSITIONS[op](self.get, role)
        plain, spec = self._ops.get(op, role), OPS[op]
        if "->" in spec.schema:
            return lambda *arguments: self.keep(plain(*arguments))
        opaque = self._define(spec, plain, quantised=False)
        return _either(opaque, self._define(spec, plain, quantised=True)) if op.startswith("embedding") else opaque

    def _define(self, spec: OpSpec, plain: Callable[..., Any], *, quantised: bool) -> Callable[..., Any]:
        """An op of torch that writes to what the schema marks, and is opaque to the compiler."""
        declarations = declared(spec)
        packed = [index for index, text in enumerate(declarations) if text.startswith("Packed ")]
        caches = [index for index, text in enumerate(declarations) if text.startswith("KV ")]
        needed, kept = len(needed_of(spec)), self._kept

        def call(*given: Any) -> None:
            arguments = list(given)
            if quantised:
                data, scale, zero, name, shape = arguments[2:7]
                arguments[2:7] = [QuantTensor(name, tuple(shape), data, scale, zero)]
            for index in caches:
                arguments[index : index + 2] = [kept[arguments[index + 1]]]
            for index in packed:
                arguments[index] = kept[arguments[index]]
            while len(arguments) > needed and arguments[-1] is None:
                arguments.pop()
            plain(*arguments)

        schema = torch_schema(spec)
        name = f"{spec.name}_{len(self._made)}"
        if quantised:
            name, schema = f"{name}_quantised", schema.replace("Tensor weight", _WEIGHT)
        self._library.define(name + schema)
        self._library.impl(name, call, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{self.namespace}::{name}", lambda *_: None, lib=self._library)
        made: Callable[..., Any] = getattr(getattr(torch.ops, self.namespace), name).default
        return _flattened(made, caches[0]) if caches else made


def torch_schema(spec: OpSpec) -> str:
    """An op's schema as torch writes it: marked tensors are written to; weights are numbers, KV a tensor and a number."""
    return f"({', '.join(_torch_arguments(spec))}) -> ()"


def _torch_arguments(spec: OpSpec) -> Iterator[str]:
    written = map(chr, range(ord("a"), ord("z") + 1))
    for text in declared(spec):
        declaration, _, default = text.partition(" = ")
        kind, _, name = declaration.rpartition(" ")
        plain = name.rstrip("!~")
        mark = "" if name == plain else f"({next(written)}!)"
        if kind == "KV":
            yield f"Tensor{mark} memory_of_{plain}, SymInt {plain}"
            continue
        if not _TENSOR.match(kind):
            yield f"{kind if kind in ('float', 'bool', 'str') else 'SymInt'} {plain}"
            continue
        yield f"Tensor{mark}{'?' if kind.endswith('?') else ''} {plain}{f'={default}' if default else ''}"


def _flattened(opaque: Callable[..., Any], at: int) -> Callable[..., Any]:
    """An op whose argument ``at`` is given as a pair."""

    def call(*given: Any) -> None:
        opaque(*given[:at], *given[at], *given[at + 1 :])

    return call


def _either(opaque: Callable[..., Any], quantised: Callable[..., Any]) -> Callable[..., Any]:
    """An op whose third argument is a plain weight, or a quantised one."""

    def call(out: Any, ids: Any, weight: Any, *rest: Any) -> None:
        if isinstance(weight, QuantTensor):
            quantised(out, ids, weight.data, weight.scale, weight.zero, weight.format, weight.shape, *rest)
        else:
            opaque(out, ids, weight, *rest)

    return call


class CompiledModel:
    """``model``, built on `CompiledOps`, whose `forward` is compiled by ``backend``; all else is the model's own.

    ``max_tokens`` and ``max_rows`` bound what a step may have. The model has room for one more of each, so that no size is at a
    buffer's end, where the compiler would make a graph of its own. Raises ConfigError for a backend that torch does not know.
    """

    def __init__(self, model: Model, ops: CompiledOps, device: Device, *, backend: str, max_tokens: int, max_rows: int) -> None:
        self._model, self._ops, self._device = model, ops, device
        self._max_tokens, self._max_rows = max_tokens, max_rows
        self._kv: tuple[Sequence[Any], tuple[tuple[torch.Tensor, int], ...]] = ((), ())
        self._nothing = torch.empty(0, dtype=torch.int64)
        _check_backend(backend)
        # torch bounds how many graphs a code object has, and takes for dynamic what differs between calls of a name: each model
        # gets its own.
        run = FunctionType(self._run.__code__.replace(co_name=f"step_of_{ops.namespace}"), globals())
        self._step = torch.compile(MethodType(run, self), fullgraph=True, backend=backend)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, inputs: StepInputs, kv: Sequence[Any], rows: torch.Tensor | None = None) -> torch.Tensor:
        """As the model's."""
        if self._kv[0] is not kv:
            self._kv = kv, tuple((self._device.allocate("state", (1,), torch.uint8), self._ops.keep(one)) for one in kv)
        if rows is not None and not len(rows):
            return self.forward(inputs, kv)[:0]
        of_tokens = (inputs.token_ids, inputs.positions, *inputs.slot_mapping)
        of_rows = (inputs.query_start, inputs.seq_lens, *inputs.block_tables)
        # Numbers that no tensor of the step has as its size come as sizes, too: a plain one would be a constant.
        bounds = [torch.empty((size, 0)) for size in (inputs.max_query_len, inputs.max_seq_len)]
        # A single token's step is a graph of its own: what lies behind it in memory would have an offset of one.
        mark_size = mark_dynamic if inputs.num_tokens > 1 else mark_static
        for tensor in (*of_tokens, *of_rows):
            mark_size(tensor, 0)
        for tensor in bounds:
            mark_dynamic(tensor, 0)
        for tensor in inputs.block_tables:
            mark_dynamic(tensor, 1)
        if rows is not None:
            mark_dynamic(rows, 0)
        with _shapes.patch(backed_size_oblivious=True):
            hidden: torch.Tensor = self._step(inputs, bounds, self._kv[1], rows)
        return hidden

    def _run(
        self, inputs: StepInputs, bounds: Sequence[torch.Tensor], kv: Sequence[Any], rows: torch.Tensor | None
    ) -> torch.Tensor:
        """What is compiled. Models read nothing of what is sampled, so that its sizes are none of the graph's."""
        _check(inputs.token_ids.shape[0] <= self._max_tokens)
        if rows is not None:
            _check(rows.shape[0] <= self._max_rows)
        return self._model.forward(
            StepInputs(
                token_ids=inputs.token_ids,
                positions=inputs.positions,
                slots=self._nothing,
                query_start=inputs.query_start,
                seq_lens=inputs.seq_lens,
                sample_rows=self._nothing,
                sample_slots=self._nothing,
                sample_lengths=self._nothing,
                slot_mapping=inputs.slot_mapping,
                block_tables=inputs.block_tables,
                num_tokens=inputs.token_ids.shape[0],
                num_rows=inputs.seq_lens.shape[0],
                max_query_len=bounds[0].shape[0],
                max_seq_len=bounds[1].shape[0],
            ),
            kv,
            rows,
        )


def _check_backend(name: str) -> None:
    known = list_backends(exclude_tags=())
    if name not in known:
        raise ConfigError(
            "Compiler is not known",
            on=f"--compile {name}",
            found=f"torch {torch.__version__} with the backends {', '.join(known)}",
            expected="one of them",
            fix=f"{nearest(name, known)}; or install the package that brings it",
        )
