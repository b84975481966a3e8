"""Small tensors in another dtype, cast once: the vendor's norms want their weight in the activations' dtype."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_made: MutableMapping[Tensor, dict[object, Tensor]] = WeakIdKeyDictionary()


def derived(source: Tensor, name: object, make: Callable[[Tensor], Tensor]) -> Tensor:
    """What ``make`` makes of ``source``, made once under ``name``; forgotten with ``source``, whose values never change."""
    known: dict[object, Tensor] = _made.setdefault(source, {})
    found = known.get(name)
    if found is None:
        found = known[name] = make(source)
    return found


def cast(source: Tensor, dtype: torch.dtype) -> Tensor:
    """``source`` in ``dtype``."""
    return source if source.dtype == dtype else derived(source, dtype, lambda tensor: tensor.to(dtype))
