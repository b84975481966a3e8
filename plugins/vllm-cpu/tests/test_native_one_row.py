"""One row in eight bits against packed weights, by every variant that this CPU runs: all bits of a format count."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from vllm_core.api import QuantTensor
from vllm_core.ops import quant
from vllm_cpu import native

if "linear" not in native.load().ops:
    pytest.skip(f"no library: {native.load()}", allow_module_level=True)

from vllm_cpu.ops import native_linear as ops

HALVES = {"q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,)}
HALVES |= {"q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}
"""Where in a block of a format its halves lie; every other byte may have any value."""

EXACT = ("baseline", "neon")
"""Variants that round no inputs."""

VARIANTS = (*EXACT, "avx2", "avx512vnni")


def weight_of(name: str, n: int, k: int) -> QuantTensor:
    """Random bytes, with halves of either sign below one."""
    generator = np.random.default_rng(n + k)
    elements, size_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    raw = generator.integers(0, 256, (n, k // elements, size_bytes), dtype=np.uint8)
    for at in HALVES[name]:
        halves = generator.uniform(-1, 1, (n, k // elements, 1)).astype(np.float16)
        raw[:, :, at : at + 2] = halves.view(np.uint8)
    return QuantTensor(name, (n, k), torch.from_numpy(raw.reshape(n, -1)))


def eight_bits(x: torch.Tensor) -> torch.Tensor:
    """In float64: each 32 numbers as whole multiples of a 127th of the largest."""
    blocks = x.view(-1, 32)
    most = blocks.abs().amax(1, keepdim=True)
    return ((blocks * (127 / most)).round().double() * (most / 127).double()).view(x.shape)


@pytest.fixture(params=VARIANTS)
def variant(request):
    library = native.load().library
    if library.vllm_ops_use(request.param.encode()):
        pytest.skip("not on this CPU")
    yield request.param
    assert library.vllm_ops_use(native.load().variant.encode()) == 0


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 7, 18])
def test_a_row_of_any_width_is_the_product_of_rounded_inputs(name, blocks, variant) -> None:
    """Blocks are taken four at a time, and what is left of them two and one."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]][0]
    weight, n = weight_of(name, 7, blocks * size), 7
    generator = torch.Generator().manual_seed(blocks)
    x, out = torch.randn(1, blocks * size, generator=generator), torch.empty(1, n)
    ops.linear(out, x, ops.linear_pack_int8(weight, None, ["a"]))
    given = x.double() if variant in EXACT else eight_bits(x)
    decoded = quant.decode(weight, torch.float32).double()
    scale = (given.abs() @ decoded.abs().t()).max()
    assert ((out.double() - given @ decoded.t()).abs().max() / scale).item() < 3e-7


@pytest.mark.parametrize("name", HALVES)
def test_rows_beside_each_other_have_the_bits_of_each_alone(name, variant) -> None:
    size = 6 * gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]][0]
    weight = ops.linear_pack_int8(weight_of(name, 37, size), None, ["a"])
    x = torch.randn(3, size, generator=torch.Generator().manual_seed(0))
    together, alone = torch.empty(3, 37), torch.empty(3, 37)
    ops.linear(together, x, weight)
    for row in range(3):
        ops.linear(alone[row : row + 1], x[row : row + 1], weight)
    assert torch.equal(together, alone)
