"""A Plan for a person and for a machine: twelve lines at most, tables, or JSON that reads back as the same Plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from vllm_core.registry.plan import Plan

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_LINES = 12
MAX_NOTES = 3


def to_json(plan: Plan) -> bytes:
    """The whole Plan as indented JSON; equal Plans give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(plan, order="deterministic"), indent=2)


def from_json(data: bytes) -> Plan:
    """Read what `to_json` wrote. Raises msgspec.ValidationError."""
    return msgspec.json.decode(data, type=Plan)


def to_text(plan: Plan, width: int = 160) -> str:
    """Summary of at most 12 lines: the log's form, and what errors carry."""
    device, graphs = plan.device, "on" if plan.graphs else "off"
    compiled = f", compiled by {plan.compiler}" if plan.compiler else ""
    ids = ", ".join(one.id for one in plan.devices or (device,))
    memory = f"{device.memory_bytes / 2**30:.1f} GiB {device.memory_kind}"
    lines = [
        f"model     {plan.model}: {plan.architecture}, track {plan.track}, program {plan.program}",
        f"platform  {plan.platform} ({plan.distribution} {plan.distribution_version}, {plan.support_level}): "
        f"{plan.reasons.get('platform', 'no reason given')}",
        f"device    {ids}: {device.name}, {device.architecture}, {memory}",
        f"values    dtype {plan.dtype}, KV {plan.kv_dtype}, graphs {graphs}{compiled}, tensor parallel {plan.tensor_parallel}",
        f"providers {_providers(plan)}",
    ]
    if plan.kv_groups:
        lines.append(f"KV groups {'; '.join(_groups(plan))}")
    if plan.rejected:
        lines.append(f"rejected  {_rejected(plan)}")
    if plan.demotions:
        last = plan.demotions[-1]
        lines.append(f"demoted   {len(plan.demotions)}, last {last.op}: {last.provider} -> {last.replacement}: {last.cause}")
    lines += [f"note      {note}" for note in plan.notes[:MAX_NOTES]]
    if len(plan.notes) > MAX_NOTES:
        lines.append(f"note      and {len(plan.notes) - MAX_NOTES} more: `vllm-core platforms explain`")
    return "\n".join(_cut(line, width) for line in lines[:MAX_LINES])


def to_tables(plan: Plan) -> RenderableType:
    """The long form for a terminal: every binding, group, reason and rejected candidate."""
    from rich.console import Group

    bindings = [(one.op, one.role, one.provider, one.kind, ", ".join(f[0] for f in one.fallbacks)) for one in plan.bindings]
    groups = [
        (str(one.spec.index), one.spec.kind, str(len(one.spec.layers)), str(one.layout.tokens_per_block), one.layout.layout_id)
        for one in plan.kv_groups
    ]
    demotions = [(one.op, one.role, f"{one.provider} -> {one.replacement}", one.cause) for one in plan.demotions]
    return Group(
        to_text(plan),
        table("Call sites", ("op", "role", "provider", "kind", "then"), bindings),
        table("KV groups", ("group", "kind", "layers", "tokens per block", "layout"), groups),
        table("Reasons", ("choice", "why"), list(plan.reasons.items())),
        table("Rejected", ("for", "candidate", "reason"), [(r.subject, r.candidate, r.reason) for r in plan.rejected]),
        table("Demoted", ("op", "role", "providers", "cause"), demotions),
        table("Notes", ("note",), [(note,) for note in plan.notes]),
    )


def table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> RenderableType:
    """A rich table of plain text; nothing where there are no rows."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return Text(f"{title}: none")
    made = Table(title=title, title_justify="left", box=SIMPLE)
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def _providers(plan: Plan) -> str:
    counts = Counter((one.provider, one.kind) for one in plan.bindings)
    parts = [
        f"{provider} {count} ({kind}{_owner(plan, provider)})"
        for (provider, kind), count in sorted(counts.items(), key=lambda item: -item[1])
    ]
    slow = sorted({one.op for one in plan.bindings if one.kind in ("reference", "host")})
    return ", ".join(parts) + (f"; by reference or host: {', '.join(slow)}" if slow else "")


def _owner(plan: Plan, provider: str) -> str:
    """Whose it is, where it is not the platform's own."""
    return f", of {plan.owners[provider]}" if provider in plan.owners else ""


def _groups(plan: Plan) -> list[str]:
    return [
        f"{one.spec.index} {one.spec.kind}{f' {one.spec.window}' if one.spec.window else ''}, {len(one.spec.layers)} layers, "
        f"blocks of {one.layout.tokens_per_block}, {one.layout.layout_id}"
        for one in plan.kv_groups
    ]


def _rejected(plan: Plan) -> str:
    platforms = [f"{one.candidate} ({one.reason})" for one in plan.rejected if one.subject == "platform"]
    offers = len(plan.rejected) - len(platforms)
    return ", ".join([*platforms, *([f"{offers} offers"] if offers else [])])


def _cut(line: str, width: int) -> str:
    line = " ".join(line.split("\n"))
    return line if len(line) <= width else f"{line[: width - 3]}..."
