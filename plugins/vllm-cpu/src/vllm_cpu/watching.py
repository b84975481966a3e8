"""Torch's own functions in a recording: each is noted, and what reads a tensor into Python is refused.

Functions that make a new tensor are called again too, and their result is copied to where it was: later ones read it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vllm_core.api import UnsupportedError
from vllm_cpu.recording import PythonCall, Recorder

MOST_KEPT_BYTES = 64 << 20
"""What the tensors that a recording's functions make may take together: they stay, in each recording."""

_FACTS = frozenset(
    {"__get__", "__hash__", "__len__", "data_ptr", "dim", "element_size", "get_device", "is_complex", "is_contiguous"}
    | {"is_floating_point", "is_inference", "is_signed", "ndimension", "nelement", "numel", "size", "storage_offset", "stride"}
)
"""What tells of a tensor other things than its values."""

_BY_VALUES = frozenset(
    {"argwhere", "bincount", "masked_select", "nonzero", "repeat_interleave", "unique", "unique_consecutive", "unique_dim"}
)
"""Functions whose result has a shape that depends on values."""

_UNFILLED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


class Watch(TorchFunctionMode):
    """Lets ``recorder`` see what Python asks of torch."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._kept_bytes = recorder, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        if not self._recorder.inside:
            self._note(getattr(func, "__name__", str(func)), partial(func, *args, **given), (*args, *given.values()), result)
        return result

    def _note(self, name: str, again: Callable[[], Any], arguments: Sequence[Any], result: Any) -> None:
        made = tuple(_tensors(result))
        if result is not None and not made and not (isinstance(result, (tuple, list)) and not result):
            if name not in _FACTS:
                self._recorder.refuse(f"torch's {name} gave Python a {type(result).__name__} between ops")
            return
        before = tuple(_tensors(arguments))
        if name in _BY_VALUES or (name == "__getitem__" and any(one.dtype is torch.bool for one in before[1:])):
            self._recorder.refuse(f"torch's {name} was called between ops: the shape of its result depends on values")
        storages = {one.untyped_storage()._cdata for one in before}
        if result is None or any(one is other for one in made for other in before):
            self._recorder.add(PythonCall(name, again))
        elif name not in _UNFILLED and any(one.untyped_storage()._cdata not in storages for one in made):
            self._keep(made)
            self._recorder.add(PythonCall(name, partial(_refill, name, made, again)))

    def _keep(self, made: Sequence[Tensor]) -> None:
        self._kept_bytes += sum(one.numel() * one.element_size() for one in made)
        if self._kept_bytes > MOST_KEPT_BYTES:
            self._recorder.refuse(f"torch's functions between ops make more than {MOST_KEPT_BYTES} bytes of tensors")


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those in an argument or a result; containers nest."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)


def _refill(name: str, made: Sequence[Tensor], again: Callable[[], Any]) -> None:
    found = tuple(_tensors(again()))
    if [one.shape for one in found] != [one.shape for one in made]:
        raise UnsupportedError(
            "A recorded step cannot be replayed",
            on=f"torch's {name}",
            found=f"results of shapes {[tuple(one.shape) for one in found]}",
            expected=f"{[tuple(one.shape) for one in made]}, as when it was recorded",
            fix="--enforce-eager, and report it",
        )
    for target, source in zip(made, found, strict=True):
        target.copy_(source)
