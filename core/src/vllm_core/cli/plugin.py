"""`vllm-core plugin check [NAME]`: everything that core asks of a plugin, checked afresh, for its author."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_core.registry.discover import Found

Subparsers = Any


def add_parser(subparsers: Subparsers) -> None:
    """Add `plugin`."""
    parser = subparsers.add_parser("plugin", help="for authors of hardware packages")
    commands = parser.add_subparsers(dest="plugin_command", metavar="COMMAND", required=True)
    check = commands.add_parser("check", help="import, hooks, manifest, claims, probe and offers of installed plugins")
    check.add_argument(
        "name", nargs="?", metavar="NAME", help="platform, distribution or distribution:entry_point; default: all"
    )
    check.set_defaults(func=run_check)


def run_check(args: argparse.Namespace) -> int:
    """Print the checks of each plugin. Returns 1 if one failed. Raises UnknownPlatformError for an unknown name."""
    from rich.console import Console

    from vllm_core.registry.check import check_plugin
    from vllm_core.registry.explain import table

    console, status = Console(), 0
    for found in _named(args.name):
        checks = check_plugin(found, os.environ)
        status |= int(any(check.outcome == "failed" for check in checks))
        rows = [(check.outcome, check.name, check.detail, check.hint) for check in checks]
        console.print(table(f"{found.key} {found.version}", ("", "check", "found", "fix"), rows))
    return status


def _named(name: str | None) -> list[Found]:
    from vllm_core.api import ENTRY_POINT_GROUP
    from vllm_core.errors import UnknownPlatformError, nearest
    from vllm_core.registry.discover import find

    found = find()
    named = [one for one in found if name is None or one.answers_to(name)]
    if not named:
        raise UnknownPlatformError(
            "Unknown plugin" if name else "No plugin is installed",
            on=name or ENTRY_POINT_GROUP,
            found="no entry point has this name" if name else "no entry point",
            expected=f"an installed plugin of the group {ENTRY_POINT_GROUP}",
            fix=nearest(name or "", {one.entry_point for one in found}),
        )
    return named
