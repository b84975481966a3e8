"""Native kernels touch nothing beside their tensors: each lies before, then behind, a page without access."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("guarded.py")


@pytest.mark.skipif(sys.platform != "linux", reason="pages are protected as Linux does it")
def test_no_kernel_reads_or_writes_beyond_its_tensors(library) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"a kernel touched a guard page: {done.stderr[-2000:]}"
    assert int(done.stdout.split()[-1]) > 500


@pytest.mark.skipif(sys.platform != "linux", reason="pages are protected as Linux does it")
def test_a_guard_page_ends_the_child() -> None:
    """The test above can fail."""
    code = f"""
import importlib.util, torch
spec = importlib.util.spec_from_file_location("guarded", {str(SCRIPT)!r})
module = importlib.util.module_from_spec(spec); import sys; sys.modules["guarded"] = module; spec.loader.exec_module(module)
import ctypes
tensor = module.guarded(torch.zeros(3))
ctypes.c_float.from_address(tensor.data_ptr() + 12).value
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode < 0
