"""Set up everything in an environment of its own, and run the main job or the tests.

    python3 run.py demo     environment, packages, demo model; then generates text and prints it
    python3 run.py test     environment, packages, test models; then runs the test suite

Needs Python 3.10 or newer and nothing else. The second run is fast. Anything after `--` goes to the command that is run.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - this file is what an old Python sees
    sys.exit(
        "Python is too old: {}\n  found:    {}.{}\n  expected: 3.10 or newer\n  fix:      python3.11 run.py ...".format(
            sys.executable, *sys.version_info[:2]
        )
    )

import argparse
import os
import shlex
import subprocess
from pathlib import Path

from tools.environment import Environment, SetupError, Step
from tools.torch_build import TorchChoice

ROOT = Path(__file__).resolve().parent
PROMPT = "Once upon a time, in a small town by the sea, there lived"
DEMO_MAX_TOKENS = 48


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split off what follows `--`, and read the rest."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=("demo", "test", "setup"), help="setup: the environment alone, with all tools")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where the environment is kept (default: .venv)")
    parser.add_argument("--torch-index", metavar="URL", help="package index to take torch from, e.g. one of CPU builds")
    parser.add_argument("--find-links", metavar="DIR", help="folder or page of wheels to prefer")
    parser.add_argument(
        "--yes-accelerator-torch", action="store_true", help="download an accelerator build of torch if need be"
    )
    return parser.parse_args(arguments[:split]), arguments[split + 1 :]


def demo(environment: Environment, extra: list[str]) -> int:
    """Generate text with the demo model."""
    with Step("demo model"):
        environment.run_tool("fetch_models.py", "demo")
    command = [str(environment.script("vllm-core")), "generate", "--model", "demo"]
    command += extra or ["--prompt", PROMPT, "--max-tokens", str(DEMO_MAX_TOKENS), "--temperature", "0"]
    print("$", shlex.join(command), flush=True)
    return subprocess.call(command, cwd=ROOT)


def test(environment: Environment, extra: list[str]) -> int:
    """Run the tests of all packages that need no more than minutes."""
    with Step("test models"):
        environment.run_tool("fetch_models.py", "all")
    workers = str(min(os.cpu_count() or 1, 4))
    command = [str(environment.python), "-m", "pytest", "-n", workers, "--dist", "worksteal", "-q"]
    command += extra or ["-m", "not slow"]
    print("$", shlex.join(command), flush=True)
    # One thread a worker: the workers together fill the machine.
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.call(command, cwd=ROOT, env={**os.environ, **threads})


def main(arguments: list[str]) -> int:
    """Return the exit status: that of the job, or 2 when the environment cannot be made."""
    options, extra = parse(arguments)
    choice = TorchChoice(options.torch_index, options.find_links, options.yes_accelerator_torch)
    try:
        environment = Environment(ROOT, options.venv.resolve(), choice)
        environment.prepare(groups={"demo": (), "test": ("test",), "setup": ("test", "lint")}[options.job])
        jobs = {"demo": demo, "test": test}
        return jobs[options.job](environment, extra) if options.job in jobs else 0
    except SetupError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
