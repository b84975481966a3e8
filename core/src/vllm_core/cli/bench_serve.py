"""`vllm-core bench serve`: load on a running server."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_core.cli.argument_types import count, positive

if TYPE_CHECKING:
    from vllm_core.bench.serve import Answer, Load

_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}


def add_parser(kinds: Any) -> None:
    """Add the command to `bench`."""
    parser = kinds.add_parser("serve", help="load on a running server: throughput and latencies")
    section = parser.add_argument_group("Where")
    section.add_argument("--base-url", metavar="URL", help="address of the server (default: --host and --port)")
    section.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    section.add_argument("--port", type=count, default=8000, metavar="N", help="default: %(default)s")
    section.add_argument("--endpoint", default="/v1/completions", metavar="PATH", help="or /v1/chat/completions")
    section.add_argument("--model", metavar="NAME", help="name to ask for (default: the first that is served)")
    section.add_argument("--api-key", metavar="KEY", help="or VLLM_CORE_API_KEY")
    _add_load(parser.add_argument_group("What is sent"))
    section = parser.add_argument_group("What comes back")
    section.add_argument(
        "--percentile-metrics", type=_metrics, default="ttft,tpot,itl,e2el", metavar="LIST", help="shown: %(default)s"
    )
    section.add_argument("--metric-percentiles", type=_percentiles, default="99", metavar="LIST", help="default: %(default)s")
    section.add_argument(
        "--goodput", nargs="+", type=_goal, default=[], metavar="NAME:MS", help="count what meets these, such as ttft:200"
    )
    section.add_argument("--save-result", action="store_true", help="write the result as JSON")
    section.add_argument("--save-detailed", action="store_true", help="with the numbers of each request")
    section.add_argument("--result-dir", type=Path, default=Path(), metavar="FOLDER", help="default: this folder")
    section.add_argument("--result-filename", metavar="NAME", help="default: made of rate, model and date")
    section.add_argument("--disable-tqdm", action="store_true", help="no figures while it runs")
    parser.set_defaults(func=run)


def _add_load(section: argparse._ArgumentGroup) -> None:
    section.add_argument("--num-prompts", type=positive, default=100, metavar="N", help="requests (default: %(default)s)")
    section.add_argument(
        "--request-rate", type=_rate, default=math.inf, metavar="N", help="requests per second; inf: all at once (the default)"
    )
    section.add_argument(
        "--burstiness", type=_above_0, default=1.0, metavar="N", help="1: Poisson; below 1 more bursts, above 1 more even"
    )
    section.add_argument("--max-concurrency", type=positive, metavar="N", help="most requests at once (default: no limit)")
    section.add_argument(
        "--dataset-name", choices=("random",), default="random", help="token ids drawn at random (the only one here)"
    )
    for name, default, text in (
        ("input-len", 128, "tokens of a prompt"),
        ("output-len", 64, "tokens to generate"),
        ("prefix-len", 0, "tokens that all prompts share, before the others"),
    ):
        section.add_argument(
            f"--random-{name}", type=count, default=default, metavar="N", help=f"{text} (default: %(default)s)"
        )
    section.add_argument(
        "--random-range-ratio", type=_share, default=0.0, metavar="R", help="lengths are within 1-R and 1+R of these"
    )
    section.add_argument(
        "--random-vocabulary", type=positive, default=250, metavar="N", help="token ids below this (default: %(default)s)"
    )
    section.add_argument("--temperature", type=float, default=0.0, metavar="N", help="default: greedy")
    section.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="go on after end tokens (default: on)"
    )
    section.add_argument("--seed", type=count, default=0, metavar="N", help="of prompts and arrivals (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Send the load, print the figures; 1 where a request failed. Raises ConfigError."""
    import asyncio

    from vllm_core.bench import serve

    load = serve.Load(
        base_url=args.base_url or f"http://{args.host}:{args.port}",
        endpoint=args.endpoint,
        model=args.model,
        api_key=args.api_key or os.environ.get("VLLM_CORE_API_KEY"),
        num_prompts=args.num_prompts,
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        max_concurrency=args.max_concurrency,
        input_len=args.random_input_len,
        output_len=args.random_output_len,
        range_ratio=args.random_range_ratio,
        prefix_len=args.random_prefix_len,
        vocabulary=args.random_vocabulary,
        ignore_eos=args.ignore_eos,
        temperature=args.temperature,
        seed=args.seed,
        percentiles=args.metric_percentiles,
        goodput=dict(args.goodput),
    )
    shown = not args.disable_tqdm and sys.stderr.isatty()
    found = asyncio.run(serve.run(load, _watch(load) if shown else None))
    _print(found, args.percentile_metrics, load)
    if args.save_result or args.result_filename:
        model = str(found["model_id"]).replace("/", "-")
        name = args.result_filename or f"openai-{found['request_rate']}qps-{model}-{found['date']}.json"
        path = args.result_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        serve.save(found, path, detailed=args.save_detailed)
        print(f"written: {path}")
    for error in sorted({one for one in found["details"]["errors"] if one})[:5]:
        print(f"failed: {error}", file=sys.stderr)
    return 1 if found["failed"] else 0


def _watch(load: Load) -> Any:
    """Percentiles so far, on one line, twice a second at most."""
    import time

    from vllm_core.bench.serve import percentile

    last = 0.0

    def show(answers: list[Answer]) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last < 0.5 and len(answers) < load.num_prompts:
            return
        last = now
        good = [one for one in answers if not one.error]
        times = {
            "TTFT": sorted(one.ttft for one in good),
            "ITL": sorted(gap for one in good[-200:] for gap in one.itl),
            "E2E": sorted(one.latency for one in good),
        }
        parts = [
            f"{name} {1000 * percentile(values, 50):.0f}/{1000 * percentile(values, 99):.0f} ms"
            for name, values in times.items()
        ]
        end = "\n" if len(answers) == load.num_prompts else ""
        print(f"\r{len(answers)}/{load.num_prompts}  {'  '.join(parts)} (median/99 %)  ", end=end, file=sys.stderr, flush=True)

    return show


def _print(found: dict[str, Any], metrics: tuple[str, ...], load: Load) -> None:
    from rich.console import Console

    from vllm_core.registry.explain import table

    rows = [
        ("completed, failed", f"{found['completed']}, {found['failed']}"),
        ("duration", f"{found['duration']:.2f} s"),
        ("requests per second", f"{found['request_throughput']:.2f}"),
        ("output tokens per second", f"{found['output_throughput']:.1f}"),
        ("all tokens per second", f"{found['total_token_throughput']:.1f}"),
        ("most requests at once", str(found["max_concurrent_requests"])),
    ]
    if found["request_goodput"] is not None:
        rows.append(("good requests per second", f"{found['request_goodput']:.2f}"))
    console = Console()
    console.print(table(f"{found['model_id']} at {load.base_url}", ("", ""), rows))
    shares = [f"p{share:g}" for share in load.percentiles]
    heads = ("milliseconds", "mean", "median", *shares)
    times = [
        (_TITLES[name], *(f"{found[f'{kind}_{name}_ms']:.2f}" for kind in ("mean", "median", *shares))) for name in metrics
    ]
    console.print(table("Latency", heads, times))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _rate(text: str) -> float:
    if not _number(text) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate above 0, and not inf")
    return _number(text)


def _above_0(text: str) -> float:
    if not 0 < _number(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return _number(text)


def _share(text: str) -> float:
    if not 0 <= _number(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not in [0, 1)")
    return _number(text)


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(_TITLES):
        raise argparse.ArgumentTypeError(f"{text!r} holds something else than {', '.join(_TITLES)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    shares = tuple(_number(part) for part in text.split(","))
    if not all(0 <= share <= 100 for share in shares):
        raise argparse.ArgumentTypeError(f"{text!r}, where numbers from 0 to 100 are expected")
    return shares


def _goal(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in ("ttft", "tpot", "e2el") or not _number(limit) > 0:
        raise argparse.ArgumentTypeError(f"{text!r}, where ttft:MS, tpot:MS or e2el:MS is expected")
    return name, _number(limit)
