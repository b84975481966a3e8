"""What platforms claim, proved by the conformance suite; of several platforms two at once, each with a core to itself.

python tools/claims.py PLATFORM... [OPTION...]    options are those of `vllm-core conformance run`, the same for all

Platforms whose hardware is not here run on two simulated devices, levels 0 to 3: above that the suite wants a server on one, or
its speed. What each run said is printed when it has ended, with the time it took; reports go to conformance-report/PLATFORM.
The exit status is 1 where one failed. Give those that take longest first.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
AT_ONCE = 2
SIMULATED = {"ascend": "npu", "rocm": "hip", "xpu": "xpu"}
"""Platforms whose hardware is not here, and what poses as it."""
KERNELS = {"rocm": ("vllm-rocm", "vllm-rocm-gather"), "xpu": ("vllm-xpu", "vllm-xpu-gather")}
"""Providers whose kernels nothing but Triton's interpreter could run there: an engine on them takes minutes a token."""

SIDE_BY_SIDE = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "VLLM_CORE_PROBE_TIMEOUT_S": "120"}
"""A probe imports torch, which takes long where much else runs."""


def command(platform: str, options: list[str]) -> list[str]:
    """The run of one platform, of the commands that lie beside this interpreter."""
    suite = [str(Path(sys.executable).with_name("vllm-core")), "conformance", "run", "--platform", platform]
    out = ["--out", f"conformance-report/{platform}"]
    if platform not in SIMULATED:
        return [*suite, *out, *options]
    machine = [sys.executable, "-m", "vllm_simulator", "--pose", SIMULATED[platform], "--devices", "2", "--"]
    denied = [word for name in KERNELS.get(platform, ()) for word in ("--deny-provider", name)]
    return [*machine, *suite, "--level", "3", *out, *denied, *options]


def run(platform: str, options: list[str]) -> tuple[int, str, float]:
    """Exit status, what was said, and the seconds it took."""
    began, environ = time.monotonic(), {**SIDE_BY_SIDE, **os.environ}
    done = subprocess.run(
        command(platform, options),
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, time.monotonic() - began


def main(arguments: list[str]) -> int:
    """Return the exit status."""
    first = next((index for index, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    platforms, options = arguments[:first], arguments[first:]
    if not platforms:
        sys.exit(__doc__)
    # A run of its own fills two cores but for the cases that are run alone.
    options = ["--jobs", "1", *options] if len(platforms) > 1 else options
    failed = False
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = {pool.submit(run, platform, options): platform for platform in platforms}
        for ended in as_completed(runs):
            status, said, seconds = ended.result()
            print(said, end="")
            print(f"{runs[ended]}: exit status {status} after {seconds:.0f} s", flush=True)
            failed = failed or status != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
