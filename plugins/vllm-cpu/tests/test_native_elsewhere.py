"""The library for another machine under an emulator: `nox -s neon` names it, and these tests call it over a pipe.

VLLM_TEST_LIBRARY is the library, VLLM_TEST_EMULATOR the command that runs tests/native/elsewhere.c as built for it.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from vllm_core.api import QuantTensor
from vllm_core.ops import quant
from vllm_cpu.native import CLinearCall, CMatrix
from vllm_cpu.native_kv import CKV

LIBRARY, EMULATOR = os.environ.get("VLLM_TEST_LIBRARY", ""), os.environ.get("VLLM_TEST_EMULATOR", "")
if not LIBRARY or not EMULATOR:
    pytest.skip("no library for another machine", allow_module_level=True)

CODES = {"float32": 0, "bfloat16": 1, "float16": 2, "q4_0": 3, "q4_1": 4, "q5_0": 5, "q5_1": 6, "q8_0": 7}
CODES |= {"q4_k": 10, "q5_k": 11, "q6_k": 12, "int8_channel": 13, "int4_group": 14}


@dataclass
class Request:
    """Memory of a call: its first buffer is the arguments, pointers stand where a buffer's number is noted."""

    buffers: list[Any] = field(default_factory=list)
    pointers: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, data: bytes | np.ndarray[Any, Any] | ctypes.Structure) -> int:
        """The number of a new buffer."""
        self.buffers.append(bytes(data) if not isinstance(data, np.ndarray) else np.ascontiguousarray(data).tobytes())
        return len(self.buffers) - 1

    def words(self, at: int, *values: int | float | tuple[int]) -> None:
        """Write eight bytes each into buffer ``at``: an integer, a float, or a buffer's number in a tuple, a pointer."""
        out = b""
        for value in values:
            if isinstance(value, tuple):
                self.pointers.append((at, len(out), value[0]))
                out += bytes(8)
            else:
                out += struct.pack("<d" if isinstance(value, float) else "<q", value)
        self.buffers[at] = out

    def call(self, name: str, *, linear: bool = False) -> Callable[[int, str], np.ndarray[Any, Any]]:
        """Run it; returns what reads a buffer after it."""
        packed = struct.pack("<I", len(name)) + name.encode() + struct.pack("<II", int(linear), len(self.buffers))
        packed += b"".join(struct.pack("<Q", len(one)) + one for one in self.buffers)
        packed += struct.pack("<I", len(self.pointers)) + b"".join(struct.pack("<IQI", *one) for one in self.pointers)
        done = subprocess.run([*shlex.split(EMULATOR), LIBRARY], input=packed, stdout=subprocess.PIPE, check=True)
        assert struct.unpack_from("<i", done.stdout)[0] == 0
        starts = np.cumsum([4, *(len(one) for one in self.buffers)]).tolist()
        return lambda number, dtype: np.frombuffer(done.stdout[starts[number] : starts[number + 1]], dtype=dtype)


def weight_of(name: str, n: int, k: int) -> torch.Tensor | QuantTensor:
    values = torch.randn(n, k, generator=torch.Generator().manual_seed(0))
    if name in ("float32", "bfloat16", "float16"):
        return values.to(getattr(torch, name))
    if not name.endswith("_k"):
        return quant.quantize(values, name)
    elements, size_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    raw = np.random.default_rng(0).integers(0, 256, (n, k // elements * size_bytes), dtype=np.uint8)
    return QuantTensor(name, (n, k), torch.from_numpy(raw & np.uint8(0x3B)))


def raw_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("name", CODES)
def test_products_of_every_format(name, rows) -> None:
    n, k = 19, 512
    weight, x = weight_of(name, n, k), torch.randn(rows, k)
    request = Request()
    arguments, out, given = request.add(b""), request.add(bytes(rows * n * 4)), request.add(x.numpy())
    data = weight if isinstance(weight, torch.Tensor) else weight.data
    matrix = CMatrix(n=n, k=k, row_bytes=data.shape[1] * data.element_size(), format=CODES[name])
    scale = zero = None
    if isinstance(weight, QuantTensor) and weight.scale is not None:
        scale = request.add(weight.scale.float().numpy())
        matrix.group = k // weight.scale.shape[1] if name == "int4_group" else 0
        zero = None if weight.zero is None else request.add(raw_of(weight.zero))
    part = request.add(matrix)
    for field_name, number in (("data", request.add(raw_of(data))), ("scale", scale), ("zero", zero)):
        if number is not None:
            request.pointers.append((part, getattr(CMatrix, field_name).offset, number))
    call = request.add(CLinearCall(num_parts=1, n=n, k=k))
    request.pointers.append((call, CLinearCall.parts.offset, part))
    request.words(arguments, (call,), (out,), n, (given,), k, rows, 0)
    got = request.call("vllm_linear", linear=True)(out, "<f4").reshape(rows, n)
    expected = x.double() @ quant.decode(weight, torch.float32).double().t()
    assert (torch.from_numpy(got.copy()) - expected).abs().max() < 2e-6 * expected.abs().max()


def test_norms() -> None:
    x, weight = torch.randn(5, 70), torch.rand(70)
    request = Request()
    arguments, out = request.add(b""), request.add(bytes(5 * 70 * 4))
    pointers = (0, (out,), (request.add(x.numpy()),), 0, (request.add(weight.numpy()),), 0)
    request.words(arguments, *pointers, 5, 1, 70, 70, 70, 0, 1e-6)
    got = torch.from_numpy(request.call("vllm_rms_norm")(out, "<f4").reshape(5, 70).copy())
    torch.testing.assert_close(got, torch.nn.functional.rms_norm(x, (70,), weight, 1e-6), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("dtype", [0, 1, 2, 16, 17, 18])
def test_attention_over_keys_and_values_that_were_written(dtype, has_sinks) -> None:
    tokens, heads, kv_heads, size, block = 40, 6, 2, 32, 16
    q, k, v = torch.randn(tokens, heads, size), torch.randn(tokens, kv_heads, size), torch.randn(tokens, kv_heads, size)
    layout = Request()
    layout.words(layout.add(b""), 0, 0, 0, kv_heads, size, block, dtype)
    block_bytes = int(layout.call("vllm_kv_layout")(0, "<i8")[2])
    written = Request()
    arguments, blocks = written.add(b""), written.add(bytes(4 * block_bytes))
    struct_ = CKV(
        num_blocks=4, block_bytes=block_bytes, num_heads=kv_heads, head_size=size, tokens_per_block=block, dtype=dtype
    )
    kv = written.add(struct_)
    written.pointers.append((kv, CKV.blocks.offset, blocks))
    slots = written.add(np.arange(tokens, dtype=np.int64) + block)
    stride = kv_heads * size
    pointers = (0, (kv,), (written.add(k.numpy()),), (written.add(v.numpy()),), (slots,))
    written.words(arguments, *pointers, stride, stride, tokens, 0)
    memory = written.call("vllm_kv_write")(blocks, "u1")
    request = Request()
    arguments, out = request.add(b""), request.add(bytes(tokens * heads * size * 4))
    kv, held = request.add(struct_), request.add(memory)
    request.pointers.append((kv, CKV.blocks.offset, held))
    ints = [np.array(values, dtype=np.int32) for values in ([0, tokens], [tokens], [1, 2, 3])]
    starts, lengths, table = (request.add(values) for values in ints)
    pointers = (0, (out,), (request.add(q.numpy()),), (kv,), (starts,), (lengths,), (table,))
    wide = heads * size
    sinks = torch.linspace(-5, 5, heads) if has_sinks else torch.full((heads,), float("-inf"))
    given = (request.add(sinks.numpy()),) if has_sinks else 0
    request.words(arguments, *pointers, wide, wide, 3, 1, heads, 0, 0, 0.2, 0.0, given)
    got = request.call("vllm_paged_attention")(out, "<f4").reshape(tokens, heads, size)
    keys, values = (one.repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for one in (k, v))
    scores = (q.transpose(0, 1) @ keys.mT * 0.2).masked_fill(torch.ones(tokens, tokens).triu(1).bool(), float("-inf"))
    weights = torch.cat((scores, sinks[:, None, None].expand(-1, tokens, 1)), -1).softmax(-1)[..., :-1]
    expected = weights @ values
    tolerance = {0: 1e-5, 1: 2e-2, 2: 2e-3, 16: 3e-2, 17: 0.15, 18: 0.3}[dtype]
    torch.testing.assert_close(torch.from_numpy(got.copy()), expected.transpose(0, 1), rtol=tolerance, atol=tolerance)
