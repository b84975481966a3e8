"""`vllm-core ps`: the servers of this user on this machine."""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_core.serve.registered import Entry


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("ps", help="servers that run here", description="This user's servers on this machine.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print them; 0 also where there is none."""
    from vllm_core.serve.registered import entries

    found = [(one, _state(one)) for one in entries()]
    if args.json:
        import json

        import msgspec

        print(json.dumps([{**msgspec.to_builtins(one), "state": state} for one, state in found], indent=2))
        return 0
    from rich.console import Console

    from vllm_core.registry.explain import table

    rows = [
        (str(one.pid), one.address, ", ".join(one.models), _platform(one), _age(time.time() - one.started), state)
        for one, state in found
    ]
    Console().print(table("Servers", ("pid", "address", "model", "platform", "up", "state"), rows))
    return 0


def _state(one: Entry) -> str:
    from vllm_core.client import Server
    from vllm_core.errors import VLLMCoreError

    with closing(Server(one.address)) as server:
        try:
            return server.state()
        except VLLMCoreError as error:
            return f"no answer: {error.found}"


def _platform(one: Entry) -> str:
    return f"{one.platform.get('platform', '?')}: {one.platform.get('device', '?')}"


def _age(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
