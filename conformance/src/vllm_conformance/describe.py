"""What a platform is, asked in a child process: claims, devices, who serves which op, its cases, and a Plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import msgspec

from vllm_conformance.case import Case
from vllm_conformance.collect import case_modules, collect
from vllm_conformance.protocol import Describe, Description
from vllm_conformance.subject import LiveSubject, claims_data, denied_by
from vllm_core.api import CAPABILITIES, DeviceFacts, Unsupported
from vllm_core.errors import VLLMCoreError
from vllm_core.models import catalog
from vllm_core.registry import select
from vllm_core.registry.plan import Needs, Plan

PLANNED_MODEL: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
"""The model whose Plan goes into a report: a small decoder."""
DTYPES = ("bfloat16", "float16", "float32")
NOWHERE = DeviceFacts(id="", name="", device_type="", architecture="", memory_kind="host", memory_bytes=0)


def describe(subject: LiveSubject, request: Describe) -> Description:
    """Describe it. A plugin that cannot be loaded, or has no device here, is described as far as it goes."""
    found = subject.found
    described = Description(
        platform=found.platform,
        distribution=found.distribution,
        distribution_version=found.version,
        entry_point=found.entry_point,
        torch_version=version("torch"),
    )
    try:
        described = _with_manifest(described, subject)
        if request.device is not None:
            subject.choose(request.device)
        facts = subject.facts
    except VLLMCoreError as error:
        return msgspec.structs.replace(described, problem=f"{error.what}: {error.found}", cases=unknown_cases(request.cases))
    plan, problem = _plan(subject)
    return msgspec.structs.replace(
        described,
        providers=subject.providers(),
        devices=tuple(subject.all_facts),
        cases=collect(subject.claims, subject.offers, facts, modules=case_modules(request.cases)),
        plan=plan,
        plan_problem=problem,
    )


def unknown_cases(package: str) -> tuple[Case, ...]:
    """The cases of a platform of which nothing is known: level 0."""
    nothing = {name: Unsupported("not known") for name in CAPABILITIES}
    return tuple(case for case in collect(nothing, (), NOWHERE, modules=case_modules(package)) if case.level == 0)


def _with_manifest(described: Description, subject: LiveSubject) -> Description:
    manifest = subject.loaded.manifest
    assert manifest is not None, "a platform has a manifest"
    return msgspec.structs.replace(
        described,
        vendor=manifest.vendor,
        api_version=manifest.api_version,
        support_level=manifest.support_level,
        companions=tuple(map(str, manifest.companions)),
        claims=claims_data(subject.claims),
    )


def _plan(subject: LiveSubject) -> tuple[dict[str, Any] | None, str]:
    """The Plan for `PLANNED_MODEL` in the first dtype that is claimed, or why there is none."""
    problem = "no dtype is claimed"
    for dtype in DTYPES:
        try:
            plan = select.plan(_needs(dtype, denied_by(subject.options)), [subject.candidate], [])
        except VLLMCoreError as error:
            problem = f"{error.what}: {error.found}"
        else:
            return _data(plan), ""
    return None, problem


def _needs(dtype: str, denied: Sequence[str]) -> Needs:
    spec = catalog.describe(PLANNED_MODEL, dtype=dtype)
    return Needs(
        model="a small decoder",
        architecture=spec.architecture,
        dtype=dtype,
        kv_dtype=dtype,
        capabilities=frozenset({f"dtype.{dtype}", "attention.decoder", "sampling.device"}),
        sites=spec.call_sites(dtype),
        kv_groups=spec.kv_groups(),
        denied_providers=frozenset(denied),
    )


def _data(plan: Plan) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(replace(plan, rejected=()))
    return data
