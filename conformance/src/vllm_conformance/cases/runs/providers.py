"""L3: every provider of the Plan denied, failing in warm-up, or replaced by the references: tokens stay right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm_conformance.case import Evidence, Subject
from vllm_conformance.cases.runs.engines import Engine, assembled, engine, options_of, prompt_of
from vllm_conformance.cases.runs.expect import first_dtype
from vllm_conformance.cases.runs.refusal import unusable_after
from vllm_conformance.cases.runs.teacher import Marks
from vllm_conformance.cases.runs.tokens import marks_of
from vllm_core import launch
from vllm_core.errors import PlanError, VLLMCoreError
from vllm_core.registry.plan import Binding, Plan

_PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((5, 16, 33))]
_FAILS = "vllm_conformance.cases.runs.providers:fails"


def fails(*arguments: Any) -> None:
    """Stands for a kernel that cannot run at a shape that the model uses."""
    raise RuntimeError("no kernel for this shape")


def every_provider_denied(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Deny each provider that the Plan chose: it is used no more, and tokens are right or the Plan says who is missing."""
    name, dtype = params["model"], first_dtype(subject)
    chosen = launch.blueprint(options_of(subject, name, dtype)).plan
    denied, marks, calls = [], Marks(), dict[str, int]()
    for provider in sorted({one.provider for one in chosen.bindings if one.kind in ("kernel", "vendor")}):
        try:
            design = launch.blueprint(options_of(subject, name, dtype, deny_provider=[provider]))
        except PlanError as error:
            if provider not in str(error):
                return Evidence(
                    "FAIL", f"without {provider} nobody serves the model, and the error does not name it: {error.found}"
                )
            denied.append(f"{provider} (nobody else)")
            continue
        if any(one.provider == provider for one in design.plan.bindings):
            return Evidence("FAIL", f"{provider} was denied and is in the Plan")
        with assembled(design, name, dtype) as made:
            _judge(made, marks, f"without {provider}")
            evidence = made.evidence(marks)
            calls.update(evidence.calls)
        if evidence.outcome != "PASS":
            return evidence
        denied.append(provider)
    return Evidence(detail=f"denied: {', '.join(denied) or 'nobody, all is served by references'}", calls=calls)


def every_provider_failing(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Let each chosen provider fail in warm-up: the next one takes over, the Plan records it; `strict` raises."""
    name, dtype = params["model"], first_dtype(subject)
    design = launch.blueprint(options_of(subject, name, dtype, strict=False))
    seen, marks = [], Marks()
    for op in _called(design.plan):
        broken = _broken(design.plan, op)
        if not _next(broken, op):
            problem = _refuses(replace(design, plan=broken))
            if problem:
                return Evidence("FAIL", f"{op} fails and nobody else accepts: {problem}")
            seen.append(f"{op} (nobody else)")
            continue
        with assembled(replace(design, plan=broken), name, dtype) as made:
            demoted = {one.op for one in made.plan.demotions}
            if op not in demoted:
                return Evidence("FAIL", f"{op} failed in warm-up, and the Plan records {sorted(demoted) or 'nothing'}")
            _judge(made, marks, f"{op} demoted")
            evidence = made.evidence(marks)
        if evidence.outcome != "PASS":
            return evidence
        seen.append(op)
    unusable = unusable_after(subject.device)
    return Evidence("FAIL" if unusable else "PASS", unusable or f"demoted: {', '.join(seen)}")


def strict_raises(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """With `strict` a provider that fails in warm-up is an error that names it."""
    name, dtype = "llama", first_dtype(subject)
    design = launch.blueprint(options_of(subject, name, dtype))
    called = _called(design.plan)
    if not called:
        return Evidence(detail=f"the program {design.plan.program} has no call sites")
    op = called[0]
    binding = next(one for one in design.plan.bindings if one.op == op)
    try:
        with assembled(replace(design, plan=_broken(design.plan, op)), name, dtype):
            return Evidence("FAIL", f"{op} fails in warm-up, and the engine started with strict")
    except VLLMCoreError as error:
        if op not in str(error) or binding.provider not in str(error):
            return Evidence("FAIL", f"the error names neither {op} nor {binding.provider}: {error}")
    with engine(subject, name, dtype) as made:
        marks = Marks()
        _judge(made, marks, "after a failed start")
        return made.evidence(marks)


def generic_path(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """`--provider all=reference`: core's references alone, on this device, and nothing of the plugin's."""
    with engine(subject, params["model"], first_dtype(subject), provider={"all": "reference"}) as made:
        kinds = {one.kind for one in made.plan.bindings}
        marks = Marks()
        _judge(made, marks, "references alone")
        problem = "" if kinds == {"reference"} else f"call sites are served by {', '.join(sorted(kinds))}"
        return made.evidence(marks, problem)


def _judge(made: Engine, marks: Marks, what: str) -> None:
    outputs = made.generate(_PROMPTS, 8)
    judged = marks_of(made, _PROMPTS, outputs, what)
    marks.tokens, marks.ties = marks.tokens + judged.tokens, marks.ties + judged.ties
    marks.wrong = marks.wrong or judged.wrong


def _called(plan: Plan) -> list[str]:
    """Ops of the Plan that every step of a decoder calls, by their name alone."""
    every_step = ["linear", "paged_attention", "kv_write", "qk_norm_rope_kv_write", "qk_norm_rope_attention", "sample"]
    every_step += ["batch_update", "embedding", "rms_norm", "gated_activation", "build_step", "advance", "logit_adjust"]
    bound = {one.op for one in plan.bindings}
    # The fused form is called in place of its parts, where somebody offers it.
    hidden = {"kv_write"} if "qk_norm_rope_kv_write" in bound else set[str]()
    if "qk_norm_rope_attention" in bound:
        hidden |= {"kv_write", "qk_norm_rope_kv_write", "paged_attention"}
    if bound & {"gated_linear", "rms_norm_gated_linear"}:
        hidden.add("gated_activation")
    return [op for op in every_step if op in bound - hidden]


def _broken(plan: Plan, op: str) -> Plan:
    """The Plan with a provider of ``op`` that fails, at every role."""
    return replace(plan, bindings=tuple(replace(one, entry=_FAILS) if one.op == op else one for one in plan.bindings))


def _next(plan: Plan, op: str) -> bool:
    """Whether others would take over at every call site of the op's family there."""
    from vllm_core.api.ops import family_of

    family, roles = family_of(op), {one.role for one in plan.bindings if one.op == op}
    affected: list[Binding] = [one for one in plan.bindings if one.op in family and one.role in roles]
    return all(one.fallbacks for one in affected)


def _refuses(design: launch.Blueprint) -> str:
    """Why the start of an engine without a provider is not refused as it must be, or nothing."""
    try:
        launch.assemble(design).close()
    except PlanError:
        return ""
    except VLLMCoreError as error:
        return f"{type(error).__name__}: {error.what}"
    return "the engine started"
