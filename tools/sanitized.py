"""Run the tests of native kernels on a library that was built with the address and undefined-behaviour sanitizers.

    python tools/sanitized.py BUILD/libvllm_cpu_ops.so [PYTEST OPTION ...]

The address sanitizer has to be loaded before the interpreter's own allocations, so the tests run in a child that preloads
it. Leaks are not looked for: an interpreter leaves much behind. The first finding ends the run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "plugins" / "vllm-cpu" / "tests"
WITHOUT = ("test_native_absent.py", "test_native_elsewhere.py")
"""They are about libraries that are not there, and about one of another machine."""


def runtime(library: Path, name: str) -> str:
    """Path of a sanitizer's runtime that ``library`` was linked to."""
    for line in subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=True).stdout.splitlines():
        if f"lib{name}." in line:
            return line.split("=>")[1].split("(")[0].strip()
    sys.exit(f"{library} was not built with lib{name}: configure with -DVLLM_SANITIZE=ON")


def main(arguments: list[str]) -> int:
    """The status of the tests."""
    library = Path(arguments[0]).resolve()
    tests = [str(path) for path in sorted(FOLDER.glob("test_native_*.py")) if path.name not in WITHOUT]
    environ = os.environ | {
        "LD_PRELOAD": f"{runtime(library, 'asan')} {runtime(library, 'ubsan')}",
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "VLLM_CORE_OPS_PATH": str(library),
        # So that each tensor is an allocation of its own, with a zone around it that may not be touched.
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests, *arguments[1:]]
    return subprocess.run(command, env=environ, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
