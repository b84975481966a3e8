from __future__ import annotations

import copy
import shutil
import zipfile
from pathlib import Path

import pytest

import vllm_core
from vllm_core.authoring import describe as describing
from vllm_core.authoring.diff import RECORDED, Change, compare, current_version, describe, recorded_versions
from vllm_core.errors import ConfigError

SOURCES = Path(vllm_core.__file__).parents[1]


@pytest.fixture(scope="module")
def current():
    return describe("current")


@pytest.fixture
def changed(current):
    """Change a copy of the description, and return the differences."""

    def run(change):
        other = copy.deepcopy(current)
        change(other)
        return compare(current, other)

    return run


def test_the_api_of_a_version_is_the_one_that_was_recorded(current):
    """Fails when the contract changed and its version did not. Raise `API_VERSION`, then run tools/record_api.py; a version
    that was never released may be recorded anew."""
    assert current_version() in recorded_versions()
    assert compare(describe(current_version()), current) == []
    assert (RECORDED / f"{current_version()}.json").read_text("utf-8") == describing.to_text(describing.describe())


def test_equal_descriptions_have_no_changes(current):
    assert compare(current, copy.deepcopy(current)) == []


def test_everything_that_plugins_touch_is_described(current):
    assert set(current["hooks"]) == {"manifest", "probe", "configure", "programs", "start", "create_device", "offers"}
    assert current["names"]["Device"]["methods"]["allocate"]["abstract"] is True
    assert current["names"]["Manifest"]["fields"]["name"]["required"] is True
    assert current["ops"]["rms_norm"]["schema"].startswith("(float")
    assert current["constants"]["batch.ADMIT_WORDS"] == 24


def test_a_new_optional_field_adds_and_a_new_required_one_breaks(changed):
    fields = lambda data: data["names"]["Manifest"]["fields"]  # noqa: E731
    (one,) = changed(lambda data: fields(data).update(colour={"type": "str", "required": False, "default": "''"}))
    assert one == Change("adds", "names.Manifest.fields.colour", "", "str")
    (one,) = changed(lambda data: fields(data).update(colour={"type": "str", "required": True}))
    assert one.weight == "breaks"


def more(description, arguments):
    """The schema of `add` with arguments behind its own."""
    return f"{description['ops']['add']['schema'].removesuffix(')')}, {arguments})"


@pytest.mark.parametrize(
    ("change", "weight", "on"),
    [
        (lambda d: d["names"].pop("Reuse"), "breaks", "names.Reuse"),
        (lambda d: d["ops"]["rms_norm"].update(schema="(x)"), "breaks", "ops.rms_norm.schema"),
        (lambda d: d["ops"]["add"].update(schema=more(d, "float? k = None, int n = 1")), "adds", "ops.add.schema"),
        (lambda d: d["ops"]["add"].update(schema=more(d, "float? k = None, int n")), "breaks", "ops.add.schema"),
        (lambda d: d["ops"]["rms_norm"].update(version=2), "breaks", "ops.rms_norm.version"),
        (lambda d: d["ops"]["rms_norm"]["tolerances"].update(float32=[0, 0]), "changes", "ops.rms_norm.tolerances.float32"),
        (lambda d: d["ops"].update(new_op={"schema": "(x)"}), "adds", "ops.new_op"),
        (lambda d: d["hooks"].update(new_hook={"arguments": {}}), "breaks", "hooks.new_hook"),
        (lambda d: d["hooks"]["probe"]["arguments"].update(root="Path"), "adds", "hooks.probe.arguments.root"),
        (lambda d: d["hooks"]["offers"]["arguments"].pop("device"), "breaks", "hooks.offers.arguments.device"),
        (lambda d: d["capabilities"].update(new={"since": [0, 2], "required": False}), "adds", "capabilities.new"),
        (lambda d: d["capabilities"].update(new={"since": [0, 2], "required": True}), "breaks", "capabilities.new"),
        (lambda d: d["constants"].update({"batch.ADMIT_WORDS": 32}), "breaks", "constants.batch.ADMIT_WORDS"),
        (
            lambda d: d["names"]["Device"]["methods"].update(reset={"signature": "(self)", "abstract": True}),
            "breaks",
            "names.Device.methods.reset",
        ),
    ],
)
def test_each_change_is_weighed_by_what_a_plugin_has_to_do(changed, change, weight, on):
    (one,) = changed(change)
    assert (one.weight, one.on) == (weight, on)


def test_what_breaks_comes_first(changed):
    def change(data):
        data["ops"]["a_new_op"] = {"schema": "(x)"}
        del data["ops"]["rms_norm"]

    assert [one.weight for one in changed(change)] == ["breaks", "adds"]


@pytest.fixture
def checkout(tmp_path):
    """A folder with the contract of this core, with one field renamed."""
    for name in ("__init__.py", "errors.py", "version.py", "py.typed"):
        (tmp_path / "src/vllm_core").mkdir(parents=True, exist_ok=True)
        shutil.copy(SOURCES / "vllm_core" / name, tmp_path / "src/vllm_core" / name)
    shutil.copytree(SOURCES / "vllm_core/api", tmp_path / "src/vllm_core/api")
    path = tmp_path / "src/vllm_core/api/kv.py"
    path.write_text(path.read_text().replace("block_bytes: int", "bytes_per_block: int"))
    return tmp_path


@pytest.fixture
def wheel(checkout, tmp_path):
    """The same as a wheel."""
    path = tmp_path / "vllm_core-0.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted((checkout / "src").rglob("*.py")):
            archive.write(file, file.relative_to(checkout / "src"))
    return path


@pytest.mark.parametrize("kind", ["checkout", "wheel"])
def test_another_core_is_described_from_its_folder_or_wheel(current, request, kind):
    changes = compare(describe(str(request.getfixturevalue(kind))), current)
    assert {(one.weight, one.on) for one in changes} == {
        ("breaks", "names.KVLayout.fields.block_bytes"),
        ("breaks", "names.KVLayout.fields.bytes_per_block"),
    }


def test_an_unknown_version_is_an_error_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"0\.2, current, or a path"):
        describe("9.9")


def test_a_folder_that_is_no_core_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="no package vllm_core"):
        describe(str(tmp_path))


def test_a_core_that_cannot_be_imported_is_an_error_with_the_reason(checkout):
    (checkout / "src/vllm_core/api/__init__.py").write_text("raise RuntimeError('half')\n")
    with pytest.raises(ConfigError, match="RuntimeError: half"):
        describe(str(checkout))
