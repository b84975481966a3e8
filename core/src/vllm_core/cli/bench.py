"""`vllm-core bench`: what the engine itself costs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

GRID = "1:10,64:10,256:10,1024:10,1:100000,256:100000"


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("bench", help="measure the engine")
    kinds = parser.add_subparsers(dest="kind", required=True)
    host = kinds.add_parser("host", help="host time per step, with a model that computes nothing")
    host.add_argument("--grid", default=GRID, help="running:waiting pairs (default: %(default)s)")
    host.add_argument("--steps", type=int, default=300, help="steps timed for each pair (default: %(default)s)")
    host.add_argument("--platform", help="platform to measure")
    host.add_argument("--out", type=Path, help="write the rows as JSON")
    host.set_defaults(func=run_host)


def run_host(args: argparse.Namespace) -> int:
    """Run `bench host`."""
    from vllm_core.bench import host

    pairs = [tuple(map(int, pair.split(":"))) for pair in args.grid.split(",")]
    options = {"platform": args.platform} if args.platform else {}
    host.run([(running, waiting) for running, waiting in pairs], args.steps, args.out, **options)
    return 0
