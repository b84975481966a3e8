"""Triton kernels on the simulated device: Triton's interpreter does the arithmetic, the device's queue says when.

A launch is queued like any other work and gets the bytes behind its tensors when the device comes to it, so that it may be
captured in a graph, and a result that is read too early is garbage. What a program does is Triton's own `fn` on numpy arrays,
about a tenth of a millisecond an operation.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

PREFIX = "triton::"
"""Before the kernel's name in the log of what ran."""


def install(native: ModuleType, kind: str) -> None:
    """Let kernels whose tensors are on devices of this type run there. The variable TRITON_INTERPRET is set already."""
    from triton.runtime import interpreter

    from vllm_simulator import bfloat16

    bfloat16.mend()
    _speak_once(interpreter)
    executor: Any = interpreter.GridExecutor
    executor.__call__ = _launcher(native, kind, executor.__call__)


def _speak_once(interpreter: Any) -> None:
    """Triton's language means the interpreter's from here on; left alone, it is exchanged at each call of each function."""
    from triton import language as tl

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()


def _launcher(native: ModuleType, kind: str, elsewhere: Callable[..., Any]) -> Callable[..., None]:
    def on_device(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == kind

    def memory(value: Any) -> Any:
        return native.memory(value) if on_device(value) else value

    def launch(self: Any, *arguments: Any, **options: Any) -> None:
        tensors = [value for value in (*arguments, *options.values()) if on_device(value)]
        if not tensors:
            elsewhere(self, *arguments, **options)
            return

        def work() -> None:
            _run(self, [memory(value) for value in arguments], {name: memory(value) for name, value in options.items()})

        native.launch(tensors[0].device.index, f"{PREFIX}{self.fn.__name__}", work, False)

    return launch


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _run(executor: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """All programs of the grid, one after the other; options of the launch that are none of the kernel's are left out."""
    from triton.runtime import interpreter

    given = {name: value for name, value in options.items() if name in _parameters(executor.fn)}
    for hook in executor.pre_run_hooks:
        hook(*arguments, **given)
    bound = inspect.getcallargs(executor.fn, *arguments, **given)
    fixed: Any = executor.constexprs
    values = {name: value if name in fixed else interpreter._implicit_cvt(value) for name, value in bound.items()}
    grid = executor.grid(values) if callable(executor.grid) else executor.grid
    x, y, z = (*grid, 1, 1)[:3]
    builder: Any = interpreter.interpreter_builder
    builder.set_grid_dim(x, y, z)
    for place in itertools.product(range(x), range(y), range(z)):
        builder.set_grid_idx(*place)
        executor.fn(**values)
