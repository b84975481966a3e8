"""bfloat16 in Triton's interpreter, which keeps such numbers as 16-bit integers and computes with these.

Here an operation on them is one on the float32 of the same value, rounded once to nearest even, as the processors of GPUs do
it. A reduction of them raises: a kernel widens before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from triton import language as tl
from triton.runtime import interpreter

_Handle: Any = interpreter.TensorHandle
_Builder: Any = interpreter.InterpreterBuilder
_QUIET_NAN = 0x7FC0


def widened(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The numbers that these bits are."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The nearest ones, of two equally near the even one; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(_QUIET_NAN), nearest).astype(np.uint16)


def _is_narrow(handle: Any) -> bool:
    return isinstance(handle, _Handle) and handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16


def _wide(handle: Any) -> Any:
    return _Handle(widened(handle.data), tl.float32) if _is_narrow(handle) else handle


def _through_float32(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method of the interpreter's builder on wide operands; a result in float32 is rounded."""

    def wrapped(self: Any, *operands: Any) -> Any:
        if not any(map(_is_narrow, operands)) or (operands[-1] is np.where):
            return method(self, *operands)
        result = method(self, *map(_wide, operands))
        return _Handle(rounded(result.data), tl.bfloat16) if result.data.dtype == np.float32 else result

    return wrapped


def _dot(method: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, a: Any, b: Any, accumulator: Any, *more: Any) -> Any:
        return method(self, _wide(a), _wide(b), accumulator, *more)

    return wrapped


def _cast(method: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, source: Any, target: Any) -> Any:
        wide = _wide(source)
        if target.scalar != tl.bfloat16:
            return method(self, wide, target) if wide.dtype.scalar != target.scalar else wide
        if _is_narrow(source):
            return source
        if wide.dtype.scalar != tl.float32:
            wide = method(self, wide, tl.float32)
        return _Handle(rounded(wide.data), tl.bfloat16)

    return wrapped


def _reduction(method: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, operands: Any) -> Any:
        if any(one.dtype.scalar == tl.bfloat16 for one in operands):
            raise TypeError("a reduction of bfloat16 is not simulated: widen the operand")
        return method(self, operands)

    return wrapped


def mend() -> None:
    """For the life of the process. Call it once."""
    for name in ("binary_op", "unary_op", "ternary_op", "create_fma", "create_erf", "create_rsqrt"):
        setattr(_Builder, name, _through_float32(getattr(_Builder, name)))
    _Builder.create_dot = _dot(_Builder.create_dot)
    _Builder.cast_impl = _cast(_Builder.cast_impl)
    for kind in (interpreter.ReduceOps, interpreter.ScanOps):
        reduction: Any = kind
        reduction.apply_impl = _reduction(reduction.apply_impl)
