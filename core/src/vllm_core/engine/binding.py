"""Call sites bound once to plain callables, and the way back from a traceback to the provider that failed.

Nothing stands between a layer and the function it fetched: attribution costs nothing until something fails.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FunctionType, TracebackType
from typing import Any, Protocol, TypeAlias

from vllm_core.api import OPS, ProviderKind, load_entry
from vllm_core.engine.decompose import DECOMPOSITIONS
from vllm_core.errors import EngineError

Bind: TypeAlias = Callable[[Callable[..., Any], str], Callable[..., Any]]
"""From an op and its provider to what is called: `Device.bind`."""


class BindingLike(Protocol):
    """What the engine reads of a plan's binding."""

    @property
    def op(self) -> str:
        """Name of the op."""

    @property
    def role(self) -> str:
        """Place in the model or engine."""

    @property
    def provider(self) -> str:
        """Who implements it."""

    @property
    def entry(self) -> str:
        """``module:callable``."""

    @property
    def kind(self) -> ProviderKind:
        """Kernel, vendor call, reference or host."""

    @property
    def formats(self) -> tuple[str, ...]:
        """Quantised formats of weights that it reads."""


class BoundOps:
    """The callables of one engine, by (op, role), as ``bind`` of its device has them."""

    def __init__(self, bindings: Iterable[BindingLike], bind: Bind | None = None) -> None:
        self._bindings = {(b.op, b.role): b for b in bindings}
        self._callables = _load_all(self._bindings, bind)

    def get(self, op: str, role: str) -> Callable[..., Any]:
        """Return the callable of a call site; a fused op without a provider is put together from its parts.

        Raises EngineError for a call site that the plan does not have.
        """
        found = self._callables.get((op, role))
        if found is None and op in DECOMPOSITIONS:
            return DECOMPOSITIONS[op](self.get, role)
        if found is None:
            raise EngineError(
                "Call site has no provider",
                on=f"{op} at {role}",
                found="no binding in the plan",
                expected="a binding for each call site of the model",
                fix="report this: the model's call sites and its layers disagree",
            )
        return found

    def has(self, op: str, role: str) -> bool:
        """Whether a provider serves the call site, rather than its parts."""
        return (op, role) in self._bindings

    def binding(self, op: str, role: str) -> BindingLike | None:
        """The plan's binding of a call site; None where it has none."""
        return self._bindings.get((op, role))

    def formats(self, op: str, role: str) -> frozenset[str]:
        """Quantised formats of weights that the provider of a call site reads; none where the plan does not have it."""
        found = self.binding(op, role)
        return frozenset() if found is None else frozenset(found.formats)

    def kinds(self) -> Counter[str]:
        """How many call sites each kind of provider serves."""
        return Counter(binding.kind for binding in self._bindings.values())

    def culprit(self, trace: TracebackType | None) -> BindingLike | None:
        """The binding whose callable is innermost in a traceback, or None where no provider is involved."""
        owners = {
            code: self._bindings[key]
            for key, function in self._callables.items()
            if (code := getattr(function, "__code__", None)) is not None
        }
        found: BindingLike | None = None
        while trace is not None:
            found = owners.get(trace.tb_frame.f_code, found)
            trace = trace.tb_next
        return found


def _load_all(bindings: Mapping[tuple[str, str], BindingLike], bind: Bind | None) -> dict[tuple[str, str], Callable[..., Any]]:
    """Import the providers' callables. Raises ProviderFailedError.

    A traceback knows nothing but code, and one function may serve several call sites, or one wrapper several ops: from
    the second on each gets a copy with a code object of its own. What is no Python function has no code at all, and gets
    some around it.
    """
    found: dict[tuple[str, str], Callable[..., Any]] = {}
    seen: set[CodeType] = set()
    for key, binding in bindings.items():
        try:
            function = load_entry(binding.entry)
            _check_arguments(function, binding.op)
            if bind is not None:
                function = bind(function, binding.provider)
        except Exception as error:
            raise ProviderFailedError.of(binding, error) from error
        traced = function if isinstance(function, FunctionType) else _with_code(function)
        if traced.__code__ in seen:
            traced = _copy(traced, f"{binding.op}@{binding.role}")
        seen.add(traced.__code__)
        found[key] = traced
    return found


def _check_arguments(function: Callable[..., Any], op: str) -> None:
    """Raise TypeError where a call would: it fails in the caller, and no frame of its trace is the provider's."""
    if op in OPS:
        from vllm_core.ops.place import needed_of  # torch: who schedules alone has none

        try:
            signature = inspect.signature(function)
        except ValueError:
            return  # one that is built in may have none to show
        signature.bind(*needed_of(OPS[op]))


def _with_code(function: Callable[..., Any]) -> FunctionType:
    def call(*arguments: Any) -> Any:
        return function(*arguments)

    assert isinstance(call, FunctionType)
    return call


def _copy(function: FunctionType, name: str) -> FunctionType:
    code = function.__code__.replace(co_name=name)
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class ProviderFailedError(EngineError):
    """A bound op raised; `binding` says which."""

    def __init__(self, what: str, *, on: str, found: str, expected: str, fix: str) -> None:
        super().__init__(what, on=on, found=found, expected=expected, fix=fix)
        self.binding: BindingLike | None = None

    @classmethod
    def of(cls, binding: BindingLike, cause: BaseException) -> ProviderFailedError:
        """Describe the failure of ``binding`` with ``cause``."""
        error = cls(
            "Op provider failed",
            on=f"{binding.op} at {binding.role}, provider {binding.provider}",
            found=f"{type(cause).__name__}: {cause}",
            expected="the op to run at a shape that the model uses",
            fix=f"--deny-provider {binding.provider}, and report it to its authors",
        )
        error.binding = binding
        return error
