"""Make an environment of our own and install the packages of this checkout into it.

Uses the standard library alone. System packages are never touched, so a system Python that refuses pip (PEP 668) does
not matter; pip comes from the wheel in `tools/bootstrap`, so neither does a missing `ensurepip`. Where pip looks for
packages is the machine's own configuration.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tools import compiler_cache
from tools.torch_build import TorchChoice, accelerator_part, describe_size, resolve

PACKAGES = (
    "core",
    "plugins/vllm-cpu",
    "plugins/vllm-triton",
    "plugins/vllm-cuda",
    "plugins/vllm-rocm",
    "plugins/vllm-xpu",
    "plugins/vllm-ascend",
    "simulator",
    "conformance",
)
STAMP = "installed-groups"


class SetupError(Exception):
    """The environment cannot be made; the message has the four parts of every error here."""

    def __init__(self, what: str, *, on: object, found: str, expected: str, fix: str) -> None:
        super().__init__(f"{what}: {on}\n  found:    {found}\n  expected: {expected}\n  fix:      {fix}")


class Step:
    """Prints what is done, and how long it took."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        print(f"[ .... ] {self.name}", flush=True)
        self.start = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        mark = "done" if kind is None else "FAIL"
        print(f"[ {mark} ] {self.name} ({time.monotonic() - self.start:.1f} s)", flush=True)


class Environment:
    """A virtual environment at `folder` for the checkout at `root`."""

    def __init__(self, root: Path, folder: Path, torch: TorchChoice) -> None:
        self.root, self.folder, self.torch = root, folder, torch

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.script("python")

    def script(self, name: str) -> Path:
        """One of its commands."""
        return self.folder / ("Scripts" if os.name == "nt" else "bin") / (name + (".exe" if os.name == "nt" else ""))

    def prepare(self, groups: tuple[str, ...]) -> None:
        """Create and fill it; nothing is done for what is already there. Raises SetupError."""
        stamp = self.folder / STAMP
        done = stamp.read_text().split() if stamp.is_file() else [""]
        groups = tuple(sorted({*groups, *done[1:]}))
        wanted = " ".join([self._fingerprint(), *groups])
        if self._usable() and done == wanted.split():
            print(f"[ done ] environment {self.folder} is up to date", flush=True)
            return
        if not self._usable():
            with Step(f"environment {self.folder} (Python {sys.version_info[0]}.{sys.version_info[1]})"):
                self._create()
        with Step("torch"):
            self._install_torch()
        tools = [argument for group in groups for argument in ("--group", f"{self.root / 'pyproject.toml'}:{group}")]
        if tools:
            with Step(f"tools, groups {', '.join(groups)}"):
                self._pip("install", *self._constraints(), *tools)
        with Step("packages of this checkout"):
            chosen = [argument for package in self._packages(groups) for argument in ("-e", str(self.root / package))]
            self._pip("install", *self._constraints(), *chosen, environ=compiler_cache.variables(self.python.parent))
        stamp.write_text(wanted)

    def run_tool(self, name: str, *arguments: str) -> None:
        """Run a script of `tools/` in the environment. Raises SetupError if it fails."""
        self._call([str(self.python), str(self.root / "tools" / name), *arguments], "the tool failed, see above")

    def _packages(self, groups: tuple[str, ...]) -> tuple[str, ...]:
        return PACKAGES if groups else PACKAGES[:2]

    def _constraints(self) -> list[str]:
        return ["-c", str(self.root / "constraints.txt"), *self.torch.pip_options()]

    def _fingerprint(self) -> str:
        inputs = [self.root / name for name in ("constraints.txt", "pyproject.toml")]
        inputs += [self.root / package / "pyproject.toml" for package in PACKAGES]
        digest = hashlib.sha256(repr(self.root).encode())
        for path in inputs:
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def _usable(self) -> bool:
        if not self.python.exists():
            return False
        return subprocess.run([str(self.python), "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0

    def _create(self) -> None:
        try:
            import venv
        except ImportError as error:
            raise SetupError(
                "This Python cannot make virtual environments",
                on=sys.executable,
                found=str(error),
                expected="the module `venv` of Python's standard library",
                fix="install the full Python of your system (Debian and Ubuntu: apt install python3-venv), then run this again",
            ) from error
        venv.EnvBuilder(with_pip=False, clear=True, symlinks=os.name != "nt").create(self.folder)
        wheels = self.root / "tools" / "bootstrap"
        pip = next(wheels.glob("pip-*.whl"))
        install = ["install", "--quiet", "--no-index", "--find-links", str(wheels), "pip"]
        self._call([str(self.python), str(pip / "pip"), *install], "pip could not be installed from its wheel")

    def _install_torch(self) -> None:
        probe = [str(self.python), "-c", "import torch; print(torch.__version__)"]
        present = subprocess.run(probe, capture_output=True, text=True, check=False)
        pinned = next(line for line in (self.root / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
        if present.returncode == 0 and present.stdout.strip().split("+")[0] == pinned.removeprefix("torch=="):
            return
        if not self.torch.accept_accelerator:
            self._refuse_accelerator(pinned)
        self._pip("install", *self._constraints(), pinned)

    def _refuse_accelerator(self, pinned: str) -> None:
        try:
            downloads = resolve(self.python, pinned, self._constraints())
        except subprocess.CalledProcessError as error:
            raise SetupError(
                "pip finds no torch for this Python",
                on=f"{pinned}, Python {sys.version_info[0]}.{sys.version_info[1]}",
                found=error.stderr.strip().splitlines()[-1] if error.stderr.strip() else "no message",
                expected="a wheel on the package index that pip is set up to use",
                fix="check the network and `pip config list`, or use a Python version that torch supports",
            ) from error
        heavy = accelerator_part(downloads)
        if heavy:
            raise SetupError(
                "pip would download an accelerator build of torch, which the CPU does not need",
                on=heavy[0].url.rsplit("/", 1)[-1],
                found=describe_size(heavy) + ": " + ", ".join(f"{item.name} {item.version}" for item in heavy[:4]) + ", ...",
                expected="a CPU build (about 0.2 GB), or your consent",
                fix="--torch-index URL with the index of CPU builds that PyTorch's install page names; or --find-links DIR "
                "with a CPU wheel; or --yes-accelerator-torch to download it all the same",
            )

    def _pip(self, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
        command = [str(self.python), "-m", "pip", "--disable-pip-version-check", *arguments]
        # Of what is installed a small part is ever imported; Python compiles that when it is.
        self._call([*command, "--no-compile", "--quiet"], "pip failed, see above", environ)

    def _call(self, command: list[str], failure: str, environ: Mapping[str, str] | None = None) -> None:
        status = subprocess.call(command, cwd=self.root, env={**os.environ, **(environ or {})})
        if status != 0:
            raise SetupError(
                "A set-up step failed",
                on=" ".join(command),
                found=f"exit status {status}: {failure}",
                expected="exit status 0",
                fix="remove the cause named above and run this again; finished steps are kept",
            )
