from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from vllm_core.registry.libraries import check_library, native_libraries, paths_tried

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="builds a library: no C compiler here")


def build(folder, name, text, *libraries):
    source = folder / f"{name}.c"
    source.write_text(text)
    target = folder / f"lib{name}.so"
    links = [f"-L{folder}", *(f"-l{one}" for one in libraries)]
    subprocess.run(["cc", "-shared", "-fPIC", "-o", target, source, *links], check=True)
    return target


def test_a_library_whose_dependencies_are_there_loads():
    check = check_library(Path(msgspec._core.__file__), os.environ)
    assert check.outcome == "ok"


@needs_compiler
def test_a_missing_dependency_is_named_with_every_path_tried(tmp_path, stub_torch):
    build(tmp_path, "absent", "int f(void) { return 1; }")
    path = build(tmp_path, "kernels", "int f(void); int g(void) { return f(); }", "absent")
    (tmp_path / "libabsent.so").unlink()
    (tmp_path / "empty").mkdir()
    check = check_library(path, {**os.environ, "LD_LIBRARY_PATH": str(tmp_path / "empty")})
    assert check.outcome == "failed"
    assert check.detail.startswith("libabsent.so: cannot open shared object file")
    assert str(tmp_path / "empty/libabsent.so") in check.detail
    assert "libabsent.so" in check.hint


@needs_compiler
def test_a_library_that_crashes_while_loading_is_one_failed_check(tmp_path):
    path = build(tmp_path, "crash", "__attribute__((constructor)) static void boom(void) { __builtin_trap(); }")
    check = check_library(path, os.environ)
    assert check.outcome == "failed"
    assert "signal" in check.detail


def test_a_file_that_is_no_library_fails_with_the_loaders_words(tmp_path, stub_torch):
    (tmp_path / "bad.so").write_bytes(b"not a library at all")
    check = check_library(tmp_path / "bad.so", os.environ)
    assert check.outcome == "failed"
    assert "bad.so" in check.detail


def test_paths_are_read_from_the_loaders_trace():
    files = ("/a/libx.so.1", "/b/libx.so.1", "/a/liby.so", "/a/libx.so.1")
    trace = "".join(f"      1:\t  trying file={file}\n" for file in files)
    assert paths_tried(trace, "libx.so.1") == ["/a/libx.so.1", "/b/libx.so.1"]


def test_native_libraries_are_found_by_name_and_below(tmp_path):
    (tmp_path / "below").mkdir()
    for name in ("a.so", "below/b.so.1.2", "c.cpython-311-x86_64-linux-gnu.so", "d.py", "e.sob", "f.dylib"):
        (tmp_path / name).write_text("")
    found = [str(path.relative_to(tmp_path)) for path in native_libraries(tmp_path)]
    assert found == ["a.so", "below/b.so.1.2", "c.cpython-311-x86_64-linux-gnu.so", "f.dylib"]
