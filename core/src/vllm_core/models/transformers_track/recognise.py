"""From the records of a trial to findings: which modules compute what core's ops compute.

Each form is an equation between tensors that were seen, tried with core's references; it holds in every record
or is not taken.
No name of a model or of a module says anything here, but attributes in which norms keep their epsilon and attention its scale.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vllm_core.models.spec import ModelSpec
from vllm_core.models.transformers_track.equations import LINEAR, has_no_more, normed, one_eps, within
from vllm_core.models.transformers_track.findings import (
    AttentionForm,
    Chain,
    Findings,
    LayerForm,
    MLPForm,
    NormForm,
)
from vllm_core.models.transformers_track.head import GivenRows, body_of
from vllm_core.models.transformers_track.recognise_attention import find_attentions
from vllm_core.models.transformers_track.trial import Record, TrialStep, close, first, run_body
from vllm_core.ops.activation import gated_activation

EPS = ("variance_epsilon", "eps", "epsilon")
KINDS = ("silu", "gelu", "gelu_tanh")


@torch.inference_mode()
def recognise(records: Sequence[Record], spec: ModelSpec, *, headless: bool) -> Findings:
    """What is found in a decoder."""
    model = records[0].model
    norms = _norms(model)
    attentions = find_attentions(records, norms, spec)
    roots = [form.path for form in attentions]
    mlps = _mlps(records, [name for name in records[0].calls if not within(name, roots)])
    layers = [layer for one in attentions if (layer := _layer(records, one, mlps, norms)) is not None]
    inside = [one.path for one in layers]
    apart = [one for one in attentions if not within(one.path, inside)]
    left = [one for path, one in norms.items() if not within(path, [*inside, *(one.path for one in apart)])]
    silent = _silent(records[0], attentions, len(spec.layers))
    gone = [*roots, *(one.path for one in mlps), *inside, *silent]
    chain = _chain(records, layers, norms, len(spec.layers))
    left_waits = [] if chain is not None else [one for one in records[0].waits if not within(one[0], gone)]
    return Findings(
        norms=tuple(left),
        attentions=tuple(apart),
        mlps=tuple(one for one in mlps if not within(one.path, inside)),
        layers=tuple(layers),
        sinks=tuple(sorted(index for index, seen in records[0].attended.items() if seen[0].masks.sinks is not None)),
        silent=silent,
        chain=chain,
        narrows=_narrows(records[0], layers, len(spec.layers)),
        head="" if headless else _head(records[0]),
        waits=next((f"{name or 'the body'} calls {op}" for name, op in left_waits), ""),
    )


def _norms(model: nn.Module) -> dict[str, NormForm]:
    """All RMS norms by path; those of one class and alike but for their weights are tried once."""
    tried: dict[Any, NormForm | None] = {}
    found: dict[str, NormForm] = {}
    for path, module in model.named_modules():
        plain = {name: one for name, one in vars(module).items() if isinstance(one, (bool, int, float, str))}
        key = type(module), tuple(sorted(plain.items()))
        if key not in tried:
            tried[key] = _norm(path, module)
        form = tried[key]
        if form is not None:
            found[path] = replace(form, path=path)
    return found


def _norm(path: str, module: nn.Module) -> NormForm | None:
    """A module that computes `rms_norm` at inputs large and small, whose epsilon is one of its attributes."""
    parameters = list(module.parameters())
    eps = next((name for name in EPS if isinstance(getattr(module, name, None), float)), None)
    weight = getattr(module, "weight", None)
    if eps is None or len(parameters) != 1 or weight is None or weight.dim() != 1 or list(module.children()):
        return None

    def holds(offset: float) -> bool:
        for scale in (1.0, 1e-3, 300.0):
            x = torch.linspace(-1, 1.3, 3 * len(weight)).sin().view(1, 3, -1) * scale
            with torch.inference_mode():
                if not close(module(x), normed(x, weight, offset, getattr(module, eps))):
                    return False
        return True

    offset = first(iter((0.0, 1.0)), holds)
    return None if offset is None else NormForm(path=path, offset=offset, eps=eps)


def _mlps(records: Sequence[Record], names: Sequence[str]) -> list[MLPForm]:
    """Gated MLPs, the outermost module of each."""
    found: list[MLPForm] = []
    for path in sorted(names, key=len):
        model = records[0].model
        inner = [f"{path}.{name}" for name, one in model.get_submodule(path).named_modules() if type(one) in LINEAR and name]
        if len(inner) not in (2, 3) or within(path, [one.path for one in found]):
            continue
        form = first(_mlp_forms(path, inner), lambda form: all(_is_mlp(record, form) for record in records))
        found += [] if form is None else [form]
    return found


def _mlp_forms(path: str, inner: Sequence[str]) -> Iterator[MLPForm]:
    for names in itertools.permutations(inner):
        for kind in KINDS:
            yield MLPForm(path=path, products=names[:-1], down=names[-1], kind=kind)  # type: ignore[arg-type]


def _is_mlp(record: Record, form: MLPForm) -> bool:
    whole, down = record.once(form.path), record.once(form.down)
    calls = [record.once(name) for name in form.products]
    if whole is None or down is None or not isinstance(whole.out, torch.Tensor) or len(whole.args) + len(whole.kwargs) != 1:
        return False
    if any(call is None or not close(call.x, whole.x) for call in calls) or not close(down.y, whole.y):
        return False
    if not has_no_more(record.model, form.path, [*form.products, form.down]):
        return False
    wide = torch.cat([call.y for call in calls if call is not None], dim=-1).flatten(0, -2)
    if wide.shape[-1] != 2 * down.x.shape[-1]:
        return False
    narrow = torch.empty(wide.shape[0], wide.shape[1] // 2)
    gated_activation(narrow, wide, form.kind)
    return close(down.x, narrow)


def _layer(
    records: Sequence[Record], attention: AttentionForm, mlps: Sequence[MLPForm], norms: dict[str, NormForm]
) -> LayerForm | None:
    """The module around an attention and an MLP that is nothing but a pre-norm layer."""
    path = attention.path
    while path := path.rpartition(".")[0]:
        inside = [mlp for mlp in mlps if within(mlp.path, [path])]
        if inside:
            break
    else:
        return None
    call = records[0].once(path)
    if len(inside) != 1 or call is None or within(inside[0].path, [attention.path]):
        return None
    around = [norm for name, norm in norms.items() if within(name, [path]) and not within(name, [attention.path])]
    results = len(call.out) if isinstance(call.out, tuple) else 0
    forms = (
        LayerForm(path=path, attention=attention, mlp=inside[0], input_norm=a, mlp_norm=b, results=results)
        for a, b in itertools.permutations(around, 2)
    )
    found: LayerForm | None = first(iter(forms), lambda form: all(_is_layer(record, form) for record in records))
    return found


def _is_layer(record: Record, form: LayerForm) -> bool:
    names = (form.path, form.attention.path, form.mlp.path, form.input_norm.path, form.mlp_norm.path)
    calls = [call for name in names if (call := record.once(name)) is not None]
    heads = [one for one in (form.attention.q_norm, form.attention.k_norm) if one is not None]
    if len(calls) != len(names) or not one_eps(record.model, [form.input_norm, form.mlp_norm, *heads]):
        return False
    if not has_no_more(record.model, form.path, names[1:]):
        return False
    whole, attention, mlp, before, between = calls
    if isinstance(whole.out, tuple) and any(one is not None for one in whole.out[1:]):
        return False
    equations = (
        (before.x, whole.x),
        (attention.x, before.y),
        (between.x, whole.x + attention.y),
        (mlp.x, between.y),
        (whole.y, between.x + mlp.y),
    )
    return all(close(a, b) for a, b in equations)


def _chain(records: Sequence[Record], layers: Sequence[LayerForm], norms: dict[str, NormForm], count: int) -> Chain | None:
    """The embedding before the first of nothing but pre-norm layers, and the norm behind the last."""
    if [one.attention.layer for one in layers] != list(range(count)):
        return None
    embeddings = [path for path, module in records[0].model.named_modules() if type(module) is nn.Embedding]
    paths = [one.path for one in layers]
    chains = (
        Chain(embedding=path, norm=norm)
        for path, norm in itertools.product(embeddings, norms.values())
        if not within(norm.path, paths) and one_eps(records[0].model, [norm, layers[-1].input_norm])
    )
    found: Chain | None = first(chains, lambda chain: all(_is_chain(record, chain, paths) for record in records))
    return found


def _is_chain(record: Record, chain: Chain, layers: Sequence[str]) -> bool:
    calls = [call for path in (chain.embedding, *layers, chain.norm.path) if (call := record.once(path)) is not None]
    if len(calls) != len(layers) + 2 or record.model.get_submodule(chain.embedding).max_norm is not None:
        return False
    linked = all(close(after.x, before.y) for before, after in itertools.pairwise(calls))
    return linked and close(calls[-1].y, record.output)


class _Replay(nn.Module):
    """Stands for a module and returns what it returned."""

    def __init__(self, out: Any) -> None:
        super().__init__()
        self.out = out

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.out


def _gives(record: Record, outs: dict[str, Any], expected: torch.Tensor) -> bool:
    """Whether the body's output is ``expected`` where modules by path return ``outs``."""
    with _replaced(record.model, {path: _Replay(out) for path, out in outs.items()}) as model:
        try:
            return close(run_body(model, body_of(model, whole=False), TrialStep(), record.positions), expected)
        except (AttributeError, RuntimeError, TypeError, ValueError):  # the body does something with what is missing now
            return False


@contextmanager
def _replaced(model: Any, modules: dict[str, nn.Module]) -> Iterator[Any]:
    """The model with other modules at some paths, for a while."""
    before = {path: model.get_submodule(path) for path in modules}
    for path, module in modules.items():
        model.set_submodule(path, module)
    try:
        yield model
    finally:
        for path, module in before.items():
            model.set_submodule(path, module)


def _silent(record: Record, attentions: Sequence[AttentionForm], layers: int) -> tuple[str, ...]:
    """Rotary modules that may return nothing, once each layer's attention knows its own table."""
    paths = {one.rotary.path for one in attentions if one.rotary is not None}
    if len(attentions) != layers or not paths:
        return ()
    outs: dict[str, Any] = {one.path: record.calls[one.path][0].out for one in attentions}
    outs |= dict.fromkeys(paths, (None, None))
    return tuple(sorted(paths)) if _gives(record, outs, record.output) else ()


def _narrows(record: Record, layers: Sequence[LayerForm], count: int) -> bool:
    """Whether the last layer may return some rows alone: what follows then makes the same of them."""
    last = next((one for one in layers if one.attention.layer == count - 1), None)
    if last is None:
        return False
    rows = torch.tensor([1, record.output.shape[0] - 1])
    part = record.calls[last.path][0].y[:, rows]
    outs = {one.path: record.calls[one.path][0].out for one in layers}
    outs[last.path] = (part, *record.calls[last.path][0].out[1:]) if last.results else part
    return _gives(record, outs, record.output[rows])


def _head(record: Record) -> str:
    """The path of the head whose output are the logits, if nothing comes after it."""
    model = record.model
    head, body = model.get_output_embeddings(), model.get_decoder()
    if type(head) not in LINEAR:
        return ""
    paths = {module: name for name, module in model.named_modules()}
    given = GivenRows()
    given.hidden = record.output[None]
    with torch.inference_mode():
        expected = head(record.output[None])
        with _replaced(model, {paths[body]: given}):
            logits = model(input_ids=None, use_cache=False).logits
    return paths[head] if close(logits, expected) else ""
