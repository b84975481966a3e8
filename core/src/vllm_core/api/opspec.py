"""The type of an op's specification, and the errors of registering and looking up ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, cast

Family = Literal["kv", "linear", "batch", "moe", "comm"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest difference from the reference computed in float32: ``|a - b| <= absolute + relative * |b|``."""

    absolute: float
    relative: float


EXACT = Tolerance(0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSpec:
    """Specification of one op.

    `schema` gives the call: arguments with dtype and shape, mutated ones marked ``!``. `doc` says what it computes,
    with layouts and units. `reference` is ``"module:callable"``: a native PyTorch implementation, which is the
    specification. `decomposition` names the ops a fused form falls back to. `generator` is ``"module:callable"``,
    a function of (dtype, seed, shape class) that returns arguments. `features` are the names that call sites may
    ask for and offers must declare.
    """

    name: str
    schema: str
    doc: str
    reference: str
    generator: str
    tolerances: Mapping[str, Tolerance]
    version: int = 1
    family: Family | None = None
    decomposition: tuple[str, ...] = ()
    features: frozenset[str] = field(default_factory=frozenset)
    since: tuple[int, int] = (0, 1)

    def load_reference(self) -> Callable[..., Any]:
        """Import and return the reference."""
        return load_entry(self.reference)

    def load_generator(self) -> Callable[..., Any]:
        """Import and return the input generator."""
        return load_entry(self.generator)


def load_entry(entry: str) -> Callable[..., Any]:
    """Import ``"module:name"``. Raises ImportError or AttributeError as Python does."""
    module, _, name = entry.partition(":")
    return cast("Callable[..., Any]", getattr(import_module(module), name))
