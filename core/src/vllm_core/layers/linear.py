"""A linear layer's weight: merged while loading, packed once by its provider."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from vllm_core.api import Device, Weight
from vllm_core.api.quant import ONLINE_FORMATS
from vllm_core.layers.shard import COLUMNS, Cut, Shard
from vllm_core.layers.weights import WeightLoader
from vllm_core.ops import quant


class BoundOps(Protocol):
    """Where layers fetch the callables of their call sites, once."""

    def get(self, op: str, role: str) -> Callable[..., Any]:
        """Return the callable of ``op`` at ``role``. Raises EngineError where the plan has none."""

    def has(self, op: str, role: str) -> bool:
        """Whether a provider serves the call site, rather than its parts."""

    def formats(self, op: str, role: str) -> frozenset[str]:
        """Quantised formats of weights that the provider of ``op`` at ``role`` reads."""


class PackedLinear:
    """The weight of one call site of `linear`: `packed` is the provider's own form, set when loading is done."""

    __slots__ = ("_bias", "_device", "_formats", "_pack", "_readers", "_weight", "_with_bias", "packed")

    def __init__(self, device: Device, ops: BoundOps) -> None:
        self._device = device
        self._pack = ops.get("linear_pack", "linear")
        self._formats = ops.formats("linear_pack", "linear")
        self._weight: Weight | None = None
        self._bias: torch.Tensor | None = None
        self._with_bias = False
        self._readers: list[str] = []
        self.packed: Any = None

    def expect(
        self,
        loader: WeightLoader,
        rows: Mapping[str, int],
        columns: int,
        dtype: torch.dtype,
        *,
        bias: bool,
        cuts: Mapping[str, Cut | None] | None = None,
        exact: bool = False,
    ) -> None:
        """Register weights [rows, columns] by layer name, stacked in this order, and biases [rows] if there are any.

        ``cuts`` are rows that this worker keeps, of weight and bias. ``exact``: plain numbers are not rounded, whatever
        the user asked for.
        """
        self._readers = list(rows)
        parts = cuts or {}
        weights = {f"{name}.weight": cut for name, cut in parts.items()}
        shapes = {f"{name}.weight": (n, columns) for name, n in rows.items()}
        rounded = () if exact else rounded_to(loader)
        loader.expect(shapes, dtype, self._take_weight, cuts=weights, formats=self._formats, rounded=rounded)
        if bias:
            biases = {f"{name}.bias": cut for name, cut in parts.items()}
            self._with_bias = True
            loader.expect({f"{name}.bias": (n,) for name, n in rows.items()}, dtype, self._take_bias, cuts=biases)

    def expect_summed(
        self,
        loader: WeightLoader,
        name: str,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        *,
        bias: bool,
        shard: Shard,
        cut: Cut | None = None,
    ) -> None:
        """Register a weight [rows, columns] of which each worker keeps columns: their outputs are summed.

        ``cut`` are this worker's, where they are not an equal part. The bias is added by one of them.
        """
        self._readers = [name]
        weight = f"{name}.weight"
        cut = cut or shard.part(columns, COLUMNS)
        loader.expect(
            {weight: (rows, columns)},
            dtype,
            self._take_weight,
            cuts={weight: cut},
            formats=self._formats,
            rounded=rounded_to(loader),
        )
        if bias:
            self._with_bias = shard.is_first
            loader.expect({f"{name}.bias": (rows,)}, dtype, self._take_bias if shard.is_first else _drop)

    def share(self, weight: Weight, readers: list[str]) -> None:
        """Pack a weight on the device that others read too."""
        self.packed = self._pack(weight, None, readers)

    def _take_weight(self, weight: Weight) -> None:
        self._weight = adopt(self._device, weight)
        self._finish()

    def _take_bias(self, bias: torch.Tensor) -> None:
        self._bias = self._device.adopt("weights", bias)
        self._finish()

    def _finish(self) -> None:
        if self._weight is None or (self._with_bias and self._bias is None):
            return
        self.packed = self._pack(self._weight, self._bias, self._readers)
        self._weight = self._bias = None


def rounded_to(loader: WeightLoader) -> Sequence[str]:
    """Formats that weights of products are rounded to, best first; none unless the user asked for it."""
    return ONLINE_FORMATS[loader.quantization] if loader.quantization is not None else ()


def adopt(device: Device, weight: Weight) -> Weight:
    """The weight in the device's memory."""
    return quant.moved(weight, lambda tensor: device.adopt("weights", tensor))


def _drop(bias: torch.Tensor) -> None:
    """Another worker adds it."""
