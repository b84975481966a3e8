"""Taking the next accepted provider where the chosen one failed; the Plan keeps what happened."""

from __future__ import annotations

from dataclasses import replace

from vllm_core.api.ops import OPS, WHOLES, family_of
from vllm_core.errors import PlanError
from vllm_core.registry.plan import Binding, Demotion, KVGroupPlan, Plan


def demote(plan: Plan, op: str, role: str, cause: str) -> Plan:
    """Return the Plan with the provider of a call site, and of its family there, replaced by the next accepted one.

    A KV group takes the layout of its new provider, so weights and KV are set up anew. What stands in for other ops is left
    out where nobody else does. Raises PlanError where no other provider accepted.
    """
    family = family_of(op)
    affected = [one for one in plan.bindings if one.role == role and one.op in family]
    assert affected, f"{op} at {role} is not in the plan"
    if op in WHOLES and not affected[0].fallbacks:
        (whole,) = affected
        gone = Demotion(op=op, role=role, provider=whole.provider, replacement="the ops that it stands for", cause=cause)
        bindings = tuple(one for one in plan.bindings if one is not whole)
        return replace(plan, bindings=bindings, demotions=(*plan.demotions, gone))
    if not all(one.fallbacks for one in affected):
        raise PlanError(
            "Provider failed and no other accepted",
            on=f"{op} at {role}, provider {affected[0].provider}",
            found=cause,
            expected="another provider that accepts this call site",
            fix="--provider all=reference is the generic path; report the failure to the provider's authors",
        )
    provider = affected[0].fallbacks[0][0]
    is_kv = OPS[op].family == "kv"
    others = {(one.op, role): _next(one) for one in affected}
    return replace(
        plan,
        bindings=tuple(others.get((one.op, one.role), one) for one in plan.bindings),
        kv_groups=tuple(_relayout(one, provider) if is_kv and one.role == role else one for one in plan.kv_groups),
        demotions=(
            *plan.demotions,
            *(Demotion(op=one.op, role=role, provider=one.provider, replacement=provider, cause=cause) for one in affected),
        ),
    )


def _next(binding: Binding) -> Binding:
    (provider, entry, kind), *rest = binding.fallbacks
    return replace(binding, provider=provider, entry=entry, kind=kind, fallbacks=tuple(rest), formats=())


def _relayout(group: KVGroupPlan, provider: str) -> KVGroupPlan:
    rest = tuple(one for one in group.fallbacks if one[0] != provider)
    return replace(group, layout=dict(group.fallbacks)[provider], fallbacks=rest)
