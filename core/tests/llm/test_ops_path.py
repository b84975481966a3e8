"""`VLLM_CORE_OPS_PATH` names a native library that has to be used: where it cannot be, nothing else takes its place."""

from __future__ import annotations

import pytest

from vllm_core.errors import UnsupportedError


@pytest.mark.parametrize("content", [None, b"not a library"])
def test_a_library_that_cannot_be_used_is_an_error_and_not_another_provider(engines, llama, tmp_path, monkeypatch, content):
    path = tmp_path / "libmine.so"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv("VLLM_CORE_OPS_PATH", str(path))
    with pytest.raises(UnsupportedError, match="VLLM_CORE_OPS_PATH") as caught:
        engines(llama, platform="cpu")
    assert str(path) in caught.value.on
