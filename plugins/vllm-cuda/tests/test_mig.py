"""Instances of MIG: what is asked of NVML, and what a user is told of instances that are visible, are not, or are missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_cuda import probe
from vllm_cuda.driver import DriverError
from vllm_cuda.mig import CutGpu, cut_gpus

COMPILER = shutil.which(os.environ.get("CXX", "c++"))
CUT = CutGpu("GPU-7", "NVIDIA H200", (("MIG-a", "1g.18gb"), ("MIG-b", "3g.71gb")))

NVML = """
#include <cstdio>
#include <cstring>
static int open_count;
static char whole[] = {0, 1, 2};
static char parts[] = {0, 1, 2, 3};
static int of(void* handle) {
    long place = (char*)handle - whole;
    return place >= 0 && place < 3 ? place : 10 + ((char*)handle - parts);
}
extern "C" {
int nvmlInit_v2() { ++open_count; return 0; }
int nvmlShutdown() { --open_count; return 0; }
int still_open() { return open_count; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) { *handle = whole + index; return 0; }
int nvmlDeviceGetMigMode(void* gpu, unsigned* mode, unsigned* pending) {
    if (of(gpu) == 2) return 3;
    *mode = of(gpu) == 0; *pending = 0; return @STATUS@;
}
int nvmlDeviceGetMaxMigDeviceCount(void*, unsigned* count) { *count = 4; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void*, unsigned index, void** part) {
    if (index % 2) return 6;
    *part = parts + index; return 0;
}
int nvmlDeviceGetUUID(void* handle, char* text, unsigned size) {
    int number = of(handle);
    snprintf(text, size, number < 10 ? "GPU-%d" : "MIG-%d", number % 10); return 0;
}
int nvmlDeviceGetName(void* handle, char* text, unsigned size) {
    snprintf(text, size, of(handle) < 10 ? "NVIDIA H200" : "NVIDIA H200 MIG 1g.18gb"); return 0;
}
}
"""


@pytest.fixture
def build(tmp_path):
    """A library that answers as NVML does; of three GPUs the first is cut, and the last knows no MIG."""
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")

    def make(status: str = "0") -> str:
        source, library = tmp_path / "nvml.cpp", tmp_path / f"nvml{status}.so"
        source.write_text(NVML.replace("@STATUS@", status))
        subprocess.run([str(COMPILER), "-shared", "-fPIC", "-w", str(source), "-o", str(library)], check=True)
        return str(library)

    return make


def test_gpus_in_mig_mode_and_their_instances_are_listed(build):
    assert cut_gpus(build()) == (CutGpu("GPU-0", "NVIDIA H200", (("MIG-0", "1g.18gb"), ("MIG-2", "1g.18gb"))),)


def test_nvml_is_closed_again_also_where_it_does_not_answer(build):
    import ctypes

    library = build("999")
    with pytest.raises(DriverError, match="nvmlDeviceGetMigMode: status 999"):
        cut_gpus(library)
    assert ctypes.CDLL(library).still_open() == 0


def test_a_library_that_is_not_nvml_is_refused_by_the_missing_call():
    with pytest.raises(DriverError, match="nvmlInit_v2 is missing"):
        cut_gpus("libc.so.6")


@pytest.fixture
def told(tmp_path, make_driver, make_gpu):
    """The probe's check of a cut GPU where the process sees a device of this id."""

    def look(id_: str, mig):
        driver = make_driver((13, 0), (replace(make_gpu(), id=id_),))
        report = probe.probe(Path(tmp_path), lambda: driver, lambda: "580", lambda: ("2.11.0", "13.0"), mig)
        return [check for check in report.checks if check.name.startswith("MIG of GPU-")]

    return look


def test_all_instances_are_told_and_which_is_visible(told):
    (check,) = told("MIG-b", lambda: (CUT,))
    assert (check.outcome, check.detail) == ("ok", "NVIDIA H200: MIG-a (1g.18gb), MIG-b (3g.71gb, visible)")


def test_instances_that_are_not_visible_come_with_the_way_to_them(told):
    (check,) = told("GPU-8", lambda: (CUT,))
    assert check.outcome == "skipped"
    assert "CUDA_VISIBLE_DEVICES" in check.hint


def test_a_gpu_in_mig_mode_without_instances_is_told(told):
    (check,) = told("GPU-8", lambda: (replace(CUT, instances=()),))
    assert "has no instance" in check.detail
    assert "nvidia-smi mig" in check.hint


def test_without_nvml_nothing_is_told_of_mig(told):
    def missing():
        raise OSError("libnvidia-ml.so.1")

    assert told("GPU-8", missing) == []
