"""From records to attention: which products make queries, keys and values, and how these are normed and rotated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch

from vllm_core.models.spec import ModelSpec
from vllm_core.models.transformers_track.description import kv_heads
from vllm_core.models.transformers_track.equations import LINEAR, apply_norm, has_no_more, one_eps
from vllm_core.models.transformers_track.findings import AttentionForm, NormForm, Order, RotaryForm
from vllm_core.models.transformers_track.trial import Attended, Call, Record, close, first
from vllm_core.ops.rope import rotary_embedding

_ROTATIONS: tuple[tuple[str, bool], ...] = (
    *(("halves", False), ("pairs", True), ("halves", True)),
    *(("once", False), ("once", True)),
)


def order_rows(order: Order, heads: int, kv_heads: int, size: int) -> torch.Tensor:
    """Where the rows of queries, keys and values, in this order, lie in a product of all three."""
    rows = torch.arange((heads + 2 * kv_heads) * size)
    if order == "parts":
        return rows
    group = heads // kv_heads
    sides = rows.view(kv_heads, group + 2, size)
    return torch.cat([sides[:, :group].reshape(-1), sides[:, group].reshape(-1), sides[:, group + 1].reshape(-1)])


def table_of(cos: torch.Tensor, sin: torch.Tensor, pairs: str) -> torch.Tensor:
    """Core's table [P, 2, R/2] of what a rotary module returns, [1, P, R] each, or [1, P, R/2]."""
    half = cos.shape[-1] // 2
    ways = {"halves": slice(half), "pairs": slice(0, None, 2), "once": slice(None)}
    return torch.stack([t[0, :, ways[pairs]] for t in (cos, sin)], dim=1).float().contiguous()


def find_attentions(records: Sequence[Record], norms: dict[str, NormForm], spec: ModelSpec) -> list[AttentionForm]:
    """Modules that hand products of their input, normed and rotated perhaps, to attention, and return a product of the rest."""
    found: list[AttentionForm] = []
    for path, module in records[0].model.named_modules():
        if not (hasattr(module, "is_causal") and hasattr(module, "layer_idx")):
            continue
        views = [_View.of(record, path, module.layer_idx) for record in records]
        seen = [view for view in views if view is not None]
        window, scale = spec.layers[module.layer_idx].window or 0, getattr(module, "scaling", None)
        planned = (window, spec.attention_soft_cap, scale, *_heads(records[0].model.config))
        if len(seen) < len(views) or any(view.constants != planned for view in seen):
            continue
        inner = [f"{path}.{name}" for name, one in module.named_modules() if type(one) in LINEAR]
        heads = [norm for name, norm in norms.items() if name.startswith(f"{path}.")]
        forms = _attention_forms(seen[0], path, module.layer_idx, inner, heads)
        alike = [_moved(found[-1], path, module.layer_idx)] if found else []
        form = first(itertools.chain(alike, forms), partial(_all_hold, seen))
        found += [] if form is None else [form]
    return found


def _heads(config: Any) -> tuple[int, int, int, int]:
    """Heads and sizes that are planned for a config, as `_View.constants` has them."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, kv_heads(config, heads), size, size


def _all_hold(views: Sequence[_View], form: AttentionForm) -> bool:
    return all(view.holds(form) for view in views)


def _moved(form: AttentionForm, path: str, layer: int) -> AttentionForm:
    """The form of another layer, likely this one's."""

    def moved(name: str) -> str:
        return path + name.removeprefix(form.path)

    norms = [None if norm is None else replace(norm, path=moved(norm.path)) for norm in (form.q_norm, form.k_norm)]
    products, out = tuple(map(moved, form.products)), moved(form.out)
    return replace(form, path=path, layer=layer, products=products, out=out, q_norm=norms[0], k_norm=norms[1])


def _attention_forms(
    view: _View, path: str, index: int, inner: Sequence[str], norms: Sequence[NormForm]
) -> Iterator[AttentionForm]:
    """All that could be, a layer's own order of things first."""
    products: list[tuple[str, ...]] = [(name,) for name in inner]
    products += itertools.permutations(inner, 3)
    heads: list[tuple[NormForm | None, NormForm | None]] = [(None, None), *itertools.permutations(norms, 2)]
    rotations = [None, *view.rotations()]
    for out, which, order in itertools.product(inner, products, get_args(Order)):
        if out in which or not view.joins(which, out) or (order == "groups" and len(which) == 3):
            continue
        for (q_norm, k_norm), rotary in itertools.product(heads, rotations):
            yield AttentionForm(
                path=path,
                layer=index,
                products=which,
                order=order,
                out=out,
                q_norm=q_norm,
                k_norm=k_norm,
                rotary=rotary,
                sinks=view.own_sinks(path),
                results=len(view.call.out) if isinstance(view.call.out, tuple) else 0,
            )


@dataclass(frozen=True, slots=True)
class _View:
    """One call of a layer's attention, in one record."""

    record: Record
    call: Call
    attended: Attended
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None

    @staticmethod
    def of(record: Record, path: str, index: int) -> _View | None:
        call, attended = record.once(path), record.attended.get(index, [])
        if call is None or len(attended) != 1 or not call.x.numel():
            return None
        if isinstance(call.out, tuple) and any(one is not None for one in call.out[1:]):
            return None
        pairs = [one for one in (*call.args, *call.kwargs.values()) if type(one) is tuple and len(one) == 2]
        tables = [one for one in pairs if all(isinstance(t, torch.Tensor) and t.dim() == 3 for t in one)]
        return _View(record, call, attended[0], tables[0] if len(tables) == 1 else None)

    @property
    def constants(self) -> tuple[int | float, ...]:
        """Window, soft cap and scale as attention was called, then heads of queries and of keys, and their sizes."""
        one, masks = self.attended, self.attended.masks
        return masks.window, masks.soft_cap, masks.scale, one.q.shape[1], one.k.shape[1], one.q.shape[2], one.v.shape[2]

    def own_sinks(self, path: str) -> str:
        """The parameter of the layer's own that attention was given as sinks, or nothing."""
        given = self.attended.masks.sinks
        own = self.record.model.get_submodule(path).named_parameters(recurse=False)
        return next((name for name, one in own if given is not None and torch.equal(one, given)), "")

    def joins(self, products: tuple[str, ...], out: str) -> bool:
        """Whether these layers read the attention's input, and the last one what was attended and returns what it returns."""
        calls, last = [self.record.once(name) for name in products], self.record.once(out)
        rows = self.attended.out.flatten(1)
        read = all(call is not None and close(call.x, self.call.x) for call in calls)
        return read and last is not None and close(last.x, rows) and close(last.y, self.call.y)

    def rotations(self) -> Iterator[RotaryForm]:
        """Ways to read the cosines and sines that the layer was given."""
        if self.cos_sin is None:
            return
        for path, calls in self.record.calls.items():
            for call in calls:
                if type(call.out) is tuple and len(call.out) == 2 and all(map(_same, call.out, self.cos_sin)):
                    extras = _extras(call)
                    if extras is None or not self._repeats(path, extras):
                        return
                    width = self.cos_sin[0].shape[-1] / self.attended.q.shape[-1]
                    for pairs, interleaved in _ROTATIONS:
                        part = 2 * width if pairs == "once" else width
                        if part <= 1:
                            yield RotaryForm(path=path, extras=extras, pairs=pairs, interleaved=interleaved, fraction=part)  # type: ignore[arg-type]
                    return

    def _repeats(self, path: str, extras: tuple[tuple[str, str], ...]) -> bool:
        """Whether the rotary module says the same of positions alone."""
        args = [one for name, one in extras if name.isdigit()]
        named = {name: one for name, one in extras if not name.isdigit()}
        module, positions = self.record.model.get_submodule(path), torch.tensor([list(self.record.positions)])
        again = module(torch.zeros(1, 1, 1), positions, *args, **named)
        return self.cos_sin is not None and all(map(_same, again, self.cos_sin))

    def holds(self, form: AttentionForm) -> bool:
        """Whether queries, keys and values come of the form."""
        q, k, v = self.attended.q, self.attended.k, self.attended.v
        model, norms = self.record.model, [one for one in (form.q_norm, form.k_norm) if one is not None]
        if any(model.get_submodule(one.path).weight.shape != q.shape[-1:] for one in norms) or not one_eps(model, norms):
            return False
        if form.sinks != self.own_sinks(form.path) or (not form.sinks and self.attended.masks.sinks is not None):
            return False
        if not has_no_more(model, form.path, [*form.products, form.out, *(one.path for one in norms)], form.sinks):
            return False
        if not self.joins(form.products, form.out) or (form.rotary is not None and not self._rotates(form.rotary)):
            return False
        made = self._made(form)
        return made is not None and all(map(close, made, (q, k, v)))

    def _rotates(self, form: RotaryForm) -> bool:
        """Whether this layer was given what that rotary module returned."""
        calls = self.record.calls.get(form.path, [])
        given = self.cos_sin
        return given is not None and any(_extras(call) == form.extras and all(map(_same, call.out, given)) for call in calls)

    def _made(self, form: AttentionForm) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        model, (tokens, heads, size), kv = self.record.model, self.attended.q.shape, self.attended.k.shape[1]
        calls = [self.record.once(name) for name in form.products]
        raw = torch.cat([call.y.reshape(tokens, -1) for call in calls if call is not None], dim=1)
        if raw.shape[1] != (heads + 2 * kv) * size or self.attended.v.shape[-1] != size:
            return None
        raw = raw[:, order_rows(form.order, heads, kv, size)]
        q, k, v = (part.reshape(tokens, -1, size) for part in torch.split(raw, [heads * size, kv * size, kv * size], dim=1))
        if form.q_norm is not None and form.k_norm is not None:
            q, k = (apply_norm(model, norm, x) for norm, x in ((form.q_norm, q), (form.k_norm, k)))
        if form.rotary is not None and self.cos_sin is not None:
            q, k = q.clone(), k.clone()
            rotary_embedding(q, k, torch.arange(tokens), table_of(*self.cos_sin, form.rotary.pairs), form.rotary.interleaved)
        return q, k, v


def _same(a: Any, b: Any) -> bool:
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)


def _extras(call: Call) -> tuple[tuple[str, str], ...] | None:
    """What a rotary module is called with beside activations and positions: names, or None where it is something else."""
    rest = [(str(i), one) for i, one in enumerate(call.args) if not isinstance(one, torch.Tensor)]
    rest += [(name, one) for name, one in call.kwargs.items() if not isinstance(one, torch.Tensor)]
    return tuple(rest) if all(isinstance(one, str) for _, one in rest) else None
