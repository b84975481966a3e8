"""vllm-xpu's kernels by Intel's Triton to SPIR-V, and run on Intel's runtime for processors, each in an environment of its own.

python tools/intel_kernels.py [--required] [--all] [OPTION...]    options are those of pytest

Intel's Triton takes the place of Triton: an environment is made on top of this one that has it and the runtime (400 MB, of the
package index). Of what is run, CI takes the norms in float16; `--all` takes everything. Where the packages are not to be had in
time, that is said, and is an error with --required alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 180
TRITON = "triton-xpu==3.3.0b1"
RUNTIME = ("pyopencl==2026.1.4", "intel-opencl-rt==2026.2.0", "intel-cmplr-lib-rt==2026.2.0")
"""The last has libraries that the runtime loads and does not declare."""

TESTS = tuple(f"plugins/vllm-xpu/tests/test_kernels_{name}.py" for name in ("spirv", "executed"))


def environment_in(folder: Path) -> Path:
    """An environment above this one, without pip; its interpreter."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    below = sysconfig.get_paths()["purelib"]
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n", "utf-8")
    return python


def fetch(python: Path) -> str:
    """Install the packages; why they are not there, or nothing."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "--quiet"]
    for arguments in (["--pre", "--no-deps", TRITON], [*RUNTIME]):
        try:
            done = subprocess.run([*pip, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return f"nothing after {LIMIT_S} s"
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["pip failed"])[-1]
    return ""


def main(arguments: list[str]) -> int:
    """Return the exit status."""
    ours = {"--required", "--all"}
    options = [word for word in arguments if word not in ours]
    with tempfile.TemporaryDirectory(prefix="vllm-intel-") as name:
        python = environment_in(Path(name))
        problem = fetch(python)
        if problem:
            print(
                f"Intel's compiler and runtime are not to be had, kernels were not run on it: {', '.join((TRITON, *RUNTIME))}\n"
                f"  found:    {problem}\n  expected: a package index, within {LIMIT_S} s\n"
                "  fix:      nox -s xpu-kernels, where there is one"
            )
            return int("--required" in arguments)
        chosen = [] if "--all" in arguments else ["-k", "norms and float16"]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        return subprocess.call([str(python), "-m", "pytest", "-q", *TESTS, *chosen, *options], cwd=ROOT, env=environ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
