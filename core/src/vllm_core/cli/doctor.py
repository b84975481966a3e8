"""`vllm-core doctor`: what keeps a device from being used, step by step, each with outcome and fix."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_core.registry.snapshot import Snapshot

Subparsers = Any
_MARKS = {"ok": "ok", "failed": "FAILED", "skipped": "-"}


def add_parser(subparsers: Subparsers) -> None:
    """Add `doctor`."""
    parser = subparsers.add_parser("doctor", help="check torch, drivers, devices, plugins and libraries, each with a fix")
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="save everything for `platforms explain --probe`; - or nothing: print it",
    )
    parser.add_argument("--redact", action="store_true", help="leave out host name, home folder and UUIDs")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print or save the findings. Returns 1 if no platform has a device."""
    from vllm_core.registry.doctor import examine
    from vllm_core.registry.snapshot import encode, redacted

    snapshot = examine(os.environ)
    if args.json == "-":
        sys.stdout.write(encode(snapshot, redact=args.redact).decode() + "\n")
    elif args.json is not None:
        _save(Path(args.json), encode(snapshot, redact=args.redact))
    else:
        _print(redacted(snapshot) if args.redact else snapshot)
    return 0 if any(one.devices for one in snapshot.platforms) else 1


def _save(path: Path, data: bytes) -> None:
    from vllm_core.errors import ConfigError
    from vllm_core.registry.cache import write_atomic

    try:
        write_atomic(path, data)
    except OSError as error:
        found, fix = str(error), "name a file in a folder that may be written"
        raise ConfigError("File cannot be written", on=str(path), found=found, expected="a writable path", fix=fix) from error


def _print(snapshot: Snapshot) -> None:
    from rich.console import Console

    from vllm_core.registry.explain import table

    console = Console()
    for step, checks in snapshot.steps.items():
        rows = [(_MARKS[check.outcome], check.name, check.detail, check.hint) for check in checks]
        console.print(table(step, ("", "check", "found", "fix"), rows))
