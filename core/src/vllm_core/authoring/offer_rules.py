"""Offered ops against their schemas: the entry exists, and takes the arguments that the schema has. Nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_core.api import OPS
from vllm_core.authoring.finding import Finding, failed, ok, skipped
from vllm_core.authoring.source_rules import CONTRACT, defined_function, defines
from vllm_core.authoring.subject import Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferFacts:
    """What an `Offer` says, as plain data."""

    provider: str
    kind: str
    ops: Mapping[str, str]
    architectures: tuple[str, ...] | None
    op_versions: Mapping[str, int]


def arguments_of(schema: str) -> tuple[str, ...]:
    """Names of a schema's arguments, in order: ``(float[T,H] out!, int? k = None) -> X`` gives ``("out", "k=None")``."""
    depth, start, parts = 0, 1, []
    for index, letter in enumerate(schema):
        depth += letter in "([{"
        depth -= letter in ")]}"
        if (letter == "," and depth == 1) or (letter == ")" and depth == 0):
            parts.append(schema[start:index])
            start = index + 1
            if depth == 0:
                break
    return tuple(part.replace(" = ", "=").split()[-1].rstrip("!") for part in parts if part.strip())


def check_offers(subject: Subject, architecture: str, offers: Sequence[OfferFacts], built_for: Sequence[str]) -> list[Finding]:
    """Entries, signatures, schema versions and architectures of the offers for one device architecture."""
    findings = [finding for offer in offers for finding in _check_offer(subject, offer, built_for)]
    ops = {op for offer in offers for op in offer.ops if op in OPS}
    if not findings:
        findings.append(
            ok("offers", f"{subject.distribution} on {architecture}", f"{len(ops)} of {len(OPS)} ops, as their schemas say")
        )
    left = [op for op in OPS if op not in ops]
    if left:
        where = "core's references serve these where the device runs eagerly"
        findings.append(
            skipped("ops", f"{subject.distribution} on {architecture}", f"left to references: {', '.join(left)}", fix=where)
        )
    return findings


def _check_offer(subject: Subject, offer: OfferFacts, built_for: Sequence[str]) -> list[Finding]:
    findings = []
    for op, entry in sorted(offer.ops.items()):
        on = f"{op} by {offer.provider}"
        finding = _check_entry(subject, on, op, entry)
        if finding is not None:
            findings.append(finding)
        version = offer.op_versions.get(op, 1)
        if op in OPS and version != OPS[op].version:
            found, expected = f"written for version {version} of the schema", f"version {OPS[op].version}: {OPS[op].schema}"
            fix = "adapt it, and name the version in op_versions; `vllm-core plugin diff-api` shows what changed"
            findings.append(failed("signature", on, found, expected=expected, fix=fix))
    strange = sorted(set(offer.architectures or ()) - set(built_for)) if built_for else []
    if strange:
        findings.append(
            failed(
                "architectures",
                f"offer of {offer.provider}",
                ", ".join(strange),
                expected=f"architectures of the manifest: {', '.join(built_for)}",
                fix="name them in the manifest if their kernels are shipped, else drop them from the offer",
            )
        )
    return findings


def _check_entry(subject: Subject, on: str, op: str, entry: str) -> Finding | None:
    module, _, name = entry.partition(":")
    if module.partition(".")[0] == "vllm_core":
        expected, fix = (
            "code of the plugin's own",
            f"leave {op} out: what nobody offers is core's reference; {CONTRACT} is all that is public",
        )
        return failed("imports", on, entry, expected=expected, fix=fix)
    if module.partition(".")[0] not in subject.packages:
        return None if subject.can_find(module.partition(".")[0]) else _no_entry(on, f"{entry}: no such module")
    path = subject.module_file(module)
    if path is None:
        return _no_entry(on, f"{entry}: no such module")
    function = defined_function(path, name)
    if function is None:
        if defines(path, name):
            return None  # a wrapped or imported function: its signature is not in this text
        return _no_entry(on, f"{entry}: {subject.shown(path)} has no {name}")
    return _check_signature(on, op, function) if op in OPS else None


def _no_entry(on: str, found: str) -> Finding:
    return failed("entry", on, found, expected="'module:callable' that can be imported", fix="correct the entry")


def _check_signature(on: str, op: str, function: ast.FunctionDef) -> Finding | None:
    """Ops are called with all arguments by position, but with those that have a default only where they are asked for."""
    wanted, given = [one for one in arguments_of(OPS[op].schema) if "=" not in one], function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args)]
    least = len(names) - len(given.defaults)
    needed = [one.arg for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
    fits = least <= len(wanted) and (len(wanted) <= len(names) or given.vararg is not None) and not needed
    if fits:
        return None
    return failed(
        "signature",
        f"{on}, line {function.lineno}",
        f"{function.name}({ast.unparse(given)})",
        expected=f"{len(wanted)} arguments by position: {', '.join(wanted)}, from {OPS[op].schema}",
        fix="take the schema's arguments in their order",
    )
