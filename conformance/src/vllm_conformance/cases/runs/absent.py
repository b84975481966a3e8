"""Forces what is declared absent: REFUSED where every way to it says so, and the device is usable afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from vllm_conformance.case import Evidence, Subject
from vllm_conformance.cases.op_classes import ANY_DTYPE
from vllm_conformance.cases.ops import PRIVATE
from vllm_conformance.cases.runs.engines import options_of
from vllm_conformance.cases.runs.expect import first_dtype, pattern, put, same
from vllm_conformance.cases.runs.ops import run_offer, site_of
from vllm_conformance.cases.runs.refusal import Attempt, forced, refused, unusable_after
from vllm_core import launch
from vllm_core.api import Device, Offer, Rejected
from vllm_core.api.capability import describe
from vllm_core.config import EngineConfig
from vllm_core.errors import PlanError, VLLMCoreError
from vllm_core.registry import select


def on_device(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Call what the Device would need for it."""
    name, device = params["capability"], subject.device
    outcome, detail = forced(partial(_CALLS[name], device))
    if name == "graphs" and device.supports_graphs and outcome == "REFUSED":
        outcome, detail = "BAD_REFUSAL", f"{detail}; supports_graphs says the contrary"
    unusable = unusable_after(device)
    if unusable:
        return Evidence("BAD_REFUSAL", f"{name}: a direct call {detail}; afterwards {unusable}")
    return Evidence(outcome, f"{name} is {describe(subject.claims[name])}; a direct call {detail}")


def _capture(device: Device) -> list[str]:
    source = put(device, pattern((64,), torch.float32, 1))
    target = device.allocate("workspace", (64,), torch.float32)

    def work() -> None:
        target.copy_(source)

    graph = device.capture(work)
    source.copy_(pattern((64,), torch.float32, 2))
    graph.replay()
    device.synchronize()
    return _differences(target, pattern((64,), torch.float32, 2))


def _restore(device: Device) -> list[str]:
    tensor = put(device, pattern((64,), torch.float32, 1))
    device.release("workspace")
    device.restore("workspace")
    tensor.copy_(pattern((64,), torch.float32, 2))
    return _differences(tensor, pattern((64,), torch.float32, 2))


def _peer_copy(device: Device) -> list[str]:
    value = pattern((64,), torch.float32, 1)
    return _differences(device.copy_to_peer(put(device, value), device), value)


def _communicator(device: Device) -> list[str]:
    """A group of this rank alone, so that nobody is waited for."""
    with tempfile.TemporaryDirectory() as folder:
        device.communicator(0, 1, f"file://{folder}/group").close()
    return []


def _differences(found: torch.Tensor, expected: torch.Tensor) -> list[str]:
    try:
        same(found, expected, "its result")
    except AssertionError as error:
        return [str(error)]
    return []


_CALLS: Mapping[str, Callable[[Device], list[str]]] = {
    "graphs": _capture,
    "sleep": _restore,
    "peer_copy": _peer_copy,
    "parallel.tensor": _communicator,
}


def on_ops(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Ask every own offer that could serve it, then call it."""
    name = params["capability"]
    attempts, accepting = [], []
    for offer in subject.offers:
        case = None if offer.kind == "reference" else _asking(name, offer, subject)
        if case is None:
            continue
        verdict = _judge(offer, subject, name, case)
        if isinstance(verdict, Rejected):
            attempts.append(_attempt(subject, offer, verdict, case))
        else:
            accepting.append(f"{offer.provider} accepts {case['op']}")
    if accepting:
        return Evidence("BAD_REFUSAL", f"{name} is declared absent, but {', '.join(accepting)}")
    if not attempts:
        unusable = unusable_after(subject.device)
        return Evidence(
            "BAD_REFUSAL" if unusable else "REFUSED", unusable or f"{name}: no offer of the platform's own has an op for it"
        )
    return refused(subject, attempts)


def _asking(name: str, offer: Offer, subject: Subject) -> dict[str, Any] | None:
    """The op, dtype and class by which the capability is asked of an offer; None where it has nothing to do with it."""
    kind, _, what = name.partition(".")
    shapes = {
        "attention.sliding_window": ("paged_attention", "mixed/window"),
        "attention.soft_cap": ("paged_attention", "mixed/cap"),
        "attention.sinks": ("paged_attention", "mixed/sinks"),
        "attention.encoder": ("encoder_attention", "mixed"),
        "quantization.weight_only": ("linear", "mixed"),
        "quantization.fp8_activation": ("linear", "mixed/h512/fp8"),
        "kv_dtype.fp8": ("paged_attention", "mixed/kv_fp8"),
        "kv_dtype.int8": ("paged_attention", "mixed/kv_int8"),
    }
    if kind == "dtype":
        op = next((op for op in offer.ops if op not in ANY_DTYPE and op not in PRIVATE), "")
        dtype, shape = what, "mixed/plain"
    else:
        (op, shape), dtype = shapes[name], first_dtype(subject)
    if op not in offer.ops:
        return None
    return {"op": op, "dtype": dtype, "shape": shape, "seed": 0, "layout": ""}


def _judge(offer: Offer, subject: Subject, name: str, case: Mapping[str, Any]) -> object:
    site = site_of(case["op"], case["dtype"], case["seed"], case["shape"])
    if name == "quantization.weight_only":
        site = replace(site, format="gguf.q4_0")
    return offer.judge(site, subject.facts.architecture)


def _attempt(subject: Subject, offer: Offer, verdict: Rejected, case: Mapping[str, Any]) -> Attempt:
    # A call says of no format that its weight has it, and of inputs that they may be rounded neither.
    silent = verdict.need == "format" or case["shape"].endswith("/fp8")
    call = None if silent else lambda: run_offer(subject, offer, case).problems
    return offer.provider, verdict, call


def while_planning(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Ask the planner, by the user's option where there is one: a PlanError that names the capability."""
    name = params["capability"]
    try:
        how = _plan(subject, name)
    except PlanError as error:
        if name not in str(error) and name.rpartition(".")[2] not in str(error):
            return Evidence("BAD_REFUSAL", f"the refusal does not name {name}: {error.found[:300]}")
        unusable = unusable_after(subject.device)
        return Evidence("BAD_REFUSAL" if unusable else "REFUSED", unusable or " ".join(error.found.split())[:300])
    except VLLMCoreError as error:
        return Evidence("BAD_REFUSAL", f"{type(error).__name__} instead of PlanError: {error.what}: {error.found}"[:300])
    return Evidence("BAD_REFUSAL", f"{name} is declared absent, and a Plan was made with {how}")


_OPTIONS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "dtype.float32": ("llama", {"dtype": "float32"}),
    "dtype.bfloat16": ("llama", {"dtype": "bfloat16"}),
    "dtype.float16": ("llama", {"dtype": "float16"}),
    "kv_dtype.fp8": ("llama", {"kv_cache_dtype": "fp8"}),
    "kv_dtype.int8": ("llama", {"kv_cache_dtype": "int8"}),
    "attention.sliding_window": ("gemma3", {}),
    "attention.soft_cap": ("capped", {}),
    "attention.sinks": ("gpt_oss", {}),
    "attention.encoder": ("bert", {}),
    "async_scheduling": ("llama", {"async_scheduling": True}),
    "quantization.fp8_activation": ("llama", {"activation": "fp8", "quantization": "fp8"}),
}
"""Model and options by which a user asks for a capability."""


def _plan(subject: Subject, name: str) -> str:
    """Make a Plan; returns what was asked. Raises PlanError."""
    model, options = _OPTIONS.get(name, ("llama", {}))
    given = {**options_of(subject, model, first_dtype(subject)), **options}
    if name in _OPTIONS:
        launch.blueprint(given)
        return ", ".join(f"{key}={value}" for key, value in options.items()) or model
    # The candidate below has no offers of providers that the run denies: to the planner their names would be unknown.
    needs = replace(launch.needs_of(EngineConfig.from_options(given)), denied_providers=frozenset())
    if name == "graphs":
        needs = replace(needs, graphs=True)
    else:
        needs = replace(needs, capabilities=needs.capabilities | {name})
    select.plan(needs, [_candidate(subject)], [])
    return f"the need {name}"


def _candidate(subject: Subject) -> Any:
    """The platform as the planner sees it."""
    from vllm_core.registry.plan import Candidate

    found, manifest = subject.loaded.found, subject.loaded.manifest
    assert manifest is not None, "a platform has a manifest"
    return Candidate(
        manifest=manifest,
        distribution=found.distribution,
        version=found.version,
        entry_point=found.entry_point,
        devices=tuple(subject.all_facts),
        checks=(),
        offers=tuple(subject.offers),
        eager_full=any(offer.kind == "reference" for offer in subject.offers),
    )
