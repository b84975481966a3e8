"""The support matrix as one HTML page that needs nothing else: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape

from vllm_conformance.matrix import claim_word, heads, level_word, proof_of
from vllm_conformance.report import Report, by_reference, calls_by_op
from vllm_conformance.table import VERDICTS, bad_rows
from vllm_core.api import CAPABILITIES

MOST_BAD = 200

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #2a7d4f; --bad: #b3261e; --dim: #777 }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2.5rem }
table { border-collapse: collapse; width: 100% } .wide { overflow-x: auto }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: left; vertical-align: top }
thead th { position: sticky; top: 0; background: Canvas }
code { font-size: .9em; overflow-wrap: anywhere } small { color: var(--dim); display: block }
.proved { color: var(--good) } .refuted, .bad { color: var(--bad); font-weight: 600 } .unproved { color: var(--dim) }
"""


def to_html(reports: Sequence[Report]) -> str:
    """The page of some reports."""
    parts = ["<h1>Support matrix</h1>", _matrix(reports), *(_details(report) for report in reports)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Support matrix</title><style>{_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _matrix(reports: Sequence[Report]) -> str:
    rows = [["conformance", *(f"<b>{escape(level_word(report))}</b>" for report in reports)]]
    for name, capability in CAPABILITIES.items():
        cells = [_claim(report, name) for report in reports]
        rows.append([f"<code>{escape(name)}</code><small>{escape(capability.doc)}</small>", *cells])
    return _table(["", *map(escape, heads(reports))], rows)


def _claim(report: Report, name: str) -> str:
    claim = report.claims.get(name)
    if claim is None:
        return '<span class="unproved">?</span>'
    proof = proof_of(report, name)
    why = claim.get("why") or claim.get("reason") or claim.get("issue") or ""
    note = f"<small>{escape(why)}</small>" if why else ""
    return f'<span class="{proof}" title="{proof}">{escape(claim_word(claim))}</span>{note}'


def _details(report: Report) -> str:
    platform, versions = report.platform, report.versions
    device = report.devices[0] if report.devices else None
    facts = [
        ("simulated", report.simulated or "no"),
        ("left out", ", ".join(report.denied) or "nothing"),
        ("result", report.result + (f" (subset {report.subset})" if report.subset else "")),
        ("run", f"{report.started}, {report.seconds:g} s, {len(report.rows)} cases"),
        (
            "device",
            f"{device.name}, {device.architecture}, {device.memory_bytes / 2**30:.1f} GiB" if device else platform.problem,
        ),
        (
            "versions",
            ", ".join(f"{name} {getattr(versions, name)}" for name in versions.__struct_fields__ if getattr(versions, name)),
        ),
        ("made for", ", ".join(platform.companions or ()) or "any versions"),
        (
            "sources",
            "; ".join(f"{one.name}: {one.kind} {one.commit[:12]}{' dirty' if one.dirty else ''}" for one in report.sources),
        ),
        ("by core's references", ", ".join(by_reference(report.rows)) or "nothing"),
    ]
    parts = [f"<h2>{escape(platform.distribution)} {escape(versions.plugin)}</h2>"]
    parts.append(_table([], [[escape(name), escape(value)] for name, value in facts]))
    parts.append(_table(["level", *VERDICTS], [*_levels(report)]))
    calls = calls_by_op(report.rows)
    kinds = ("kernel", "vendor", "reference", "host")
    if calls:
        rows = [[f"<code>{escape(op)}</code>", *(str(calls[op][kind] or "") for kind in kinds)] for op in sorted(calls)]
        parts.append(f"<details><summary>calls by op</summary>{_table(['op', *kinds], rows)}</details>")
    bad = bad_rows(report)[:MOST_BAD]
    if bad:
        rows = [
            [f'<span class="bad">{row.verdict}</span>', f"<code>{escape(row.id)}</code>", escape(row.detail)] for row in bad
        ]
        parts.append(_table(["verdict", "case", "detail"], rows))
    return "\n".join(parts)


def _levels(report: Report) -> Iterable[list[str]]:
    for level in sorted({row.level for row in report.rows}):
        counts = Counter[str](row.verdict for row in report.rows if row.level == level)
        yield [f"L{level}", *(str(counts[name] or "") for name in VERDICTS)]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML."""
    head = f"<thead><tr>{''.join(f'<th>{one}</th>' for one in columns)}</tr></thead>" if columns else ""
    body = "\n".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'
