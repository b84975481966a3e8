"""Streaming weights into a model: tensors in any order, merged ones finished as soon as their parts are there.

Memory stays bounded: besides what the model keeps, only merged tensors that still miss a part are held. Nothing is
copied that can be adopted as it is. Quantised tensors stay packed where their target reads the format, else are decoded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from vllm_core.api import QuantTensor
from vllm_core.errors import WeightsError
from vllm_core.layers.shard import Cut
from vllm_core.ops import quant

Fill = Literal["normal", "ones"]
Shape = tuple[int, ...]

DUMMY_NUMBERS = (1 << 22) + 129
"""Numbers drawn for dummy weights: odd, so that the rows of a matrix do not begin with the same ones again soon."""

DUMMY_DEVIATION = 0.02
"""Standard deviation of dummy weights, the usual one at initialisation."""


@dataclass(slots=True)
class _Target:
    """One tensor of the model, made of checkpoint tensors, or cuts of them, stacked along the first dimension.

    ``formats`` are the quantised ones that it is kept in, ``rounded`` those that plain numbers are rounded to, best first.
    """

    shapes: Mapping[str, Shape]
    dtype: torch.dtype
    take: Callable[[Any], None]
    fill: Fill
    cuts: Mapping[str, Cut]
    formats: frozenset[str]
    rounded: Sequence[str]
    missing: set[str] = field(default_factory=set)
    parts: dict[str, torch.Tensor | QuantTensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.missing = set(self.shapes)

    def kept(self, name: str) -> Shape:
        """Shape of what is kept of a checkpoint tensor."""
        cut = self.cuts.get(name)
        return self.shapes[name] if cut is None else cut.shape(self.shapes[name])

    def put(self, name: str, tensor: torch.Tensor | QuantTensor) -> None:
        self.missing.discard(name)
        self.parts[name] = self._as_kept(name, tensor)
        if self.missing:
            return
        parts, self.parts = [self.parts[part] for part in self.shapes], {}
        whole = quant.stack(parts)
        if not isinstance(whole, torch.Tensor) and not quant.formats_in(whole) - {"plain"} <= self.formats:
            whole = quant.decode(whole, self.dtype)
        if isinstance(whole, torch.Tensor):
            whole = quant.rounded(whole, [name for name in self.rounded if name in self.formats])
        self.take(whole)

    def _as_kept(self, name: str, tensor: torch.Tensor | QuantTensor) -> torch.Tensor | QuantTensor:
        cut = self.cuts.get(name)
        if cut is not None and tuple(tensor.shape) == cut.shape(self.shapes[name]):
            cut = None
        if isinstance(tensor, QuantTensor):
            packed = tensor if cut is None else cut.take_packed(tensor)
            if packed is not None and packed.format in self.formats:
                return packed
            tensor = quant.decode(tensor, self.dtype)
        return (tensor if cut is None else cut.take(tensor)).to(self.dtype).contiguous()


def _laid_out(table: torch.Tensor, begin: int, shape: Shape) -> torch.Tensor:
    out = torch.empty(shape, dtype=table.dtype, device=table.device)
    flat, at = out.view(-1), 0
    while at < flat.numel():
        piece = table[begin : begin + flat.numel() - at]
        flat[at : at + len(piece)].copy_(piece)
        at, begin = at + len(piece), 0
    return out


class WeightLoader:
    """Knows every tensor that a model needs; `load` hands each to its place.

    Names are those of the checkpoint without ``prefix``, which may be there or not (base models are saved without).
    ``ignored`` are fragments of names of tensors that checkpoints carry and the model does not need. ``quantization`` is what
    the user has weights of products rounded to.
    """

    def __init__(
        self, model: str, *, prefix: str, ignored: Sequence[str], quantization: Literal["int8", "int4", "fp8"] | None = None
    ) -> None:
        self._model = model
        self._prefix = prefix
        self._ignored = tuple(ignored)
        self.quantization = quantization
        self._targets: dict[str, _Target] = {}

    def expect(
        self,
        shapes: Mapping[str, Shape],
        dtype: torch.dtype,
        take: Callable[[Any], None],
        *,
        fill: Fill = "normal",
        cuts: Mapping[str, Cut | None] | None = None,
        formats: frozenset[str] = frozenset(),
        rounded: Sequence[str] = (),
    ) -> None:
        """Register one tensor, stacked from the named ones in this order; ``take`` receives it on the host, cast.

        ``shapes`` are those of the checkpoint; of those in ``cuts`` only that part is kept. ``take`` is for a `Weight` where
        there are ``formats``, names of the quantised ones that may stay packed, else for a tensor;
        numbers are rounded to the first of ``rounded`` that is among them.
        """
        parts = {name: cut for name, cut in (cuts or {}).items() if cut is not None}
        target = _Target(dict(shapes), dtype, take, fill, parts, formats, rounded)
        self._targets.update(dict.fromkeys(shapes, target))

    def wanted(self, full_name: str, shape: Shape) -> Cut | None:
        """What is needed of a checkpoint tensor, asked before it is read. Raises WeightsError for a wrong shape."""
        name = full_name.removeprefix(self._prefix)
        target = self._targets.get(name)
        if target is None:
            return None
        self._check_shape(full_name, shape, target.shapes[name])
        return target.cuts.get(name)

    def load(self, weights: Iterable[tuple[str, torch.Tensor | QuantTensor]]) -> None:
        """Consume the stream of whole tensors or of what is `wanted` of them.

        Raises WeightsError for an unknown, repeated, wrongly shaped or missing tensor.
        """
        seen: set[str] = set()
        for target in self._targets.values():
            target.missing = set(target.shapes)
        for full_name, tensor in weights:
            name = full_name.removeprefix(self._prefix)
            found = self._targets.get(name)
            if found is None:
                self._refuse_unknown(full_name, name)
                continue
            if name in seen:
                self._fail(full_name, "a second tensor of this name", "one", "remove the duplicate from the checkpoint")
            seen.add(name)
            if tuple(tensor.shape) != found.kept(name):
                self._check_shape(full_name, tuple(tensor.shape), found.shapes[name])
            found.put(name, tensor)
        missing = [name for name in self._targets if name not in seen]
        if missing:
            listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            self._fail(listed, "missing", f"{len(self._targets)} tensors", "fetch the checkpoint again; a part is missing")

    def dummy(
        self, seed: int, bound: float | None = None, place: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights that depend on ``seed`` and the tensor's name alone; norms are ones.

        Normal with a small deviation, or uniform within ``bound``. Numbers are drawn once and laid out from a place that the
        name chooses: where ``place`` puts them, on the device say, so that billions of weights take no time.
        """
        draw = torch.Generator().manual_seed(seed)
        if bound is None:
            table = torch.randn(DUMMY_NUMBERS, generator=draw) * DUMMY_DEVIATION
        else:
            table = (torch.rand(DUMMY_NUMBERS, generator=draw) * 2 - 1) * bound
        put = place if place is not None and self.quantization is None else lambda numbers: numbers
        tables = {dtype: put(table.to(dtype)) for dtype in {target.dtype for target in self._targets.values()}}
        for name, target in self._targets.items():
            shape = target.shapes[name]
            if target.fill == "ones":
                yield name, torch.ones(shape)
                continue
            digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
            yield name, _laid_out(tables[target.dtype], int.from_bytes(digest, "little") % DUMMY_NUMBERS, shape)

    def _refuse_unknown(self, full_name: str, name: str) -> None:
        if not any(fragment in name for fragment in self._ignored):
            self._fail(
                full_name,
                "a tensor that the architecture does not have",
                "only tensors of the architecture",
                "check `architectures` in config.json, or use --model-impl transformers",
            )

    def _check_shape(self, name: str, found: Shape, expected: Shape) -> None:
        if found != expected:
            fix = "the weights do not belong to this config.json; fetch both again"
            self._fail(name, f"shape {found}", f"shape {expected}", fix)

    def _fail(self, name: str, found: str, expected: str, fix: str) -> None:
        raise WeightsError(
            "Weights do not fit the model", on=f"{name} of {self._model}", found=found, expected=expected, fix=fix
        )
