"""`vllm-core platforms list | explain MODEL | ops`: what is installed, what would be chosen, and why."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_core.cli.options import add_engine_options, engine_options

if TYPE_CHECKING:
    from vllm_core.registry.plan import Candidate, Failed

Subparsers = Any


def add_parser(subparsers: Subparsers) -> None:
    """Add `platforms` and its three commands."""
    parser = subparsers.add_parser("platforms", help="installed platforms, and which one a model takes")
    commands = parser.add_subparsers(dest="platforms_command", metavar="COMMAND", required=True)
    listing = commands.add_parser("list", help="installed platforms with their devices, and plugins that failed")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(func=run_list)
    explain = commands.add_parser("explain", help="the plan for a model, from its config alone, with every reason")
    explain.add_argument("model", metavar="MODEL", help="folder, GGUF file, repository name, or 'demo'")
    explain.add_argument("--json", action="store_true", help="print the plan as JSON")
    explain.add_argument("--probe", type=Path, metavar="FILE", help="plan for the machine that `doctor --json FILE` saved")
    add_engine_options(explain, leave_out={"model"})
    explain.set_defaults(func=run_explain)
    ops = commands.add_parser("ops", help="all ops, with the providers of each platform")
    ops.add_argument("--platform", help="platform or vendor; default: all")
    ops.set_defaults(func=run_ops)


def run_list(args: argparse.Namespace) -> int:
    """Print the platforms. Returns 0, or 1 if none has a device."""
    from vllm_core.registry.candidates import collect

    candidates, failed = collect(environ=os.environ)
    if args.json:
        _print_json(candidates, failed)
    else:
        _print_list(candidates, failed)
    return 0 if any(one.devices for one in candidates) else 1


def _print_json(candidates: list[Candidate], failed: list[Failed]) -> None:
    import msgspec

    from vllm_core.registry.snapshot import save_failure, save_platform

    data = {"platforms": [save_platform(one) for one in candidates], "failed": [save_failure(one) for one in failed]}
    print(msgspec.json.format(msgspec.json.encode(data, order="deterministic"), indent=2).decode())


def _print_list(candidates: list[Candidate], failed: list[Failed]) -> None:
    from rich.console import Console

    from vllm_core.registry.candidates import check_summary
    from vllm_core.registry.explain import table

    platforms = [
        (one.manifest.name, f"{one.distribution} {one.version}", one.manifest.vendor, one.manifest.support_level, device)
        for one in candidates
        for device in (
            [f"{d.id}: {d.name}, {d.architecture}, {d.memory_bytes / 2**30:.1f} GiB" for d in one.devices]
            or [f"none: {check_summary(one.checks)}"]
        )
    ]
    failures = [(one.key, one.stage, one.cause, one.fix) for one in failed]
    companions = [
        (one.manifest.name, other.name, other.versions, ", ".join(other.architectures), "no" if other.optional else "yes")
        for one in candidates
        for other in one.manifest.companions
    ]
    console = Console()
    console.print(table("Platforms", ("platform", "distribution", "vendor", "support", "device"), platforms))
    if companions:
        console.print(table("Made for", ("platform", "software", "versions", "architectures", "needed"), companions))
    if failures:
        console.print(table("Not usable", ("plugin", "stage", "cause", "fix"), failures))


def run_explain(args: argparse.Namespace) -> int:
    """Print the plan for a model. Raises VLLMCoreError with every reason if there is none."""
    from vllm_core.launch import blueprint
    from vllm_core.registry import explain

    plan = blueprint(engine_options(args), probe=args.probe).plan
    if args.json:
        print(explain.to_json(plan).decode())
        return 0
    from rich.console import Console

    Console().print(explain.to_tables(plan))
    return 0


def run_ops(args: argparse.Namespace) -> int:
    """Print every op with its providers. Raises UnknownPlatformError for a platform that is not there."""
    from rich.console import Console

    from vllm_core.api.ops import OPS
    from vllm_core.registry.asked import asked
    from vllm_core.registry.candidates import collect, requested
    from vllm_core.registry.explain import table

    name = requested(args.platform, os.environ)
    candidates, failed = collect(only=name, environ=os.environ)
    chosen = asked(name, candidates, failed)
    columns = [one.manifest.name for one in chosen]
    rows = [
        (
            spec.name,
            spec.family or "",
            ", ".join(spec.decomposition),
            *(", ".join(offer.provider for offer in one.offers if spec.name in offer.ops) for one in chosen),
        )
        for spec in OPS.values()
    ]
    Console().print(table("Ops and their providers", ("op", "family", "decomposition", *columns), rows))
    return 0
