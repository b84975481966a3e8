"""Install one built distribution into a new environment with only what it declares, and use its front door.

python tools/clean_install.py core      after `python tools/wheels.py build`
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.wheels import ROOT, Package, choose, packages

# Run outside the checkout, so that only the installed files can be found.
_CHECKS = {
    "vllm-core": ("import vllm_core, vllm_core.launch; vllm_core.LLM", ("vllm-core", "--help")),
    "vllm-conformance": ("import vllm_conformance.run, vllm_conformance.patches", ("vllm-core", "conformance", "--help")),
    "vllm-toy": ("import vllm_toy.plugin", ("vllm-core", "platforms", "list")),
    "vllm-toy-static": ("import vllm_toy_static.plugin", ("vllm-core", "platforms", "list")),
    "vllm-triton": ("import vllm_triton.offers, vllm_triton.portable", ("vllm-core", "platforms", "list")),
    "vllm-cuda": ("import vllm_cuda.plugin", ("vllm-core", "platforms", "list")),
    "vllm-rocm": ("import vllm_rocm.plugin", ("vllm-core", "platforms", "list")),
    "vllm-ascend": ("import vllm_ascend.plugin", ("vllm-core", "platforms", "list")),
    "vllm-simulator": ("import vllm_simulator", ("python", "-m", "vllm_simulator", "--help")),
    "vllm-xpu": ("import vllm_xpu.plugin", ("vllm-core", "platforms", "list")),
    "vllm-cpu": ("import vllm_cpu.plugin", ("vllm-core", "platforms", "list")),
}


def wheel_of(package: Package) -> str:
    """The built wheel. Raises SystemExit if there is none."""
    found = sorted((ROOT / "dist").glob(f"{package.module}-*.whl"))
    if not found:
        raise SystemExit(f"No wheel of {package.name} in dist/\n  fix: python tools/wheels.py build {package.short}")
    return str(found[-1])


def main(name: str) -> None:
    """Raises SystemExit or CalledProcessError if the distribution is not whole."""
    package = choose([name])[0]
    known = packages()
    wheels = [wheel_of(known[need]) for need in package.needs] + [wheel_of(package)]
    with tempfile.TemporaryDirectory() as folder:
        venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
        python = Path(folder) / "bin" / "python"
        pip = next((ROOT / "tools" / "bootstrap").glob("pip-*.whl")) / "pip"
        run([python, pip, "install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt", *wheels], folder)
        run([python, pip, "check"], folder)
        code, command = _CHECKS[package.name]
        run([python, "-c", code], folder)
        if command is not None:
            run([Path(folder) / "bin" / command[0], *command[1:]], folder)
    print(f"{package.name}: installs alone and works")


def run(command: list[str | Path], folder: str) -> None:
    """Run in `folder`; its output is shown only when it fails."""
    result = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode:
        print(result.stdout, result.stderr, file=sys.stderr)
        raise SystemExit(f"failed: {' '.join(map(str, command))}")


if __name__ == "__main__":
    main(*sys.argv[1:])
