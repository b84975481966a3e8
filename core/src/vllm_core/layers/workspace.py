"""Activations of a step: buffers allocated once at the largest step, and their views for each number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from vllm_core.api import Device
from vllm_core.layers.experts import RoutedBuffers, RoutedViews
from vllm_core.models.spec import ModelSpec
from vllm_core.ops.dtypes import TORCH_DTYPES

MAX_CACHED_VIEWS = 1024
"""Numbers of tokens whose views are kept; a view is some hundred bytes of host memory."""


@dataclass(frozen=True, slots=True)
class Views:
    """All activations of a step of T tokens, in the model's dtype.

    hidden, delta, residual  [T, H]
    qkv       [T, (Hq + 2 Hk) D]; q [T, Hq, D], k and v [T, Hk, D] are views of it
    attended  [T, Hq, D]; `attended_flat` [T, Hq D] is the same memory
    wide      [T, 2 I] gated, else [T, I]: gate and up projections
    narrow    [T, I]; the same memory as wide where there is no gate
    routed    what layers with experts need beside these
    """

    hidden: torch.Tensor
    delta: torch.Tensor
    residual: torch.Tensor
    qkv: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    attended: torch.Tensor
    attended_flat: torch.Tensor
    wide: torch.Tensor
    narrow: torch.Tensor
    routed: RoutedViews | None


class Workspace:
    """The buffers. Their views are cached by number of tokens, because making them costs more than a decode op."""

    def __init__(self, spec: ModelSpec, device: Device, max_tokens: int, max_rows: int = 0) -> None:
        dtype: torch.dtype = TORCH_DTYPES[spec.dtype]

        def buffer(width: int, count: int = max_tokens) -> torch.Tensor:
            return device.allocate("workspace", (count, width), dtype)

        self._spec = spec
        self._hidden, self._delta, self._residual = (buffer(spec.hidden_size) for _ in range(3))
        self._qkv = buffer((spec.num_heads + 2 * spec.num_kv_heads) * spec.head_size)
        self._attended = buffer(spec.num_heads * spec.head_size)
        self._wide = buffer(spec.intermediate_size * (2 if spec.gated else 1))
        self._narrow = buffer(spec.intermediate_size) if spec.gated else self._wide
        routed = spec.experts
        self._routed = RoutedBuffers(routed, spec.hidden_size, device, max_tokens, dtype) if routed is not None else None
        self._views: dict[int, Views] = {}
        # Where a layer goes on with some rows of a step: what it reads of them, beside the buffers of all.
        self._of_rows = [buffer(width, max_rows) for width in (spec.hidden_size, spec.num_heads * spec.head_size) if max_rows]

    def of_rows(self, x: Views, rows: torch.Tensor, gather: Callable[..., None]) -> Views:
        """Views of as many tokens as ``rows``, int64 [R], with the residual stream and what was attended of these rows of x."""
        count = len(rows)
        residual, attended = (whole[:count] for whole in self._of_rows)
        gather(residual, x.residual, rows)
        gather(attended, x.attended_flat, rows)
        return replace(self.views(count), residual=residual, attended_flat=attended)

    def views(self, num_tokens: int) -> Views:
        """The views of a step of ``num_tokens`` tokens."""
        if torch.compiler.is_compiling():
            return self._make(num_tokens)  # the number is a symbol
        found = self._views.get(num_tokens)
        if found is None:
            if len(self._views) >= MAX_CACHED_VIEWS:
                self._views.clear()
            found = self._views[num_tokens] = self._make(num_tokens)
        return found

    def _make(self, count: int) -> Views:
        queries, keys, size = self._spec.num_heads, self._spec.num_kv_heads, self._spec.head_size
        # Cut into heads before it is cut to the step: a compiler need not ask how the strides of a symbol come out.
        heads = self._qkv.view(-1, queries + 2 * keys, size)[:count]
        return Views(
            hidden=self._hidden[:count],
            delta=self._delta[:count],
            residual=self._residual[:count],
            qkv=self._qkv[:count],
            q=heads[:, :queries],
            k=heads[:, queries : queries + keys],
            v=heads[:, queries + keys :],
            attended=self._attended.view(-1, queries, size)[:count],
            attended_flat=self._attended[:count],
            wide=self._wide[:count],
            narrow=self._narrow[:count],
            routed=None if self._routed is None else self._routed.views(count),
        )
