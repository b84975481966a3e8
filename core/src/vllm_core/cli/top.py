"""`vllm-core top`: what running servers do now, from their metrics."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

Histogram = Mapping[float, float]
_TIMES = {
    "TTFT": "vllm:time_to_first_token_seconds",
    "ITL": "vllm:inter_token_latency_seconds",
    "E2E": "vllm:e2e_request_latency_seconds",
}


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "top", help="what servers do now", description="Requests, tokens per second, KV cache and device of running servers."
    )
    parser.add_argument("--url", action="append", metavar="URL", help="a server; repeatable (default: those that `ps` lists)")
    parser.add_argument("--api-key", metavar="KEY", help="their key, if metrics are behind one (or VLLM_CORE_API_KEY)")
    parser.add_argument("--interval-s", type=_interval, default=1.0, metavar="N", help="time between looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="look twice, print, and end")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Show until interrupted. Raises ConfigError where a server that was named does not answer."""
    from rich.console import Console
    from rich.live import Live

    from vllm_core.client import Server

    servers = [Server(url, args.api_key) for url in args.url or _listed()]
    if not servers:
        print("no server of this user runs on this machine; name one with --url")
        return 1
    before = {server.url: look(server.metrics()) for server in servers}
    console = Console()
    with Live(console=console, screen=not args.once, auto_refresh=False) as live:
        while True:
            time.sleep(args.interval_s)
            now = {}
            for server in servers:
                now[server.url] = look(server.metrics())
            live.update(view(before, now), refresh=True)
            if args.once:
                break
            before = now
    for server in servers:
        with closing(server):
            pass
    return 0


@dataclass(slots=True)
class Look:
    """One server's metrics at one time: values by name (samples of one name added up), labels of the platform, buckets."""

    at: float
    values: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    platform: dict[str, str] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=lambda: defaultdict(dict))


def look(text: str) -> Look:
    """Read metrics in Prometheus' text form."""
    from prometheus_client.parser import text_string_to_metric_families

    found = Look(time.monotonic())
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "vllm:platform_info":
                found.platform = dict(sample.labels)
            elif sample.name.endswith("_bucket"):
                found.buckets[family.name][float(sample.labels["le"])] = sample.value
            else:
                found.values[sample.name] += sample.value
    return found


def rate(before: Look, now: Look, name: str) -> float:
    """Growth of a counter per second; a server that started again begins at 0."""
    grown = now.values[name] - before.values[name]
    return max(0.0, grown) / max(1e-9, now.at - before.at)


def quantile(before: Histogram, now: Histogram, share: float) -> float | None:
    """The bucket's bound below which ``share`` of the new observations are; None where there are none."""
    counts = {bound: value - before.get(bound, 0.0) for bound, value in now.items()}
    total = counts.get(float("inf"), 0.0)
    if total <= 0:
        return None
    return next(bound for bound, count in sorted(counts.items()) if count >= share * total)


def view(before: Mapping[str, Look], now: Mapping[str, Look]) -> RenderableType:
    """A table for each server."""
    from rich.console import Group

    return Group(*(_server(url, before[url], one) for url, one in now.items()))


def _server(url: str, before: Look, now: Look) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    facts = now.platform
    made = Table(title=f"{facts.get('model_name', '?')} at {url}", title_justify="left", show_header=False, expand=True)
    made.add_column(ratio=1)
    made.add_column(ratio=3)
    made.add_row("device", f"{facts.get('platform', '?')}: {facts.get('device', '?')}, {facts.get('architecture', '?')}")
    made.add_row("values", f"dtype {facts.get('dtype', '?')}, KV {facts.get('kv_dtype', '?')}, track {facts.get('track', '?')}")
    if "vllm:num_requests_running" not in now.values:
        made.add_row("engine", "is starting, or gone")
        return made
    values = now.values
    running, waiting = values["vllm:num_requests_running"], values["vllm:num_requests_waiting"]
    made.add_row(
        "requests", f"{running:.0f} running, {waiting:.0f} waiting, {values['vllm:num_preemptions_total']:.0f} preempted"
    )
    tokens = rate(before, now, "vllm:generation_tokens_total"), rate(before, now, "vllm:prompt_tokens_total")
    made.add_row("tokens/s", f"{tokens[0]:.1f} generated, {tokens[1]:.1f} of prompts")
    kv = values["vllm:kv_cache_usage_perc"]
    made.add_row("KV cache", ProgressBar(total=1.0, completed=kv, width=40))
    made.add_row("", f"{100 * kv:.1f} % in use, {_hits(before, now)} found in the prefix cache")
    for name, metric in _TIMES.items():
        made.add_row(name, _times(before.buckets[metric], now.buckets[metric]))
    return made


def _hits(before: Look, now: Look) -> str:
    queries = now.values["vllm:prefix_cache_queries_total"] - before.values["vllm:prefix_cache_queries_total"]
    hits = now.values["vllm:prefix_cache_hits_total"] - before.values["vllm:prefix_cache_hits_total"]
    return f"{100 * hits / queries:.0f} % of new prompts" if queries > 0 else "nothing new"


def _times(before: Histogram, now: Histogram) -> str:
    parts = []
    for share, name in ((0.5, "median"), (0.99, "99 %")):
        value = quantile(before, now, share)
        parts.append(f"{name} {'-' if value is None else f'up to {value:g} s'}")
    return ", ".join(parts)


def _listed() -> list[str]:
    from vllm_core.serve.registered import entries

    return [one.address for one in entries()]


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.05 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds of at least 0.05")
    return value
