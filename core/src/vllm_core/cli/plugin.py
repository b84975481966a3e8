"""`vllm-core plugin new | check | diff-api`: for authors of hardware packages."""

from __future__ import annotations

import argparse
import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_core.authoring.check import Checked

Subparsers = Any
_INDENT = " " * 10


def add_parser(subparsers: Subparsers) -> None:
    """Add `plugin` and its commands."""
    parser = subparsers.add_parser("plugin", help="for authors of hardware packages")
    commands = parser.add_subparsers(dest="plugin_command", metavar="COMMAND", required=True)
    new = commands.add_parser("new", help="write a new distribution that installs and runs, for you to fill")
    new.add_argument("name", metavar="NAME", help="the platform's name; the distribution will be vllm-NAME")
    new.add_argument("--dir", type=Path, default=Path(), metavar="DIR", help="folder to write it in (default: this one)")
    new.set_defaults(func=run_new)
    check = commands.add_parser("check", help="level 0: all that can be said of a plugin without its hardware")
    target = "project folder, wheel, or an installed platform, distribution or distribution:entry_point; default: all installed"
    check.add_argument("target", nargs="?", default="", metavar="PATH|NAME", help=target)
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(func=run_check)
    diff = commands.add_parser("diff-api", help="what changed in the contract between two versions of vllm-core")
    for name, which in (("old", "A"), ("new", "B")):
        text = "a version like 0.1, 'current', or a folder or wheel of vllm-core"
        diff.add_argument(name, metavar=which, help=text)
    diff.add_argument("--json", action="store_true", help="print JSON")
    diff.set_defaults(func=run_diff)


def run_new(args: argparse.Namespace) -> int:
    """Write a distribution and say what comes next. Raises ConfigError."""
    from vllm_core.authoring.scaffold import write

    folder = write(args.name, args.dir)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        print(path.relative_to(folder.parent))
    print(f"\nnext: pip install -e {folder}")
    print(f"      vllm-core plugin check {folder}")
    print(f"      vllm-core generate --model demo --platform {args.name}")
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Print the findings on each distribution. Returns 1 if one failed. Raises UnknownPlatformError for an unknown name."""
    from vllm_core.authoring.check import check

    checked = check(args.target, os.environ)
    if args.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(checked), indent=2).decode())
    else:
        for one in checked:
            _print(one)
    return 0 if all(one.passed for one in checked) else 1


def _print(checked: Checked) -> None:
    print(checked.name)
    for one in checked.findings:
        print(textwrap.indent(str(one), _INDENT).replace(_INDENT, f"  {one.outcome:<8}", 1))
        if one.outcome == "skipped" and one.fix:
            print(textwrap.indent(f"to do: {one.fix}", _INDENT))
    failures = sum(one.outcome == "failed" for one in checked.findings)
    print(f"{checked.name}: {'PASS' if checked.passed else 'FAIL'}, {failures} failed")


def run_diff(args: argparse.Namespace) -> int:
    """Print what changed. Raises ConfigError for what cannot be described."""
    from vllm_core.authoring import diff

    changes = diff.compare(diff.describe(args.old), diff.describe(args.new))
    if args.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(changes), indent=2).decode())
        return 0
    from rich.console import Console

    from vllm_core.registry.explain import table

    rows = [(one.weight, one.on, one.old, one.new) for one in changes]
    Console().print(table(f"{args.old} -> {args.new}", ("", "what", args.old, args.new), rows))
    return 0
