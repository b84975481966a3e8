"""The table of `cpu.py peers`: medians with ranges, ratios to each peer, and the goals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

WORKLOADS = ("decode", "prefill", "batch", "first")
ROWS: Mapping[str, tuple[str, bool]] = {
    "decode tokens/s": ("one stream decodes, tokens/s", True),
    "prefill tokens/s": ("prompt of 1,024, tokens/s", True),
    "batch tokens/s": ("32 requests at once, tokens out/s", True),
    "first token s": ("command to first token, new process, s", False),
    "peak MB": ("peak memory, MB", False),
}
"""Figures, and whether more is better."""

GOALS: Mapping[str, Mapping[str, float]] = {
    "llama": {"decode tokens/s": 1.3, "prefill tokens/s": 3.0, "batch tokens/s": 3.0, "first token s": 1.0, "peak MB": 1.3},
    "vllm": {"decode tokens/s": 2.5, "prefill tokens/s": 2.0, "batch tokens/s": 2.5, "first token s": 0.25, "peak MB": 0.3},
}
"""Ours over the peer's: at least where more is better, else at most."""

SMALL_BYTES, SMALL_EXTRA_MB = 500e6, 250.0
"""Below this file size llama.cpp's memory and so much more is the goal."""

READ_SHARE = 0.75
"""Goal of decoding: weight bytes a second over the read bandwidth."""


def markdown(result: Mapping[str, Any]) -> str:
    """One table a model."""
    engines: list[Mapping[str, Any]] = result["engines"]
    ours = [engine for engine in engines if engine["kind"] == "ours"]
    bandwidth = result["read GB/s"]
    batch = f"The 32 requests are of 128 tokens in and {result['batch out']} out"
    how = "Medians with ranges; ratio: ours over the peer's. KV caches in float16 but vLLM's"
    lines = [f"Memory is read at {bandwidth:.1f} GB/s. {batch}. {how}. {result['seconds']} s."]
    for what in dict.fromkeys(engine["what"] for engine in ours):
        mine = [engine for engine in ours if engine["what"] == what]
        peers = [engine for engine in engines if engine["kind"] != "ours" and _same_model(engine, what)]
        lines += ["", *_model(what, mine, peers, bandwidth)]
    return "\n".join(lines)


def _same_model(engine: Mapping[str, Any], what: str) -> bool:
    from cpu_models import MODELS

    return bool(engine["what"] in (what, MODELS[what].checkpoint))


def _model(what: str, mine: list[Mapping[str, Any]], peers: list[Mapping[str, Any]], bandwidth: float) -> list[str]:
    kinds = list(dict.fromkeys(engine["kind"] for engine in peers))
    head = [f"{what}", *(f"ours, {engine['mode']}" for engine in mine)]
    for kind in kinds:
        head += [kind, *(f"ratio, {engine['mode']}" for engine in mine), "goal"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for key, (label, more) in ROWS.items():
        cells = [label, *(_figure(engine["samples"].get(key)) for engine in mine)]
        for kind in kinds:
            best = _best([engine for engine in peers if engine["kind"] == kind], key, more)
            cells += _against(kind, key, more, mine, best)
        lines.append("| " + " | ".join(cells) + " |")
    for engine in mine:
        if rates := engine["samples"].get("decode tokens/s"):
            share = statistics.median(rates) * engine["weight bytes"] / 1e9 / bandwidth
            lines.append(f"\n{engine['mode']}: decoding reads {share:.0%} of the bandwidth (goal {READ_SHARE:.0%}).")
    return lines


def _against(kind: str, key: str, more: bool, mine: list[Mapping[str, Any]], best: Mapping[str, Any] | None) -> list[str]:
    if best is None:
        return ["", *("" for _ in mine), ""]
    theirs = statistics.median(best["samples"][key])
    goal, extra = GOALS[kind][key], 0.0
    if key == "peak MB" and kind == "llama" and best["weight bytes"] < SMALL_BYTES:
        goal, extra = 1.0, SMALL_EXTRA_MB
    cells = [_figure(best["samples"][key]) + (f", {best['mode']}" if kind == "vllm" else "")]
    for engine in mine:
        found = engine["samples"].get(key)
        if not found:
            cells.append("")
            continue
        value = statistics.median(found)
        met = value >= goal * theirs if more else value <= goal * theirs + extra
        cells.append(f"{value / theirs:.2f} {'met' if met else 'missed'}")
    bound = f"{'>=' if more else '<='} {goal:g}"
    return [*cells, bound + (f" and {extra:g} MB" if extra else "")]


def _best(engines: list[Mapping[str, Any]], key: str, more: bool) -> Mapping[str, Any] | None:
    there = [engine for engine in engines if engine["samples"].get(key)]
    choose = max if more else min
    return choose(there, key=lambda engine: statistics.median(engine["samples"][key])) if there else None


def _figure(values: list[float] | None) -> str:
    if not values:
        return ""
    digits = 0 if statistics.median(values) >= 100 else 1 if statistics.median(values) >= 10 else 2
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"
