"""What starting costs: module lists and times of `import vllm_core` and `--help`, and the time to a first token.

    python bench/startup.py [--runs 7] [--model demo] [--out FILE]

Each figure is a whole process, run after one that is not counted; medians with the range.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

HEAVY = ("torch", "pydantic", "transformers", "numpy", "fastapi", "tokenizers")
IMPORT = "import vllm_core"
HELP = "import sys; from vllm_core.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass"


def modules(code: str) -> list[str]:
    """Names of the modules that a fresh interpreter has after ``code``, less those it starts with."""
    probe = (
        f"import sys; before = set(sys.modules)\n{code}\nprint('\\n'.join(sorted(set(sys.modules) - before)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return done.stderr.split()


def seconds(command: list[str], runs: int) -> list[float]:
    """Wall times of whole processes, sorted."""
    times = []
    for run in range(runs + 1):
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if run:
            times.append(time.perf_counter() - started)
    return sorted(times)


def first_token(model: str, runs: int) -> list[float]:
    """From the start of `vllm-core generate` to the first byte of text on its output."""
    command = [sys.executable, "-m", "vllm_core.cli.main", "generate", "--model", model]
    command += ["--prompt", "The capital of France is", "--max-tokens", "2", "--temperature", "0"]
    times = []
    for run in range(runs + 1):
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None, "the pipe was asked for"
            process.stdout.read(1)
            if run:
                times.append(time.perf_counter() - started)
            process.stdout.read()
    return sorted(times)


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    figures: dict[str, object] = {"python": platform.python_version(), "machine": platform.machine()}
    for name, code in (("import vllm_core", IMPORT), ("vllm-core --help", HELP)):
        loaded = modules(code)
        heavy = sorted(set(HEAVY) & set(loaded))
        times = seconds([sys.executable, "-c", code], args.runs)
        figures[name] = {"modules": len(loaded), "heavy": heavy, "seconds": times}
        print(f"{name}: {len(loaded)} modules, heavy: {heavy or 'none'}; ", end="")
        print(f"{statistics.median(times):.3f} s ({times[0]:.3f}-{times[-1]:.3f})")
    bare = seconds([sys.executable, "-c", ""], args.runs)
    print(f"bare interpreter: {statistics.median(bare):.3f} s")
    times = first_token(args.model, args.runs)
    figures["bare interpreter"], figures["first token"] = bare, times
    print(f"generate --model {args.model}, first token: {statistics.median(times):.2f} s ({times[0]:.2f}-{times[-1]:.2f})")
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
