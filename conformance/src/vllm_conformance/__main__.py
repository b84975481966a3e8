"""`python -m vllm_conformance ops|patches --platform NAME`; exit status 0: holds, 1: does not, 2: could not run."""

from __future__ import annotations

import argparse
import sys

from vllm_conformance.opcheck import SEEDS
from vllm_core.errors import VLLMCoreError


def main(arguments: list[str] | None = None) -> int:
    """Run one check and print its table."""
    parser = argparse.ArgumentParser(prog="python -m vllm_conformance", description="Checks of an installed platform.")
    commands = parser.add_subparsers(dest="check", required=True)
    ops = commands.add_parser("ops", help="offered ops against core's references")
    ops.add_argument("--seeds", type=int, default=len(SEEDS), help="cases per op, dtype and shape class")
    patches = commands.add_parser("patches", help="names of core and others that the plugin changed")
    patches.add_argument("--model", help="also generate with this model between the two looks")
    for command in (ops, patches):
        command.add_argument("--platform", required=True, help="name of an installed platform")
    options = parser.parse_args(arguments)
    try:
        return _ops(options.platform, options.seeds) if options.check == "ops" else _patches(options.platform, options.model)
    except VLLMCoreError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _ops(platform: str, seeds: int) -> int:
    from vllm_conformance import opcheck

    rows = list(opcheck.check_platform(opcheck.candidate_of(platform), range(seeds)))
    good = opcheck.passed(rows)
    sys.stdout.write(f"{opcheck.table(rows)}\nops of {platform}: {'PASS' if good else 'FAIL'}, {len(rows)} cases\n")
    return 0 if good else 1


def _patches(platform: str, model: str | None) -> int:
    from vllm_conformance import usage

    changes = usage.changes_by(platform, model)
    lines = [*map(str, changes), f"patches by {platform}: {len(changes)}"]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main())
