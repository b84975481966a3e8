"""The native chain: what is tried, what is refused, and a tiny library that really runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from vllm_core.api import UnsupportedError
from vllm_core.ops import norm
from vllm_cpu import native
from vllm_cpu.backends import generic
from vllm_cpu.ops import native as ops

HEADER = Path(__file__).parents[3] / "core" / "include"
SOURCE = r"""
#include <math.h>
#include "vllm/ops.h"
uint32_t vllm_ops_abi_version(void) { return VLLM_OPS_ABI_VERSION + OFFSET; }
uint64_t vllm_ops_abi_size(void) { return sizeof(vllm_tensor); }
int32_t vllm_rms_norm(const vllm_tensor *out, const vllm_tensor *x, const vllm_tensor *w, double eps, void *stream) {
    if (x->dtype != VLLM_FLOAT32 || x->rank != 2) return VLLM_UNSUPPORTED;
    for (int64_t t = 0; t < x->sizes[0]; t++) {
        const float *in = (const float *)x->data + t * x->strides[0];
        float *to = (float *)out->data + t * out->strides[0];
        double sum = 0;
        for (int64_t i = 0; i < x->sizes[1]; i++) sum += (double)in[i] * in[i];
        double scale = 1 / sqrt(sum / x->sizes[1] + eps);
        for (int64_t i = 0; i < x->sizes[1]; i++) to[i] = (float)(in[i] * scale * ((const float *)w->data)[i]);
    }
    return VLLM_OK;
}
#ifdef WHOLE
int32_t vllm_linear(const vllm_tensor *o, const vllm_tensor *x, const vllm_tensor *w, const vllm_tensor *b,
                    void *s) { return 1; }
int32_t vllm_kv_write(const vllm_tensor *k, const vllm_tensor *v, const vllm_tensor *a, const vllm_tensor *b,
                      const vllm_tensor *m, void *s) { return 1; }
int32_t vllm_paged_attention(const vllm_tensor *o, const vllm_tensor *q, const vllm_tensor *k, const vllm_tensor *v,
                             const vllm_tensor *a, const vllm_tensor *l, const vllm_tensor *t, int64_t mq, int64_t ms,
                             double sc, int64_t w, double c, void *s) { return 1; }
#endif
"""


@pytest.fixture
def build(tmp_path):
    """Compile the library with some definitions; returns its path."""
    if not shutil.which("gcc") or not HEADER.is_dir():
        pytest.skip("needs gcc and core's header")

    def run(*definitions: str) -> str:
        (tmp_path / "ops.c").write_text(SOURCE)
        path = tmp_path / "libtiny.so"
        command = [
            "gcc",
            "-std=c11",
            "-shared",
            "-fPIC",
            f"-I{HEADER}",
            *definitions,
            str(tmp_path / "ops.c"),
            "-o",
            str(path),
            "-lm",
        ]
        subprocess.run(command, check=True)
        return str(path)

    return run


def test_a_library_of_the_header_is_loaded_and_computes(build, monkeypatch) -> None:
    monkeypatch.setenv(native.VARIABLE, build("-DOFFSET=0", "-DWHOLE"))
    ops._library.cache_clear()
    assert [offer.provider for offer in generic.native_offers()] == [generic.NATIVE]
    x, weight = torch.randn(5, 12)[:, :8], torch.rand(8)
    out, expected = torch.zeros(5, 8), torch.zeros(5, 8)
    ops.rms_norm(out, x, weight, 1e-6)
    norm.rms_norm(expected, x, weight, 1e-6)
    torch.testing.assert_close(out, expected)
    with pytest.raises(UnsupportedError, match="status 1"):
        ops.rms_norm(out.half(), x.half(), weight, 1e-6)
    ops._library.cache_clear()


@pytest.mark.parametrize(
    ("definitions", "cause"),
    [(("-DOFFSET=1", "-DWHOLE"), "ABI version 2"), (("-DOFFSET=0",), "missing symbols: vllm_linear")],
)
def test_a_library_of_another_abi_or_without_a_symbol_is_an_error(build, definitions, cause) -> None:
    path = build(*definitions)
    with pytest.raises(UnsupportedError, match=cause) as caught:
        native.find({native.VARIABLE: path})
    assert path in caught.value.on


def test_a_path_that_does_not_exist_is_an_error_and_never_passed_over(tmp_path) -> None:
    with pytest.raises(UnsupportedError, match="cannot open"):
        native.find({native.VARIABLE: str(tmp_path / "none.so")})


def test_without_a_library_the_chain_says_so_and_nothing_is_offered(monkeypatch) -> None:
    monkeypatch.delenv(native.VARIABLE, raising=False)
    found = native.find({})
    assert found.library is None
    assert str(native.PACKAGED) in str(found)
    assert generic.native_offers() == ()


def test_a_broken_packaged_library_is_recorded_and_passed_over(tmp_path, monkeypatch) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("not a library")
    monkeypatch.setattr(native, "PACKAGED", broken)
    found = native.find({})
    assert found.library is None
    assert found.tried[0].path == str(broken)
