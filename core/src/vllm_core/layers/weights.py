"""Streaming weights into a model: tensors in any order, merged ones finished as soon as their parts are there.

Memory stays bounded: besides what the model keeps, only merged tensors that still miss a part are held. Nothing is
copied that can be adopted as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from vllm_core.errors import WeightsError

Fill = Literal["normal", "ones"]
Shape = tuple[int, ...]

DUMMY_DEVIATION = 0.02
"""Standard deviation of dummy weights, the usual one at initialisation."""


@dataclass(slots=True)
class _Target:
    """One tensor of the model, made of checkpoint tensors stacked along the first dimension."""

    shapes: Mapping[str, Shape]
    dtype: torch.dtype
    take: Callable[[torch.Tensor], None]
    fill: Fill
    rows: dict[str, int] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    merged: torch.Tensor | None = None

    def __post_init__(self) -> None:
        begin = 0
        for name, shape in self.shapes.items():
            self.rows[name] = begin
            begin += shape[0]
        self.missing = set(self.shapes)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        self.missing.discard(name)
        if len(self.shapes) == 1:
            self.take(tensor.to(self.dtype).contiguous())
            return
        if self.merged is None:
            first = next(iter(self.shapes.values()))
            total = sum(shape[0] for shape in self.shapes.values())
            self.merged = torch.empty((total, *first[1:]), dtype=self.dtype)
        begin = self.rows[name]
        self.merged[begin : begin + len(tensor)].copy_(tensor)
        if not self.missing:
            merged, self.merged = self.merged, None
            self.take(merged)


class WeightLoader:
    """Knows every tensor that a model needs; `load` hands each to its place.

    Names are those of the checkpoint without ``prefix``, which may be there or not (base models are saved without).
    ``ignored`` are fragments of names of tensors that checkpoints carry and the model does not need.
    """

    def __init__(self, model: str, *, prefix: str, ignored: Sequence[str]) -> None:
        self._model = model
        self._prefix = prefix
        self._ignored = tuple(ignored)
        self._targets: dict[str, _Target] = {}

    def expect(
        self,
        shapes: Mapping[str, Shape],
        dtype: torch.dtype,
        take: Callable[[torch.Tensor], None],
        *,
        fill: Fill = "normal",
    ) -> None:
        """Register one tensor, stacked from the named ones in this order; ``take`` receives it on the host, cast."""
        target = _Target(dict(shapes), dtype, take, fill)
        self._targets.update(dict.fromkeys(shapes, target))

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Consume the stream. Raises WeightsError for an unknown, repeated, wrongly shaped or missing tensor."""
        seen: set[str] = set()
        for full_name, tensor in weights:
            name = full_name.removeprefix(self._prefix)
            target = self._targets.get(name)
            if target is None:
                self._refuse_unknown(full_name, name)
                continue
            if name in seen:
                self._fail(full_name, "a second tensor of this name", "one", "remove the duplicate from the checkpoint")
            seen.add(name)
            if tuple(tensor.shape) != target.shapes[name]:
                self._fail(
                    full_name,
                    f"shape {tuple(tensor.shape)}",
                    f"shape {target.shapes[name]}",
                    "the weights do not belong to this config.json; fetch both again",
                )
            target.put(name, tensor)
        missing = [name for name in self._targets if name not in seen]
        if missing:
            listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            self._fail(listed, "missing", f"{len(self._targets)} tensors", "fetch the checkpoint again; a part is missing")

    def dummy(self, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Small normal weights drawn per name, so that their order does not matter; norms are ones."""
        for name, target in self._targets.items():
            shape = target.shapes[name]
            if target.fill == "ones":
                yield name, torch.ones(shape)
                continue
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
            yield name, torch.randn(shape, generator=generator) * DUMMY_DEVIATION

    def _refuse_unknown(self, full_name: str, name: str) -> None:
        if not any(fragment in name for fragment in self._ignored):
            self._fail(
                full_name,
                "a tensor that the architecture does not have",
                "only tensors of the architecture",
                "check `architectures` in config.json, or use --model-impl transformers",
            )

    def _fail(self, name: str, found: str, expected: str, fix: str) -> None:
        raise WeightsError(
            "Weights do not fit the model", on=f"{name} of {self._model}", found=found, expected=expected, fix=fix
        )
