"""Calls of the vendors' own packages, against those packages: signatures, schemas, Meta kernels. No device is used.

python tools/vendors.py [--required] [OPTION...]    options are those of pytest

AITER, vllm-xpu-kernels and torch_npu (230 MB) come from the package index into a folder of their own, beside the environment:
one of them in it would be found by probes, and torch_npu makes `import torch` fail. Where they are not to be had in time, that
is said, and is an error with --required alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 180
READ = ("amd-aiter==0.1.7.post2.dev18", "vllm-xpu-kernels==0.1.16.2")
"""Packages whose sources and schemas are read where they are unpacked."""

LOADED = "torch-npu==2.13.0"
"""The package that is loaded, in a process of its own, from its wheel."""

TESTS = (
    "plugins/vllm-rocm/tests/test_aiter.py",
    "plugins/vllm-xpu/tests/test_xpu_kernels.py",
    "plugins/vllm-ascend/tests/test_vendor_calls.py",
    "simulator/tests/test_npu.py",
)


def fetch(folder: Path) -> str:
    """Bring the packages into ``folder``; why they are not there, or nothing."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    kept = ["--quiet", "--no-deps"]
    commands = (
        [*pip, "download", *kept, "--dest", str(folder), LOADED],
        [*pip, "install", *kept, "--pre", "--target", str(folder / "site"), *READ],
    )
    running = [subprocess.Popen(one, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for one in commands]
    try:
        said = [one.communicate(timeout=LIMIT_S)[0] for one in running]
    except subprocess.TimeoutExpired:
        return f"nothing after {LIMIT_S} s"
    finally:
        for one in running:
            one.kill()
    failed = [text for one, text in zip(running, said, strict=True) if one.returncode]
    return (failed[0].strip().splitlines() or ["pip failed"])[-1] if failed else ""


def environment_of(folder: Path) -> dict[str, str]:
    """What the tests look for."""
    (wheel,) = folder.glob("torch_npu-*.whl")
    paths = [str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCH_NPU_WHEEL": str(wheel)}


def main(arguments: list[str]) -> int:
    """Return the exit status."""
    required, options = "--required" in arguments, [word for word in arguments if word != "--required"]
    with tempfile.TemporaryDirectory(prefix="vllm-vendors-") as name:
        problem = fetch(Path(name))
        if problem:
            packages = ", ".join((*READ, LOADED))
            print(
                f"Vendors' packages are not to be had, their calls were not compared: {packages}\n"
                f"  found:    {problem}\n  expected: a package index, within {LIMIT_S} s\n"
                "  fix:      nox -s vendors, where there is one"
            )
            return int(required)
        command = [sys.executable, "-m", "pytest", "-q", *TESTS, *options]
        return subprocess.call(command, cwd=ROOT, env=environment_of(Path(name)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
