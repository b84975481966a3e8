"""`python -m vllm_simulator --pose npu -- COMMAND`: run a command on a simulated machine."""

from __future__ import annotations

import argparse
import os
import sys

from vllm_simulator.activation import environment
from vllm_simulator.chips import CHIPS, POSES
from vllm_simulator.settings import Settings


def main(arguments: list[str]) -> None:
    """Replace this process by the command. Raises SystemExit for wrong settings."""
    parser = argparse.ArgumentParser(prog="python -m vllm_simulator", description=__doc__)
    parser.add_argument("--pose", required=True, choices=POSES)
    parser.add_argument("--chip", default="", help=f"one of {', '.join(CHIPS)}")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--memory-mib", type=int, default=2048, help="memory of each device")
    parser.add_argument("--fail", default="", help="oom:N, lost:N, lost:OP, hang:N, crash:N; several with commas")
    parser.add_argument("--blocking", action="store_true", help="run each launch at once")
    parser.add_argument("--interpret", action="store_true", help="run Triton's kernels, in Triton's interpreter")
    parser.add_argument("command", nargs="+", help="after --")
    options = vars(parser.parse_args(arguments))
    command = options.pop("command")
    try:
        environ = environment(Settings(**options))
    except ValueError as error:
        parser.error(str(error))
    os.execvpe(command[0], command, environ)


if __name__ == "__main__":
    main(sys.argv[1:])
