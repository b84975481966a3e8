"""Set-up of the README's commands: what can be tested without downloading anything."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from tools.environment import PACKAGES, Environment, SetupError
from tools.torch_build import Download, TorchChoice, accelerator_part, describe_size, parse_report, size_of
from tools.wheels import packages

ROOT = Path(__file__).parents[1]


def wheel(folder, name, size):
    path = folder / f"{name}-1.0-py3-none-any.whl"
    path.write_bytes(b"x" * size)
    return Download(name, "1.0", path.as_uri())


def test_a_build_without_accelerator_packages_is_no_matter(tmp_path):
    assert accelerator_part([wheel(tmp_path, "torch", 5), wheel(tmp_path, "sympy", 5)]) == []


def test_an_accelerator_build_is_seen_with_its_size(tmp_path):
    heavy = accelerator_part([wheel(tmp_path, name, 5) for name in ("torch", "sympy", "nvidia-cublas", "triton")])
    assert [(item.name, item.size_bytes) for item in heavy] == [("torch", 5), ("nvidia-cublas", 5), ("triton", 5)]


def test_an_unknown_size_makes_the_sum_a_lower_bound(tmp_path):
    known = Download("torch", "1", "u", 2_000_000_000)
    unknown = Download("triton", "1", "u")
    assert describe_size([known]) == "2.0 GB in 1 packages"
    assert describe_size([known, unknown]) == "at least 2.0 GB in 2 packages"
    assert describe_size([unknown]).startswith("several GB")
    assert size_of((tmp_path / "absent.whl").as_uri()) is None


def test_the_report_of_pip_is_read():
    item = {"metadata": {"name": "torch", "version": "2.13.0+cpu"}, "download_info": {"url": "file:///t.whl"}}
    assert parse_report({"install": [item]}) == [Download("torch", "2.13.0+cpu", "file:///t.whl")]


def test_options_name_where_torch_comes_from():
    assert TorchChoice().pip_options() == []
    assert TorchChoice("index", "folder").pip_options() == ["--extra-index-url", "index", "--find-links", "folder"]


@pytest.fixture
def environment(tmp_path):
    return Environment(ROOT, tmp_path / "env", TorchChoice())


def test_pip_comes_from_the_checkout_and_not_from_ensurepip(environment, monkeypatch):
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    monkeypatch.setenv("PIP_INDEX_URL", "file:///nowhere")
    environment._create()
    assert environment._usable()
    folder = subprocess.check_output([environment.python, "-c", "import pip; print(pip.__file__)"], text=True)
    assert str(environment.folder) in folder


def test_a_python_without_venv_says_what_to_install(environment, monkeypatch):
    monkeypatch.setitem(sys.modules, "venv", None)
    with pytest.raises(SetupError, match=r"(?s)found: .*expected: .*fix: .*python3-venv"):
        environment._create()


def test_an_accelerator_build_is_refused_with_its_size_and_the_ways_out(environment, monkeypatch, tmp_path):
    downloads = [wheel(tmp_path, "torch", 10), wheel(tmp_path, "nvidia-cublas", 10)]
    monkeypatch.setattr("tools.environment.resolve", lambda *arguments: downloads)
    with pytest.raises(SetupError) as caught:
        environment._refuse_accelerator("torch==1.0")
    for word in ("0.0 GB in 2 packages", "--torch-index", "--find-links", "--yes-accelerator-torch"):
        assert word in str(caught.value)


def test_a_cpu_build_is_not_refused(environment, monkeypatch, tmp_path):
    monkeypatch.setattr("tools.environment.resolve", lambda *arguments: [wheel(tmp_path, "torch", 10)])
    environment._refuse_accelerator("torch==1.0")


def test_a_failed_step_names_the_command_and_its_status(environment):
    with pytest.raises(SetupError, match="exit status 3"):
        environment._call([sys.executable, "-c", "raise SystemExit(3)"], "it said so")


def test_an_up_to_date_environment_is_left_alone(environment, monkeypatch, capsys):
    monkeypatch.setattr(Environment, "_usable", lambda self: True)
    monkeypatch.setattr(Environment, "_install_torch", lambda self: None)
    calls = []
    monkeypatch.setattr(Environment, "_pip", lambda self, *arguments, **options: calls.append(arguments))
    environment.folder.mkdir()
    environment.prepare(("test", "lint"))
    environment.prepare(("test",))
    environment.prepare(())
    assert len(calls) == 2, "the tools once, the packages once"
    assert "up to date" in capsys.readouterr().out


def test_the_bundled_pip_is_the_one_that_its_note_names():
    note = (ROOT / "tools" / "bootstrap" / "README.md").read_text()
    (pip,) = (ROOT / "tools" / "bootstrap").glob("*.whl")
    assert hashlib.sha256(pip.read_bytes()).hexdigest() in note


def test_packages_are_listed_once_and_alike():
    ours = {str(package.path.relative_to(ROOT)) for package in packages().values()}
    assert {path for path in ours if not path.startswith("examples/")} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_carries_what_a_distribution_must(package):
    folder = ROOT / package
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert len((folder / "README.md").read_text().splitlines()) > 5
    assert (folder / "CHANGELOG.md").is_file()
    assert (folder / "changelog.d" / "README.md").is_file()
    assert list((folder / "src").glob("*/py.typed"))


@pytest.mark.parametrize("line", ["3.9", "3.8"])
def test_an_old_python_gets_a_message_and_no_traceback(line):
    code = f"import sys; sys.version_info = ({line.replace('.', ', ')}, 0); exec(open('run.py').read())"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert f"found:    {line}" in result.stderr
    assert "Traceback" not in result.stderr
