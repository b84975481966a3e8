"""Build the wheels of this repository, and install them by their files.

    python tools/wheels.py build  [DIST ...]      wheel and sdist of each, into dist/, checked for what they must hold
    python tools/wheels.py install DIST ... [-- PIP-OPTION ...]   build wheels, then install them and what they declare

Our names are never looked up on a package index: pip is given the files. Other projects own some of these names there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import compiler_cache

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Package:
    """One distribution of `packages.toml`."""

    name: str
    path: Path
    module: str
    needs: tuple[str, ...]

    @property
    def short(self) -> str:
        """The word that nox and tox use: ``core`` for ``vllm-core``."""
        return self.name.removeprefix("vllm-")


def packages(root: Path = ROOT) -> dict[str, Package]:
    """All distributions by name, in the order in which they are built."""
    table = tomllib.loads((root / "packages.toml").read_text(encoding="utf-8"))
    return {name: Package(name, root / entry["path"], entry["import"], tuple(entry["needs"])) for name, entry in table.items()}


def choose(names: list[str]) -> list[Package]:
    """The named distributions (``core`` or ``vllm-core``), or all. Raises SystemExit for an unknown one."""
    known = packages()
    chosen = [name if name.startswith("vllm-") else f"vllm-{name}" for name in names] or list(known)
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise SystemExit(f"Unknown package: {unknown[0]}\n  expected: one of {', '.join(p.short for p in known.values())}")
    return [known[name] for name in chosen]


def build_wheel(package: Package, folder: Path) -> Path:
    """Build one wheel into an empty folder, in pip's isolated build environment."""
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(package.path)])
    return next(folder.glob(f"{package.module}-*.whl"))


def build(chosen: list[Package]) -> None:
    """Wheel (made from the sdist, so that the sdist is proved to be enough) and sdist of each; checks their contents."""
    target = ROOT / "dist"
    for package in chosen:
        for old in target.glob(f"{package.module}-*"):
            old.unlink()
        run([sys.executable, "-m", "build", "--outdir", str(target), str(package.path)])
        wheel, sdist = next(target.glob(f"{package.module}-*.whl")), next(target.glob(f"{package.module}-*.tar.gz"))
        problems = check_wheel(wheel, package) + check_sdist(sdist)
        if problems:
            raise SystemExit("\n".join([f"{package.name} is not complete:", *problems]))
        print(f"{package.name}: {wheel.name} {wheel.stat().st_size} bytes, {sdist.name} {sdist.stat().st_size} bytes")


def check_wheel(wheel: Path, package: Package) -> list[str]:
    """What is missing from a wheel, or must not be in it."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    problems = [f"{wheel.name}: no {what}" for what in ("py.typed", "LICENSE") if not any(n.endswith(what) for n in names)]
    sources = {path.relative_to(package.path / "src").as_posix() for path in (package.path / "src").rglob("*.py")}
    problems += [f"{wheel.name}: no {name}" for name in sorted(sources - set(names))]
    tops = {name.split("/")[0] for name in names} - {package.module}
    return problems + [f"{wheel.name}: unexpected {top}" for top in sorted(tops) if not top.endswith(".dist-info")]


def check_sdist(sdist: Path) -> list[str]:
    """What is missing from a source distribution."""
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    wanted = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO")
    return [f"{sdist.name}: no {name}" for name in wanted if name not in names]


def install(chosen: list[Package], options: list[str]) -> None:
    """Install the chosen wheels, those of ours that they need, and their declared dependencies."""
    known = packages()
    needed = {name: known[name] for package in chosen for name in (*package.needs, package.name)}
    with tempfile.TemporaryDirectory() as folder:
        wheels = [str(build_wheel(package, Path(folder))) for package in needed.values()]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*pip, "--force-reinstall", "--no-deps", *wheels])
        if "--no-deps" not in options:
            run([*pip, *options, *wheels])


def run(command: list[str]) -> None:
    """Run a command in the repository. Raises SystemExit with its status if it fails."""
    environ = {**os.environ, **compiler_cache.variables(Path(sys.executable).parent)}
    status = subprocess.call(command, cwd=ROOT, env=environ)
    if status:
        raise SystemExit(status)


def main(arguments: list[str]) -> None:
    """Carry out one of the two commands."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("build", "install"))
    parser.add_argument("dist", nargs="*")
    options = parser.parse_args(arguments[:split])
    if options.command == "build":
        build(choose(options.dist))
    else:
        install(choose(options.dist), arguments[split + 1 :])


if __name__ == "__main__":
    main(sys.argv[1:])
