"""Runs one L2 case: the offers that accept its call site, each on the device and with nothing to fall back on.

The platform's own offers are judged; core's reference takes their place only for an op that nobody else offers. Where all
own offers reject the call site, that refusal is what is tried: a direct call must raise UnsupportedError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from vllm_conformance.case import Evidence, Subject
from vllm_conformance.cases.op_classes import ANY_DTYPE, GRAPH, IN_PLACE, STRIDED
from vllm_conformance.cases.runs.expect import first_dtype
from vllm_conformance.cases.runs.refusal import Attempt, refused
from vllm_core.api import FORMATS, OPS, Accepted, CallSite, Full, Offer, Rejected, load_entry
from vllm_core.api.ops import FP8_ACTIVATION, WHOLES
from vllm_core.ops.check import Judgement, Provider, Where, judge
from vllm_core.ops.classes import parse

_PLAIN_OPS = ("linear", "kv_write", "paged_attention", "encoder_attention")
_CAPABILITIES = {
    **dict.fromkeys(FORMATS, "quantization.weight_only"),
    "window": "attention.sliding_window",
    "cap": "attention.soft_cap",
    "sinks": "attention.sinks",
    "kv_fp8": "kv_dtype.fp8",
    "kv_int8": "kv_dtype.int8",
}
"""What the parts of a class's name ask of a platform."""


def run_op(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """PASS, FAIL, or what the refusal of the call site was."""
    op = params["op"]
    site = site_of(op, site_dtype(subject, params["dtype"]), params["seed"], params["shape"])
    offers = serving(subject.offers, op)
    verdicts = [(offer, offer.judge(site, subject.facts.architecture)) for offer in offers]
    accepted = [offer for offer, verdict in verdicts if isinstance(verdict, Accepted)]
    if accepted:
        return _evidence([(offer, run_offer(subject, offer, params)) for offer in accepted], params["seed"])
    rejections = [(offer, verdict) for offer, verdict in verdicts if isinstance(verdict, Rejected)]
    promised = _promised(subject, op, params["shape"])
    others = [one for one in subject.offers if op in one.ops and one not in offers]  # references behind own offers
    if promised and not any(isinstance(one.judge(site, subject.facts.architecture), Accepted) for one in others):
        why = "; ".join(f"{offer.provider}: {verdict}" for offer, verdict in rejections)
        return Evidence("FAIL", f"{promised} is claimed in full, and nobody serves it: {why}")
    # A call does not say that its inputs may be rounded: it is exact, and right, where that is not offered.
    rounding = FP8_ACTIVATION in site.features
    # References decode a weight of any format, as core does for everybody who does not read it.
    silent = {offer.provider: rounding or offer.kind == "reference" for offer, _ in rejections}
    return refused(
        subject, [_attempt(subject, offer, verdict, params, silent[offer.provider]) for offer, verdict in rejections]
    )


def _promised(subject: Subject, op: str, shape: str) -> str:
    """The capability that a class asks for and a platform claims in full, or nothing.

    Only of ops without which no model does: who refuses a fused one leaves it to those that it is composed of.
    """
    asked = (_CAPABILITIES.get(part, "") for part in shape.split("/"))
    return next((name for name in asked if op in _PLAIN_OPS and isinstance(subject.claims.get(name), Full)), "")


def run_offer(subject: Subject, offer: Offer, params: Mapping[str, Any]) -> Judgement:
    """Judge one offer on the device; its memory there is given back."""
    dtype = "float32" if params["op"] in ANY_DTYPE else params["dtype"]
    layout = params["layout"]
    where = Where(subject.device, strided=layout == STRIDED, in_place=layout == IN_PLACE, graph=layout == GRAPH)
    try:
        return judge(params["op"], _with_weights(subject, offer, params), dtype, params["seed"], params["shape"], where)
    finally:
        subject.device.release("workspace")


def _attempt(subject: Subject, offer: Offer, verdict: Rejected, params: Mapping[str, Any], silent: bool) -> Attempt:
    return offer.provider, verdict, None if silent else lambda: run_offer(subject, offer, params).problems


def _evidence(judged: Sequence[tuple[Offer, Judgement]], seed: int) -> Evidence:
    """One row for all offers; what differs is named by provider."""
    calls: dict[str, int] = {}
    for offer, _ in judged:
        calls[offer.kind] = calls.get(offer.kind, 0) + 1
    wrong = [f"{offer.provider}: {'; '.join(found.problems)}" for offer, found in judged if found.problems]
    ties = sum(found.ties for _, found in judged)
    return Evidence(
        outcome="FAIL" if wrong else "PASS",
        detail=" | ".join(wrong) or (f"{ties} tokens differ where rounding decides" if ties else ""),
        seed=seed,
        digest=judged[0][1].digest,
        calls=calls,
    )


def serving(offers: Sequence[Offer], op: str) -> list[Offer]:
    """The platform's own offers of an op, best first; without any, core's reference."""
    mine = sorted((offer for offer in offers if op in offer.ops), key=lambda offer: -offer.priority)
    return [offer for offer in mine if offer.kind != "reference"] or mine


def _with_weights(subject: Subject, offer: Offer, params: Mapping[str, Any]) -> Provider:
    """The offer's callables; for `decode_layers` with weights and KV in the form of those that serve these here."""
    provider = provider_of(offer)
    if params["op"] not in WHOLES:
        return provider
    linear, kv = (provider_of(_first(subject, op, params)) for op in ("linear_pack", "kv_bind"))
    return Provider({**linear.ops, **kv.ops, **provider.ops}, kv.kv_layout)


def _first(subject: Subject, op: str, params: Mapping[str, Any]) -> Offer:
    """The best offer of another op that accepts the case's sizes."""
    site = replace(site_of(params["op"], params["dtype"], params["seed"], params["shape"]), op=op)
    if OPS[op].family != "kv":
        site = CallSite(op=op, role=site.role, dtype=site.dtype)
    architecture = subject.facts.architecture
    return next(one for one in serving(subject.offers, op) if isinstance(one.judge(site, architecture), Accepted))


@cache
def _load(entries: tuple[tuple[str, str], ...], layout: Any) -> Provider:
    return Provider({op: load_entry(entry) for op, entry in entries}, layout)


def provider_of(offer: Offer) -> Provider:
    """The offer's callables, imported once."""
    return _load(tuple(sorted(offer.ops.items())), offer.kv_layout)


def site_dtype(subject: Subject, dtype: str) -> str:
    """The model's dtype; for an op that does not depend on it, the first that is claimed."""
    return first_dtype(subject) if dtype == "any" else dtype


def site_of(op: str, dtype: str, seed: int, shape_class: str) -> CallSite:
    """The call site that a case stands for."""
    is_kv = OPS[op].family == "kv" or op in WHOLES
    if not (is_kv or OPS[op].features):
        return CallSite(op=op, role="conformance", dtype=dtype)
    shape = parse(shape_class)
    variant = shape.variant_of(seed, dtype)
    return CallSite(
        op=op,
        role="conformance",
        dtype=dtype,
        kv_dtype=(variant.kv_dtype or dtype) if is_kv else None,
        head_size=shape.head_size if is_kv else None,
        tokens_per_block=shape.tokens_per_block if is_kv else None,
        format=variant.weights,
        features=variant.features(op),
    )
