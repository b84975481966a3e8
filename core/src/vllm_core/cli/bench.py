"""`vllm-core bench`: what the engine itself costs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vllm_core.cli import bench_engine, bench_serve

MAX_STEPS = 600
"""Steps are measured three times over, and no sequence of the null model may end meanwhile."""

GRID = "1:10,64:10,256:10,1024:10,1:100000,256:100000"


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("bench", help="measure the engine")
    kinds = parser.add_subparsers(dest="kind", required=True)
    host = kinds.add_parser("host", help="host time per step, with a model that computes nothing")
    host.add_argument("--grid", type=_grid, default=GRID, help="running:waiting pairs (default: %(default)s)")
    host.add_argument("--steps", type=_steps, default=300, help=f"steps timed, 1 to {MAX_STEPS} (default: %(default)s)")
    host.add_argument("--platform", help="platform to measure")
    host.add_argument("--out", type=Path, help="write the rows as JSON")
    host.set_defaults(func=run_host)
    bench_serve.add_parser(kinds)
    bench_engine.add_parsers(kinds)


def run_host(args: argparse.Namespace) -> int:
    """Run `bench host`."""
    from vllm_core.bench import host

    options = {"platform": args.platform} if args.platform else {}
    host.run(args.grid, args.steps, args.out, **options)
    return 0


def _grid(text: str) -> list[tuple[int, int]]:
    pairs = [pair.split(":") for pair in text.split(",")]
    if not all(len(pair) == 2 and all(part.isdecimal() for part in pair) and int(pair[0]) for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r}, where RUNNING:WAITING,... with at least one running is expected")
    return [(int(running), int(waiting)) for running, waiting in pairs]


def _steps(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= MAX_STEPS:
        raise argparse.ArgumentTypeError(f"{text!r}, where 1 to {MAX_STEPS} is expected")
    return int(text)
