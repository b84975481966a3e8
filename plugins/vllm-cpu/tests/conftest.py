"""The plugin's ops as a provider that core's checker understands."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_core.api import load_entry
from vllm_core.ops import check
from vllm_cpu import native, native_kv
from vllm_cpu.backends import generic
from vllm_cpu.backends import native as native_offers

ROOT = Path(__file__).parents[3]
HEADER = ROOT / "core" / "include"
GUIDE = ROOT / "docs" / "native-kernels.md"


@pytest.fixture(scope="session")
def own_ops() -> dict[str, Callable[..., Any]]:
    """Every op that the plugin offers by default, without native code."""
    offers = [offer for offer in generic.offers() if offer.provider == generic.PROVIDER]
    return {name: load_entry(entry) for offer in offers for name, entry in offer.ops.items()}


@pytest.fixture(scope="session")
def provider(own_ops) -> check.Provider:
    """The offered ops with the plugin's KV layout."""
    return check.Provider(own_ops, generic.kv_layout)


@pytest.fixture(scope="session")
def library():
    """The native library that this process uses."""
    found = native.load()
    if found.library is None:
        pytest.skip(str(found))
    return found.library


@pytest.fixture(scope="session")
def native_ops(library, own_ops) -> dict[str, Callable[..., Any]]:
    """Every op of the native library but linear's and embedding; the plugin's other ops for the rest."""
    return own_ops | {name: load_entry(entry) for offer in native_offers.offers() for name, entry in offer.ops.items()}


@pytest.fixture(scope="session")
def native_provider(native_ops) -> check.Provider:
    """These ops with the library's KV layout."""
    return check.Provider(native_ops, native_kv.kv_layout)


@pytest.fixture
def build(tmp_path):
    """Compile C source against the header; returns the library's path."""
    if not shutil.which("gcc") or not HEADER.is_dir():
        pytest.skip("needs gcc and core's header")

    def run(source: str, *definitions: str) -> str:
        (tmp_path / "ops.c").write_text(source)
        path = tmp_path / "libtiny.so"
        flags = ["-std=c11", "-shared", "-fPIC", f"-I{HEADER}", *definitions]
        subprocess.run(["gcc", *flags, str(tmp_path / "ops.c"), "-o", str(path), "-lm"], check=True)
        return str(path)

    return run


@pytest.fixture
def source() -> str:
    """The example that the documentation gives."""
    if not GUIDE.is_file():
        pytest.skip("needs the documentation of the repository")
    found = re.search(r"```c\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]
