"""A trial: the model's own class at a small width with random weights, run on the host, and what its modules did.

It has all layers of the model, so that what differs from layer to layer shows. Two runs are recorded, the second with weights
so large that limits on activations would show, both at positions up to the last.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, AutoModelForCausalLM

from vllm_core.models.transformers_track import attention
from vllm_core.models.transformers_track.head import body_of

TOKENS = 12
HEAD_SIZE = 16
"""Of the first trial; where the class does not run at it, heads keep their size."""
GAINS = (1.0, 16.0)
"""Of products: outputs as large as inputs, then as large as no clamp lets through."""
_COUNTS = {"vocab_size": 64, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
_TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 3}
_WAITS = frozenset(
    {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "argwhere", "masked_select", "bincount", "resolve_conj"}
    | {"_unique", "_unique2", "unique_dim", "unique_consecutive"}
)
"""Operators whose result the host waits for; `resolve_conj` is what shows of ``tolist``."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module, its tensors as they were then."""

    order: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

    @property
    def x(self) -> torch.Tensor:
        """The activations that it was given."""
        given = self.args[0] if self.args else self.kwargs.get("hidden_states")
        return given if isinstance(given, torch.Tensor) else torch.empty(0)

    @property
    def y(self) -> torch.Tensor:
        """The activations that it returned."""
        found = self.out[0] if isinstance(self.out, tuple) and self.out else self.out
        return found if isinstance(found, torch.Tensor) else torch.empty(0)


@dataclass(slots=True)
class Attended:
    """One call of attention: q, k, v and what came of them, [T, heads, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    masks: attention.Masks


@dataclass(slots=True)
class TrialStep:
    """Causal attention of one sequence, remembered by layer."""

    seen: dict[int, list[Attended]] = field(default_factory=dict)
    calls: int = 0

    def attend(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: attention.Masks) -> torch.Tensor:
        """Return [T, Hq, D]."""
        group = q.shape[1] // k.shape[1]
        keys, values = (t.repeat_interleave(group, dim=1).transpose(0, 1) for t in (k, v))
        out = functional.scaled_dot_product_attention(q.transpose(0, 1), keys, values, is_causal=True, scale=masks.scale)
        whole = out.transpose(0, 1).contiguous()
        attended = Attended(q.clone(), k.clone(), v.clone(), whole, masks)
        self.seen.setdefault(module.layer_idx, []).append(attended)
        return attended.out.clone()


@dataclass(slots=True)
class Record:
    """One run: the model, calls by module path, attention by layer, the body's output, and where it waited for numbers."""

    model: Any
    positions: Sequence[int]
    calls: dict[str, list[Call]] = field(default_factory=dict)
    attended: dict[int, list[Attended]] = field(default_factory=dict)
    output: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    waits: list[tuple[str, str]] = field(default_factory=list)

    def once(self, path: str) -> Call | None:
        """The call of a module that was called once."""
        found = self.calls.get(path, [])
        return found[0] if len(found) == 1 else None


def run_trial(config: Any, *, headless: bool, max_position: int, offset: int, head_size: int = HEAD_SIZE) -> list[Record]:
    """Make the small models and run them. Raises whatever the model's code raises."""
    positions = sorted(random.Random(0).sample(range(max_position), min(TOKENS, max_position)))
    attention.register()
    records: list[Record] = []
    for seed, gain in enumerate(GAINS):
        model = small_model(config, headless=headless, seed=seed, gain=gain, head_size=head_size)
        records.append(run(model, [p + offset for p in positions], waits=not records))
    return records


def run_body(model: Any, body: Any, step: Any, positions: Sequence[int]) -> torch.Tensor:
    """Hidden states [T, H] of one sequence of tokens at ``positions``."""
    ids = torch.arange(3, 3 + len(positions))[None] * 5 % 64
    with torch.inference_mode():
        out: torch.Tensor = body(
            input_ids=ids, position_ids=torch.tensor([list(positions)]), use_cache=False, vllm_core_step=step
        )[0][0]
    return out


def small(config: Any, head_size: int) -> Any:
    """The config at a small width: heads, hidden and inner sizes, vocabulary, experts; all else as it is."""
    made = copy.deepcopy(config)
    heads, kv = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    few_kv = 1 if kv == 1 else 2
    few = few_kv * (1 if heads == kv else 2) if kv != 1 else 3
    hidden = few * head_size
    sizes = {"num_attention_heads": few, "hidden_size": hidden, "intermediate_size": 3 * head_size}
    if getattr(config, "num_key_value_heads", None):
        sizes["num_key_value_heads"] = few_kv
    if getattr(config, "head_dim", None):
        sizes["head_dim"] = head_size
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim", "n_inner"):
        if getattr(config, name, None):
            sizes[name] = 3 * head_size
    if getattr(config, "word_embed_proj_dim", None) == config.hidden_size:
        sizes["word_embed_proj_dim"] = hidden
    sizes |= {name: min(count, getattr(config, name)) for name, count in _COUNTS.items() if getattr(config, name, None)}
    sizes |= {name: value for name, value in _TOKEN_IDS.items() if getattr(config, name, None) is not None}
    for name, value in sizes.items():
        setattr(made, name, value)
    return made


@contextmanager
def one_thread() -> Iterator[None]:
    """So small products gain nothing by more, and lose much where the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def small_model(config: Any, *, headless: bool, seed: int, gain: float, head_size: int = HEAD_SIZE) -> Any:
    """The class at a small width, with random weights."""
    factory = AutoModel if headless else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = factory.from_config(small(config, head_size), dtype=torch.float32, attn_implementation=attention.NAME)
        _draw(model, gain)
    without_padding(model)
    return model.eval()


def without_padding(model: Any) -> None:
    """No sequence is padded here; some models ask the device for padding tokens in each step, in order to warn."""
    model.config.pad_token_id = None


def _draw(model: nn.Module, gain: float) -> None:
    """Weights of products scaled to ``gain``, all others moved away from the numbers they start with."""
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                noise = torch.randn_like(parameter)
                if parameter.dim() < 2:
                    parameter.add_(noise * 0.3)
                elif isinstance(module, nn.Embedding):
                    parameter.copy_(noise)
                else:
                    parameter.copy_(noise * (gain * parameter.shape[-1] ** -0.5))


def run(model: Any, positions: Sequence[int], *, waits: bool) -> Record:
    """Run the model's body once, looking on; ``waits`` says whether to note what the host waits for."""
    record, step = Record(model, positions), TrialStep()
    names = {module: name for name, module in model.named_modules()}
    opened: list[tuple[Any, Any]] = []
    inside: list[str] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        inside.append(names[module])
        opened.append((_kept(args), _kept(kwargs)))

    def after(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        calls, (given, named) = record.calls.setdefault(inside.pop(), []), opened.pop()
        calls.append(Call(sum(map(len, record.calls.values())), given, named, _kept(out)))

    with ExitStack() as stack:
        for module in names:
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        if waits:
            stack.enter_context(_Waits(record.waits, inside))
        record.output = run_body(model, body_of(model, whole=False), step, positions)
    record.attended = step.seen
    return record


class _Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operators whose results the host waits for, and the module that was running."""

    def __init__(self, found: list[tuple[str, str]], inside: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found, self._inside = found, inside

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _WAITS or (name == "index" and any(_is_mask(one) for one in args[1])):
            self._found.append((self._inside[-1] if self._inside else "", name))
        return func(*args, **(kwargs or {}))


def _is_mask(index: Any) -> bool:
    """Whether how many elements an index takes depends on its numbers."""
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _kept(value: Any) -> Any:
    """Tensors copied, one or two levels deep: code may go on to change them in place."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _kept(one) for name, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(_kept, value))
    return value


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two activations are the same numbers up to rounding; batch dimensions of 1 do not count."""
    if a.numel() != b.numel() or not a.numel() or a.shape[-1] != b.shape[-1]:
        return False
    largest = float(b.abs().max())
    return 0 < largest < float("inf") and float((a.reshape(b.shape) - b).abs().max()) <= 1e-4 * largest


def first(candidates: Iterator[Any], holds: Callable[[Any], bool]) -> Any:
    """The first candidate that holds, or None."""
    return next((one for one in candidates if holds(one)), None)
