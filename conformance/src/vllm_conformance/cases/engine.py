"""L3: engines on tiny models of each architecture. Planning; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_conformance.case import Case, Size
from vllm_core.api import DeviceFacts, Offer, Support, is_available

DTYPES = ("float32", "bfloat16", "float16")
MODELS: Mapping[str, tuple[str, ...]] = {
    "llama": (),
    "qwen2": (),
    "qwen3": (),
    "gemma3": ("attention.sliding_window",),
    "capped": ("attention.soft_cap",),
    "mixtral": (),
    "qwen3_moe": (),
    "phi3": (),
    "gpt_oss": ("attention.sliding_window", "attention.sinks"),
}
"""Capabilities that each model needs beside those that are required. ``phi3`` and ``gpt_oss`` are on the transformers track."""
WITH_EXPERTS = frozenset({"mixtral", "qwen3_moe", "gpt_oss"})
"""Models whose tokens are judged in float32 alone: which expert is chosen is a step, and narrow dtypes round to either side."""
CI_MODELS = frozenset({"llama", "gemma3"})
CHUNKS = (4, 15, 16, 17, 64)
ABORT_SEEDS = (0, 1, 2)


def collect(claims: Mapping[str, Support], offers: Sequence[Offer], facts: DeviceFacts) -> Iterator[Case]:
    """Cases of the engine, those of a capability where it is claimed."""

    def has(*names: str) -> bool:
        return all(is_available(claims[name]) for name in names)

    dtypes = [dtype for dtype in DTYPES if has(f"dtype.{dtype}")]
    models = [name for name, needs in MODELS.items() if has(*needs)]
    yield from _tokens(dtypes, models, has("kv_dtype.fp8"), has("kv_dtype.int8"))
    if has("attention.encoder"):
        yield from (_case(f"vectors/{dtype}", "tokens:vectors", "model:bert", {"dtype": dtype}, ci=True) for dtype in dtypes)
    windows = ["gemma3"] if has("attention.sliding_window") else []
    yield from _scheduling(["llama", *windows])
    yield _case("sampling/seeds_repeat", "tokens:seeds_repeat", "engine:sampling", ci=True)
    yield _case("sampling/parameters_are_obeyed", "tokens:parameters_are_obeyed", "engine:sampling", ci=True)
    yield _case("sampling/prompt_logprobs", "tokens:prompt_logprobs", "capability:sampling.logprobs", ci=True)
    if has("async_scheduling"):
        yield _case("steps_ahead", "scheduling:steps_ahead", "capability:async_scheduling", ci=True)
    for dtype in dtypes if has("batch_invariant") else ():
        group = "capability:batch_invariant"
        yield _case(f"batch_invariant/{dtype}", "tokens:batch_invariant", group, {"dtype": dtype}, ci=True)
    for name in ["llama", *windows] if has("graphs") else ():
        for dtype in dtypes:
            params = {"model": name, "dtype": dtype}
            yield _case(f"captured_steps/{name}/{dtype}", "scheduling:captured_steps", "capability:graphs", params, ci=True)
    if has("parallel.tensor"):
        group = "capability:parallel.tensor"
        yield _case("two_workers/llama", "whole:two_workers", group, {"model": "llama"}, ci=True)
    yield from _providers(offers)
    yield _case("memory_comes_back", "whole:memory_comes_back", "engine:memory", {"alone": True}, ci=True)
    yield _case("nothing_is_patched", "whole:nothing_is_patched", "engine:patches", ci=True)


def _tokens(dtypes: Sequence[str], models: Sequence[str], fp8: bool, int8: bool) -> Iterator[Case]:
    for name in models:
        for dtype in [one for one in dtypes if one == "float32"] if name in WITH_EXPERTS else dtypes:
            plain = {"model": name, "dtype": dtype}
            ci = name in CI_MODELS and dtype != "float16"
            yield _case(f"tokens/{name}/{dtype}", "tokens:tokens", f"model:{name}", plain, ci=ci)
    for kv_dtype in [*dtypes, *["fp8"] * fp8, *["int8"] * int8]:
        for dtype in dtypes:
            if kv_dtype != dtype:
                params: dict[str, Any] = {
                    "model": "llama",
                    "dtype": dtype,
                    "kv_dtype": kv_dtype,
                    "options": {"kv_cache_dtype": kv_dtype},
                }
                group = f"capability:{'kv_dtype' if kv_dtype in ('fp8', 'int8') else 'dtype'}.{kv_dtype}"
                yield _case(f"tokens/llama/{dtype}/kv_{kv_dtype}", "tokens:tokens", group, params)


def _scheduling(models: Sequence[str]) -> Iterator[Case]:
    for name in models:
        for size in CHUNKS:
            params = {"model": name, "size": size}
            yield _case(f"chunks/{name}/{size}", "scheduling:chunks", "capability:chunked_prefill", params, ci=size in (4, 17))
        for what in ("prefixes", "evictions", "preemption"):
            group = "engine:preemption" if what == "preemption" else "capability:prefix_caching"
            yield _case(f"{what}/{name}", f"scheduling:{what}", group, {"model": name}, ci=True)
    for seed in ABORT_SEEDS:
        yield _case(f"cancellation/seed{seed}", "scheduling:cancellation", "engine:cancellation", {"seed": seed}, ci=seed == 0)


def _providers(offers: Sequence[Offer]) -> Iterator[Case]:
    group = "engine:providers"
    yield _case("providers/every_one_denied", "providers:every_provider_denied", group, {"model": "llama"}, ci=True)
    yield _case("providers/every_one_failing", "providers:every_provider_failing", group, {"model": "llama"}, ci=True)
    yield _case("providers/strict_raises", "providers:strict_raises", group, ci=True)
    if any(offer.kind == "reference" for offer in offers):
        yield _case("providers/references_alone", "providers:generic_path", group, {"model": "llama"}, ci=True)


def _case(
    name: str, run: str, group: str, params: Mapping[str, Any] | None = None, *, size: Size = "large", ci: bool = False
) -> Case:
    given = {**(params or {}), **({"ci": True} if ci else {})}
    return Case(f"L3/{name}", 3, group, size, f"vllm_conformance.cases.runs.{run}", given)
