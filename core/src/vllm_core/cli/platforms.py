"""`vllm-core platforms list | explain MODEL | ops`: what is installed, what would be chosen, and why."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_core.registry.plan import Candidate, Failed

Subparsers = Any

_VALUES = {
    "platform": "platform or vendor; default: the best match",
    "dtype": "dtype of weights and activations",
    "kv-cache-dtype": "dtype of the KV cache",
    "block-size": "tokens per block; negotiated if not given",
    "max-model-len": "longest sequence",
    "model-impl": "model track: auto, agnostic or transformers",
    "runner": "auto, generate or pooling",
}
_FLAGS = {
    "strict": "no provider may be replaced in warm-up",
    "allow-fallback": "use the host when an accelerator is visible but cannot be used",
    "allow-host-ops": "run ops that nobody offers on the host",
    "enforce-eager": "never capture graphs",
}
_INTEGERS = ("block-size", "max-model-len")


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
    _add_options(explain)
    explain.set_defaults(func=run_explain)
    ops = commands.add_parser("ops", help="all ops, with the providers of each platform")
    ops.add_argument("--platform", help="platform or vendor; default: all")
    ops.set_defaults(func=run_ops)


def _add_options(parser: argparse.ArgumentParser) -> None:
    for name, text in _VALUES.items():
        kind = int if name in _INTEGERS else str
        parser.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, help=text)
    for name, text in _FLAGS.items():
        parser.add_argument(f"--{name}", action="store_true", default=argparse.SUPPRESS, help=text)
    repeated: dict[str, Any] = {"action": "append", "default": argparse.SUPPRESS}
    parser.add_argument("--device-ids", metavar="ID", nargs="+", default=argparse.SUPPRESS, help="ids of `platforms list`")
    parser.add_argument("--provider", metavar="OP=NAME", **repeated, help="force a provider; all=reference is the generic path")
    parser.add_argument("--deny-provider", metavar="NAME", **repeated, help="a provider that must not be chosen")


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options among the arguments. Raises ConfigError for a provider that is not OP=NAME."""
    names = [name.replace("-", "_") for name in (*_VALUES, *_FLAGS, "model", "device-ids", "deny-provider")]
    options = {name: getattr(args, name) for name in names if hasattr(args, name)}
    if hasattr(args, "provider"):
        options["provider"] = dict(_pair(text) for text in args.provider)
    return options


def _pair(text: str) -> tuple[str, str]:
    from vllm_core.errors import ConfigError

    op, _, name = text.partition("=")
    if not op or not name:
        fix = "for example --provider all=reference"
        raise ConfigError("Option has a wrong value", on="--provider", found=repr(text), expected="OP=NAME", fix=fix)
    return op, name


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
    console = Console()
    console.print(table("Platforms", ("platform", "distribution", "vendor", "support", "device"), platforms))
    if failures:
        console.print(table("Not usable", ("plugin", "stage", "cause", "fix"), failures))


def run_explain(args: argparse.Namespace) -> int:
    """Print the plan for a model. Raises VLLMCoreError with every reason if there is none."""
    from vllm_core.config import EngineConfig
    from vllm_core.launch import needs_of
    from vllm_core.registry import explain, select, snapshot
    from vllm_core.registry.candidates import collect

    needs = needs_of(EngineConfig.from_options(options_of(args)))
    if args.probe is not None:
        candidates, failed = snapshot.recompute(snapshot.read(args.probe), args.probe)
    else:
        candidates, failed = collect(only=needs.platform, environ=os.environ)
    plan = select.plan(needs, candidates, failed)
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
    from vllm_core.registry.candidates import collect, requested
    from vllm_core.registry.explain import table
    from vllm_core.registry.select import asked

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
