"""Which code was tested: a commit, a wheel, or files that nobody else has."""

from __future__ import annotations

import base64
import hashlib
import importlib
import subprocess

import pytest

from vllm_conformance.sources import source_of


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `stand_source` in a folder on the path."""
    folder = tmp_path / "stand_source"
    folder.mkdir()
    (folder / "__init__.py").write_text("x = 1\n")
    (folder / "data.toml").write_text("y = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return folder


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(package):
    """The same, committed."""
    git(package.parent, "init", "-q")
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-q", "-m", "first")
    return package


def test_a_clean_checkout_has_its_commit(checkout):
    found = source_of("stand-source", "stand_source.plugin")
    assert (found.kind, found.dirty, found.commit) == ("git", False, git(checkout, "rev-parse", "HEAD"))


def test_a_changed_file_makes_it_dirty(checkout):
    before = source_of("stand-source", "stand_source")
    (checkout / "data.toml").write_text("y = 3\n")
    after = source_of("stand-source", "stand_source")
    assert (after.kind, after.dirty) == ("git", True)
    assert after.digest != before.digest


def test_a_new_file_makes_it_dirty(checkout):
    (checkout / "patch.py").write_text("")
    assert source_of("stand-source", "stand_source").dirty


def test_changes_elsewhere_in_the_repository_do_not(checkout):
    (checkout.parent / "notes.txt").write_text("")
    assert not source_of("stand-source", "stand_source").dirty


def test_files_that_git_does_not_track_are_nobodys(checkout):
    (checkout.parent / ".gitignore").write_text("venv\n")
    inner = checkout.parent / "venv" / "stand_inner"
    inner.mkdir(parents=True)
    (inner / "__init__.py").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(inner.parent)
        assert source_of("stand-inner", "stand_inner").kind == "files"


def test_plain_files_are_nobodys(package):
    found = source_of("stand-source", "stand_source")
    assert (found.kind, found.commit, found.version) == ("files", "", "unknown")


def record(folder):
    """Lines of a wheel's RECORD."""
    lines = []
    for path in sorted(folder.iterdir()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
        lines.append(f"{folder.name}/{path.name},sha256={digest},{path.stat().st_size}")
    return "\n".join([*lines, "stand_source-2.0.dist-info/RECORD,,"])


@pytest.fixture
def wheel(package):
    """The same as a wheel leaves it."""
    info = package.parent / "stand_source-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-source\nVersion: 2.0\n")
    (info / "RECORD").write_text(record(package))
    importlib.invalidate_caches()
    return package


def test_an_installed_wheel_is_known_by_its_record(wheel):
    found = source_of("stand-source", "stand_source")
    assert (found.kind, found.dirty, found.version) == ("wheel", False, "2.0")


@pytest.mark.parametrize(
    "change", [lambda folder: (folder / "__init__.py").write_text("x = 2\n"), lambda folder: (folder / "data.toml").unlink()]
)
def test_a_file_that_is_not_as_recorded_makes_it_dirty(wheel, change):
    change(wheel)
    found = source_of("stand-source", "stand_source")
    assert (found.kind, found.dirty) == ("wheel", True)


def test_a_single_module_has_a_source_too(tmp_path, monkeypatch):
    (tmp_path / "stand_alone.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    first = source_of("stand-alone", "stand_alone")
    (tmp_path / "other.py").write_text("")
    assert source_of("stand-alone", "stand_alone").digest == first.digest


def test_a_module_that_is_not_there_is_an_error():
    with pytest.raises(ModuleNotFoundError):
        source_of("nothing", "stand_nowhere")
