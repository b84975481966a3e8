"""No library, or one for another machine: the package says why and serves on its other kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import vllm_core
from vllm_core.api import UnsupportedError
from vllm_cpu import native

PACKAGE = Path(__file__).parents[1]
X86_64, AARCH64 = 62, 183
"""`e_machine` of ELF headers, at byte 18."""

ALONE = """
import sys
sys.path[:0] = sys.argv[1:]
import torch
from vllm_core.api import load_entry
from vllm_cpu import native
from vllm_cpu.backends import generic, native as own, native_linear
assert native.load().library is None
assert not own.offers() and not native_linear.offers()
ops = {name: load_entry(entry) for offer in generic.offers() for name, entry in offer.ops.items()}
weight, x, out = torch.randn(8, 4), torch.randn(2, 4), torch.empty(2, 8)
ops["linear"](out, x, ops["linear_pack"](weight, None, ["a"]))
torch.testing.assert_close(out, x @ weight.T)
print(native.load())
"""


@pytest.fixture
def foreign(tmp_path) -> Path:
    """The packaged library with another machine in its header."""
    path = native.packaged()
    if not path.exists():
        pytest.skip("needs the library")
    content = bytearray(path.read_bytes())
    content[18:20] = (AARCH64 if content[18] == X86_64 else X86_64).to_bytes(2, "little")
    (tmp_path / native.LIBRARY).write_bytes(content)
    return tmp_path / native.LIBRARY


def test_a_users_library_for_another_machine_is_an_error_that_names_both(foreign) -> None:
    with pytest.raises(UnsupportedError, match=r"built for another machine: ELF machine \d+, this is \d+"):
        native.find({native.VARIABLE: str(foreign)})


def test_a_packaged_library_for_another_machine_is_passed_over_with_the_reason(foreign, monkeypatch) -> None:
    monkeypatch.setattr(native, "packaged", lambda: foreign)
    found = native.find({})
    assert (found.library, found.ops) == (None, frozenset())
    assert "built for another machine" in str(found)


@pytest.mark.slow
def test_a_wheel_built_without_a_compiler_runs_on_other_kernels_and_says_so(tmp_path) -> None:
    """CMake looks for compilers outside of PATH too, so it is told of one that does not exist."""
    pytest.importorskip("scikit_build_core")
    if not shutil.which("cmake"):
        pytest.skip("needs cmake")
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("build", "tests", "changelog.d", "__pycache__"))
    environ = os.environ | {"CXX": str(tmp_path / "no-compiler")}
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        str(source),
        "-w",
        str(tmp_path),
    ]
    subprocess.run(command, check=True, env=environ)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    # Without site: an editable install of this package would come first.
    rest = [str(Path(vllm_core.__file__).parents[1]), *(path for path in sys.path if path.endswith("-packages"))]
    child = [sys.executable, "-S", "-c", ALONE, str(site), *rest]
    said = subprocess.run(child, check=True, capture_output=True, text=True, env=os.environ | {native.VARIABLE: ""}).stdout
    assert f"{site}" in said
    assert "no native library in this build: no C++ compiler" in said
