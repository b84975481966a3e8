from __future__ import annotations

import os

import pytest

from vllm_core.registry.discover import Found
from vllm_core.registry.fingerprint import digest, drivers, installed, machine, newest_change

FOUND = Found(distribution="dist-a", version="1", entry_point="a", value="a_package_of_the_test.plugin:thing")


@pytest.fixture
def root(tmp_path):
    """A root with one driver loaded."""
    for name, text in {
        "sys/module/accel/version": "550.54\n",
        "proc/sys/kernel/random/boot_id": "one\n",
        "etc/ld.so.cache": "",
    }.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return tmp_path / "root"


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "site" / "a_package_of_the_test"
    (folder / "deep").mkdir(parents=True)
    for name in ("__init__.py", "deep/kernels.so"):
        (folder / name).write_text("raise SystemExit('nothing of the plugin is imported')")
        os.utime(folder / name, ns=(10**18, 10**18))
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def test_equal_things_have_equal_digests(root):
    assert digest(FOUND, {}) == digest(FOUND, {}, here=machine())
    assert machine(root) == machine(root)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("sys/module/accel/version", "560.10\n"),
        ("sys/module/other/version", "1\n"),
        ("proc/sys/kernel/random/boot_id", "two\n"),
    ],
)
def test_another_driver_or_boot_is_another_digest(root, file, text):
    before = machine(root)
    (root / file).parent.mkdir(exist_ok=True)
    (root / file).write_text(text)
    assert digest(FOUND, {}, here=machine(root)) != digest(FOUND, {}, here=before)


def test_a_drivers_libraries_count_as_much_as_its_module(root):
    before = machine(root)
    os.utime(root / "etc/ld.so.cache", ns=(10**18, 10**18))
    assert machine(root) != before


@pytest.mark.parametrize("change", [{"version": "2"}, {"value": "b"}, {"distribution": "dist-b"}])
def test_another_plugin_is_another_digest(change):
    facts = {name: getattr(FOUND, name) for name in ("distribution", "version", "entry_point", "value")}
    assert digest(Found(**{**facts, **change}), {}) != digest(FOUND, {})


def test_what_libraries_are_found_and_what_the_user_hides_counts():
    digests = {digest(FOUND, {}), digest(FOUND, {"LD_LIBRARY_PATH": "/x"}), digest(FOUND, {}, "VISIBLE=0")}
    assert len(digests) == 3


@pytest.mark.parametrize("name", ["__init__.py", "deep/kernels.so"])
def test_the_newest_file_of_the_package_counts_and_nothing_is_imported(package, name):
    assert newest_change(FOUND) == 10**18
    os.utime(package / name, ns=(2 * 10**18, 2 * 10**18))
    assert newest_change(FOUND) == 2 * 10**18


def test_installing_anything_counts(tmp_path):
    before = installed([str(tmp_path), ""])
    (tmp_path / "another_package").mkdir()
    os.utime(tmp_path, ns=(10**18, 10**18))
    assert installed([str(tmp_path), ""]) != before


def test_a_package_that_is_not_there_has_no_change():
    assert newest_change(FOUND) == 0


def test_a_machine_without_drivers_has_none(tmp_path):
    assert drivers(tmp_path) == ";libraries=0"
