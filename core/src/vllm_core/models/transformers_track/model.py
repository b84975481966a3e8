"""Building a transformers model, loading it, and running it as core's `Model`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as hf_logging

from vllm_core.api import Device, StepInputs
from vllm_core.errors import ModelConfigError, WeightsError
from vllm_core.layers.shard import ALONE, Shard
from vllm_core.models.transformers_track import attention
from vllm_core.models.transformers_track.description import RewiredSpec, model_class, normalise, refused
from vllm_core.models.transformers_track.exchange import Exchange
from vllm_core.models.transformers_track.head import GivenRows, body_of
from vllm_core.models.transformers_track.parts import Parts
from vllm_core.models.transformers_track.rewire import Linear, rewire
from vllm_core.models.transformers_track.trial import without_padding
from vllm_core.ops.dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from vllm_core.engine.binding import BoundOps
    from vllm_core.models.spec import ModelSpec


class SourceLike(Protocol):
    """What the track reads of a model source."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Values of config.json."""

    @property
    def name(self) -> str:
        """What errors call the model."""


def build(
    spec: ModelSpec,
    source: SourceLike,
    device: Device,
    ops: BoundOps,
    *,
    max_tokens: int,
    max_model_len: int,
    shard: Shard = ALONE,
    max_rows: int | None = None,
) -> RewiredModel:
    """Make the model, without weights. Raises ModelConfigError for one that cannot be rewired.

    ``max_tokens`` is the most tokens of one step, ``max_rows`` the most rows of it that may be wanted alone. ``max_model_len``
    is the longest sequence in tokens. ``shard`` is the part of this worker; the spec is that of the whole model.
    """
    assert isinstance(spec, RewiredSpec), "this track builds what it described"
    assert max_model_len <= spec.max_position, "the context is checked while planning"
    limits = Limits(max_tokens, max_rows or max_tokens, max_model_len)
    return RewiredModel(spec, normalise(source.config, source.name), device, ops, limits, shard)


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step, the most rows that may be wanted of it alone, and the longest sequence in tokens."""

    max_tokens: int
    max_rows: int
    max_model_len: int


class RewiredModel:
    """A transformers model on core's ops; implements the engine's `Model`."""

    def __init__(
        self, spec: RewiredSpec, config: Any, device: Device, ops: BoundOps, limits: Limits, shard: Shard = ALONE
    ) -> None:
        attention.register()
        mine = spec.shard(shard.workers)
        assert isinstance(mine, RewiredSpec), "a part is described like the whole"
        self.spec = mine
        self._shard, self._limits = shard, limits
        self._config = config
        self._device = device
        self._ops = ops
        self._dtype: torch.dtype = TORCH_DTYPES[spec.dtype]
        self._headless = spec.pooling is not None
        self._class = model_class(config, headless=self._headless, path=spec.classname)
        self._step = self._step_maker()
        blank = self._blank()
        _check(spec, blank)
        _check_parts(spec, blank, self._parts(blank))
        self._extras = _accepted_extras(spec, blank)
        self._ids = device.allocate("workspace", (1, limits.max_tokens), torch.int64)
        self._positions = device.allocate("workspace", (1, limits.max_tokens), torch.int64)
        self._types = device.allocate("workspace", (1, limits.max_tokens), torch.int64)  # stays zero

    def wanted(self, name: str, shape: tuple[int, ...]) -> None:
        """All of every tensor: transformers makes whole models, of which a worker then keeps its part."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take ``weights`` by their checkpoint names; transformers maps them to its own.

        Raises WeightsError for missing or mis-shaped ones.
        """
        with _quiet():
            model, report = self._class.from_pretrained(
                None,
                config=self._config,
                state_dict=dict(weights),
                dtype=self._dtype,
                attn_implementation=attention.NAME,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **self._init_options(),
            )
        _check_report(self.spec.classname, report)
        self._install(model)

    def load_dummy(self, seed: int, bound: float | None = None) -> None:
        """Draw random weights, equal for equal seeds: as transformers initialises them, or matrices within ``bound``."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self._from_config()
            if bound is not None:
                with torch.no_grad():
                    for parameter in model.parameters():
                        if parameter.dim() > 1:
                            parameter.uniform_(-bound, bound)
            self._install(model)

    def forward(self, inputs: StepInputs, kv: Sequence[Any], rows: torch.Tensor | None = None) -> torch.Tensor:
        """Run one step; returns hidden states [T, H] after the final norm, or [R, H] of ``rows`` where the last layer can."""
        if self._stack is not None:
            return self._stack.run(inputs, kv, rows)
        count = inputs.num_tokens
        ids, positions = self._ids[:, :count], self._positions[:, :count]
        ids.copy_(inputs.token_ids)
        positions.copy_(inputs.positions)
        if self.spec.position_offset:
            positions.add_(self.spec.position_offset)
        extras = {name: self._types[:, :count] if value is None else value for name, value in self._extras.items()}
        step = self._step(inputs, kv, rows)
        hidden: torch.Tensor = self._body(input_ids=ids, position_ids=positions, vllm_core_step=step, **extras)[0][0]
        if step.calls != len(self.spec.layers):
            raise refused(self.spec.classname, f"{step.calls} calls of attention in {len(self.spec.layers)} layers")
        return hidden

    def logits(self, out: torch.Tensor, rows: torch.Tensor) -> None:
        """Write float32 [R, V] from hidden ``rows`` [R, H], by the model's own head, scaling and cap included."""
        if self._head_weight is not None:
            self._linear(out, rows, self._head_weight)
            return
        self._given.hidden = rows[None]
        out.copy_(self._head(input_ids=None, use_cache=False).logits[0])

    def _step_maker(self) -> Callable[[StepInputs, Sequence[Any], torch.Tensor | None], attention.AttentionStep]:
        spec, ops = self.spec, self._ops
        if spec.kind == "encoder":
            call = ops.get("encoder_attention", "attention")
            return lambda inputs, kv, rows: attention.EncoderStep(spec, call, inputs)
        groups, layers = spec.kv_groups(), []
        for layer, index in zip(spec.layers, spec.group_of_layer(), strict=True):
            role = f"kv.{index}.{groups[index].kind}"
            write, attend = ops.get("kv_write", role), ops.get("paged_attention", role)
            layers.append(attention.LayerSite(index, layer.window or 0, write, attend))
        sites = tuple(layers)
        return lambda inputs, kv, rows: attention.PagedStep(spec, sites, inputs, kv, rows)

    def _init_options(self) -> dict[str, Any]:
        """Encoders bring a pooler that nobody asked for, and whose weights are often missing."""
        return {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(self._class).parameters else {}

    def _from_config(self) -> Any:
        factory = AutoModel if self._headless else AutoModelForCausalLM
        options = {"dtype": self._dtype, "attn_implementation": attention.NAME, **self._init_options()}
        return factory.from_config(self._config, **options)

    def _blank(self) -> Any:
        """The model without memory. Raises ModelConfigError where its code does not get along with the config."""
        try:
            with torch.device("meta"):
                return self._from_config()
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ModelConfigError(
                "transformers cannot make the model of this config",
                on=self.spec.classname,
                found=f"{type(error).__name__}: {error}",
                expected="a config that the class accepts",
                fix="repair config.json, override the field with --hf-overrides, or install another transformers",
            ) from error

    def _parts(self, model: Any) -> Parts:
        """What this worker keeps of ``model``."""
        base = next(name for name, module in model.named_modules() if module is model.base_model)
        return Parts(self._shard, f"{base}." if base else "", self.spec.shared_layers)

    def _install(self, model: Any) -> None:
        model.eval()
        if self.spec.kind == "decoder":
            without_padding(model)
        limits, found = self._limits, self.spec.findings
        exchange = Exchange(model, self.spec, found, self._device, self._ops, limits)
        exchange.run()
        rewire(model, self._device, self._ops, self._dtype, self._parts(model))
        self._stack = exchange.stack()
        self._body = body_of(model, self.spec.kind == "encoder")
        self._linear = self._ops.get("linear", "linear")
        head = model.get_submodule(found.head) if found.head and not self._headless else None
        self._head_weight = head.packed if isinstance(head, Linear) else None
        if not self._headless:
            # The head runs the model's own causal forward, around a body that returns the rows it was given.
            self._head, self._given = model, GivenRows()
            name = next(name for name, module in model.named_modules() if module is self._body)
            model.set_submodule(name, self._given)


def _accepted_extras(spec: RewiredSpec, model: Any) -> dict[str, Any]:
    """Arguments that some models want beside ids and positions; None stands for zeros, one per token."""
    known = inspect.signature(body_of(model, spec.kind == "encoder").forward).parameters
    if "position_ids" not in known:
        raise refused(type(model).__name__, "the model takes no position_ids")
    wanted: dict[str, Any] = {"use_cache": False} if spec.kind == "decoder" else {"token_type_ids": None}
    return {name: value for name, value in wanted.items() if name in known}


def _check(spec: RewiredSpec, model: nn.Module) -> None:
    """Compare the layers' attention modules with what was planned from the config."""
    found: list[Any] = [m for m in model.modules() if hasattr(m, "is_causal") and hasattr(m, "layer_idx")]
    sinks = sorted(m.layer_idx for m in found if isinstance(getattr(m, "sinks", None), nn.Parameter))
    planned = [index for index, layer in enumerate(spec.layers) if layer.sinks]
    if sinks != planned:
        why = spec.findings.failure or f"a trial showed them in {planned}"
        raise refused(spec.classname, f"attention sinks in layers {sinks}: {why}")
    if spec.kind == "decoder" and any(isinstance(module, nn.Conv1d) for module in model.modules()):
        raise refused(spec.classname, "convolutions over tokens, whose state would have to be kept")
    indices = sorted(module.layer_idx for module in found if module.layer_idx is not None)
    if spec.kind == "decoder" and indices != list(range(len(spec.layers))):
        raise refused(spec.classname, f"attention in layers {indices}, where the config counts {len(spec.layers)} layers")
    causal = {bool(module.is_causal) for module in found}
    if causal - {spec.kind == "decoder"}:
        raise refused(spec.classname, f"{'bidirectional' if spec.kind == 'decoder' else 'causal'} attention in a {spec.kind}")


def _check_parts(spec: RewiredSpec, model: nn.Module, parts: Parts) -> None:
    """With several workers each attention must be shared in all its layers: heads were given out by the config."""
    if parts.shard.workers == 1:
        return
    for path, module in model.named_modules():
        if hasattr(module, "is_causal") and hasattr(module, "layer_idx"):
            layers = [f"{path}.{name}" for name, one in module.named_modules() if type(one) in (nn.Linear, Conv1D)]
            whole = [name for name in layers if parts.dim(name) is None]
            if whole:
                raise refused(spec.classname, f"transformers has no plan to share {whole[0]} among workers")


def _check_report(name: str, report: dict[str, Any]) -> None:
    wrong = sorted(str(entry) for entry in report["mismatched_keys"])
    missing = sorted(report["missing_keys"])
    if missing or wrong:
        raise WeightsError(
            "Weights do not fit the model",
            on=name,
            found="; ".join(
                f"{len(entries)} {what}, such as {entries[0]}"
                for what, entries in (("missing", missing), ("of another shape", wrong))
                if entries
            ),
            expected="each parameter of the model once, in its shape",
            fix="download the checkpoint again, or take the config.json that belongs to it",
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own progress bar and load report; the engine has both."""
    shown, verbosity = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if shown:
            hf_logging.enable_progress_bar()
