from __future__ import annotations

import ast
import re

import pytest

from vllm_core.api import CAPABILITIES, OPS
from vllm_core.authoring.scaffold import BY_REFERENCE, core_range, words_of, write
from vllm_core.errors import ConfigError


def test_a_new_plugin_passes_level_0_and_says_what_it_lacks(checked):
    result = checked()
    assert [str(one) for one in result.findings if one.outcome == "failed"] == []
    assert result.passed
    gaps = {one.rule: one.found for one in result.findings if one.outcome == "skipped"}
    assert set(gaps) == {"written", "claims", "ops"}
    assert all(name in gaps["ops"] for name in OPS)
    assert "vllm_acme/device.py" in gaps["written"]


def test_every_capability_is_decided_for_new_plugins():
    assert set(BY_REFERENCE) == set(CAPABILITIES)
    assert all(BY_REFERENCE[name] for name, row in CAPABILITIES.items() if row.required)


def test_nothing_of_the_template_is_left_over(written):
    texts = {path: path.read_text() for path in written.rglob("*") if path.is_file()}
    assert [path for path, text in texts.items() if re.search(r"@\w+@", text)] == []
    for path, text in texts.items():
        if path.suffix == ".py":
            ast.parse(text)
            assert max(map(len, text.splitlines()), default=0) <= 128


@pytest.mark.parametrize(
    ("name", "distribution", "module", "device"),
    [
        ("acme", "vllm-acme", "vllm_acme", "AcmeDevice"),
        ("acme_two", "vllm-acme-two", "vllm_acme_two", "AcmeTwoDevice"),
        ("x9", "vllm-x9", "vllm_x9", "X9Device"),
    ],
)
def test_names_follow_from_one(tmp_path, name, distribution, module, device):
    folder = write(name, tmp_path)
    assert folder.name == distribution
    assert f"class {device}(Device)" in (folder / "src" / module / "device.py").read_text()
    assert f'{name} = "{module}.plugin"' in (folder / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    "name", ["Acme", "9x", "a-b", "a__b", "", "../x", "cpu", "reference", "all", "core", "a b", "vllm_", "é"]
)
def test_a_name_that_cannot_be_one_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="Name cannot be used"):
        write(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    folder = write("acme", tmp_path)
    (folder / "README.md").write_text("mine")
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        write("acme", tmp_path)
    assert (folder / "README.md").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_an_error_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="File cannot be written"):
        write("acme", tmp_path / "file")


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.1.0.dev0", ">=0.1.0.dev0,<0.2"), ("0.3.2", ">=0.3.0.dev0,<0.4"), ("1.2.0rc1", ">=1.2.0.dev0,<1.3")],
)
def test_the_range_of_core_ends_at_the_next_minor(version, expected):
    assert core_range(version) == expected


def test_the_backend_lists_every_op_to_choose_from():
    assert set(re.findall(r"\w+", words_of("acme")["ops"])) >= set(OPS)
