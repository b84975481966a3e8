"""The library's products and embeddings against core's references, over formats, shapes and numbers of rows."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from vllm_core.api import QuantStack, QuantTensor, UnsupportedError
from vllm_core.ops import activation as reference_rows
from vllm_core.ops import linear as reference
from vllm_core.ops import quant
from vllm_cpu import native

if "linear" not in native.load().ops:
    pytest.skip(f"no library: {native.load()}", allow_module_level=True)

from vllm_cpu.ops import native_linear as ops

FLOATS = ("float32", "bfloat16", "float16")
SMALL = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "int8_channel", "int4_group")
LARGE = ("q4_k", "q5_k", "q6_k")
ROWS = (1, 2, 3, 4, 5, 7, 48, 50)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def weight_of(name: str, n: int, k: int, seed: int = 0) -> torch.Tensor | QuantTensor:
    """Random weights of a format; K-quants have no writer, so their bytes are drawn."""
    values = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    if name in FLOATS:
        return values.to(getattr(torch, name))
    if name in SMALL:
        return quant.quantize(values, name)
    elements, size_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    raw = np.random.default_rng(seed).integers(0, 256, (n, k // elements * size_bytes), dtype=np.uint8)
    # Small exponents everywhere keep the scales, wherever they lie, finite.
    return QuantTensor(name, (n, k), torch.from_numpy(raw & np.uint8(0x3B)))


def error_of(out: torch.Tensor, x: torch.Tensor, weight) -> float:
    """Greatest difference from the product in float64, relative to its greatest number."""
    expected = x.double() @ quant.decode(weight, torch.float32).double().t()
    return ((out.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("name", [*FLOATS, *SMALL, *LARGE])
@pytest.mark.parametrize(("n", "k"), [(1, 256), (37, 512), (66, 1280)])
def test_products_are_those_of_decoded_weights_and_do_not_depend_on_the_number_of_rows(name, n, k) -> None:
    weight = weight_of(name, n, k)
    packed = ops.linear_pack(weight, None, ["a"])
    x = torch.randn(max(ROWS), k, generator=torch.Generator().manual_seed(1))
    first = None
    for rows in ROWS:
        out = torch.full((rows, n), torch.nan)
        ops.linear(out, x[:rows], packed)
        assert error_of(out, x[:rows], weight) < TOLERANCE[torch.float32], rows
        first = out[0] if first is None else first
        assert torch.equal(out[0], first), rows


@pytest.mark.parametrize("name", [*FLOATS, "int8_channel"])
@pytest.mark.parametrize(("n", "k"), [(3, 1), (5, 77), (4, 1031)])
def test_rows_that_are_no_whole_vectors_read_nothing_behind_them(name, n, k) -> None:
    weight = weight_of(name, n, k)
    x = torch.randn(6, k)
    for rows in (1, 6):
        out = torch.empty(rows, n)
        ops.linear(out, x[:rows], ops.linear_pack(weight, None, ["a"]))
        assert error_of(out, x[:rows], weight) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "q4_1", "q8_0"])
@pytest.mark.parametrize("rows", [1, 9])
def test_inputs_and_outputs_of_each_dtype_with_strides_and_bias(dtype, name, rows) -> None:
    weight, bias = weight_of(name, 40, 128), torch.randn(40)
    wide, kept = torch.randn(rows, 200).to(dtype), torch.full((rows, 64), 7.0).to(dtype)
    out = kept[:, :40]
    ops.linear(out, wide[:, 8:136], ops.linear_pack(weight, bias, ["a"]))
    expected = wide[:, 8:136].float() @ quant.decode(weight, torch.float32).t() + bias
    torch.testing.assert_close(out.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 40)
    assert (kept[:, 40:] == 7).all()


@pytest.mark.parametrize("rows", [100, 140])
@pytest.mark.parametrize(("n", "k"), [(33, 77), (64, 96)])
def test_many_rows_of_bfloat16_times_bfloat16(n, k, rows) -> None:
    """CPUs with instructions for it take 16 rows at a time, or 32; beyond 128 weights are turned instead of rows."""
    weight, bias, x = weight_of("bfloat16", n, k), torch.randn(n), torch.randn(rows, k).bfloat16()
    out = torch.empty(rows, n)
    ops.linear(out, x, ops.linear_pack(weight, bias, ["a"]))
    assert error_of(out - bias, x, weight) < 1e-5


@pytest.mark.parametrize("rows", [129, 160])
def test_many_rows_of_bfloat16_that_lie_apart(rows) -> None:
    """Tiles of AMX take them from where they are, and nothing behind the last."""
    weight, wide = weight_of("q4_1", 70, 96), torch.full((rows, 200), torch.nan).bfloat16()
    x = wide[:, 8:104]
    x.copy_(torch.randn(rows, 96, generator=torch.Generator().manual_seed(1)))
    out = torch.empty(rows, 70)
    ops.linear(out, x, ops.linear_pack(weight, None, ["a"]))
    in_bfloat16 = quant.decode(weight, torch.float32).bfloat16()
    assert min(error_of(out, x, weight), error_of(out, x, in_bfloat16)) < 1e-5


@pytest.mark.parametrize("rows", [5, 140])
def test_a_gate_of_large_numbers_in_bfloat16(rows) -> None:
    """Its exponentials neither overflow nor lose numbers near one."""
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    factors = torch.tensor([1e-3, 1.0, 30.0, 1e6, -1e6]).repeat(16)[:, None]
    weight = torch.cat((weight_of("float32", 80, 64) * factors, weight_of("float32", 80, 64, 1))).bfloat16()
    out = torch.empty(rows, 80).bfloat16()
    ops.product(out, x, ops.linear_pack(weight, None, ["a"]), ops.GATES["silu"])
    both = x.double() @ weight.double().t()
    gate, up = both[:, :80], both[:, 80:]
    wanted = torch.nn.functional.silu(gate) * up
    # A gate's own error counts as much as it has digits.
    torch.testing.assert_close(out.double(), wanted, rtol=8e-3, atol=1e-3)


@pytest.mark.parametrize("name", [*SMALL, *LARGE])
@pytest.mark.parametrize("rows", [5, 16, 33, 130])
def test_rows_of_bfloat16_times_packed_weights(name, rows) -> None:
    """Exact, or, by the tiles of AMX, with weights in bfloat16 as a model in bfloat16 has them."""
    weight, x = weight_of(name, 37, 512), torch.randn(rows, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = torch.empty(rows, 37)
    ops.linear(out, x, ops.linear_pack(weight, None, ["a"]))
    in_bfloat16 = quant.decode(weight, torch.float32).bfloat16()
    assert min(error_of(out, x, weight), error_of(out, x, in_bfloat16)) < 1e-5


@pytest.mark.parametrize("name", ["bfloat16", "q4_1", "q8_0"])
def test_products_of_bfloat16_do_not_depend_on_how_many_more_than_a_few_rows_there_are(name) -> None:
    """Whichever factor is turned for tiles of AMX, and however many columns a task takes."""
    packed = ops.linear_pack(weight_of(name, 200, 320), None, ["a"])
    x = torch.randn(150, 320, generator=torch.Generator().manual_seed(1)).bfloat16()
    first = None
    for rows in (150, 128, 40, 7):
        out, there = torch.full((rows, 200), torch.nan).bfloat16(), torch.ones(rows, 200).bfloat16()
        ops.linear(out, x[:rows], packed)
        ops.linear_add(there, torch.empty(rows, 200).bfloat16(), x[:rows], packed)
        first = (out, there) if first is None else first
        assert torch.equal(out, first[0][:rows]), rows
        assert torch.equal(there, first[1][:rows]), rows


@pytest.mark.parametrize("rows", [9, 40, 140])
@pytest.mark.parametrize("half", [48, 40])
@pytest.mark.parametrize("name", ["bfloat16", "q4_1"])
def test_a_gate_between_products_of_bfloat16(rows, half, name) -> None:
    """Pieces of 16 columns of the gate are pieces of what it gates at 48, and not at 40."""
    weight, bias, norm = weight_of(name, 2 * half, 64), torch.randn(2 * half), torch.rand(64).bfloat16()
    packed, plain = ops.linear_pack(weight, bias, ["a"]), reference.linear_pack(weight, bias, ["a"])
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    out, expected, wide = (torch.empty(rows, size).bfloat16() for size in (half, half, 2 * half))
    scratch = torch.empty_like(x)
    ops.rms_norm_gated_linear(out, wide, scratch, x, norm, 1e-6, packed, "silu")
    reference.rms_norm_gated_linear(expected, wide, scratch, x, norm, 1e-6, plain, "silu")
    assert ((out.float() - expected.float()).abs().max() / expected.abs().max()).item() < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_fused_ops_are_their_decompositions(rows, kind) -> None:
    weight = weight_of("q4_1", 96, 64)
    packed, plain = ops.linear_pack(weight, None, ["a"]), reference.linear_pack(weight, None, ["a"])
    x, norm = torch.randn(rows, 64), torch.rand(64)
    got, expected, scratch = torch.empty(rows, 96), torch.empty(rows, 96), torch.empty(rows, 64)
    ops.rms_norm_linear(got, scratch, x, norm, 1e-6, packed)
    reference.rms_norm_linear(expected, scratch, x, norm, 1e-6, plain)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    gated, wanted, wide = torch.empty(rows, 48), torch.empty(rows, 48), torch.empty(rows, 96)
    ops.rms_norm_gated_linear(gated, wide, scratch, x, norm, 1e-6, packed, kind)
    reference.rms_norm_gated_linear(wanted, wide, scratch, x, norm, 1e-6, plain, kind)
    torch.testing.assert_close(gated, wanted, rtol=1e-5, atol=1e-4)
    residual = torch.randn(rows, 96)
    added = residual.clone()
    ops.linear_add(added, torch.empty(rows, 96), x, packed)
    reference.linear_add(residual, torch.empty(rows, 96), x, plain)
    torch.testing.assert_close(added, residual, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 4, 12])
def test_a_stack_of_formats_is_its_parts_on_top_of_each_other(rows) -> None:
    stack = QuantStack((weight_of("q4_k", 24, 256), weight_of("q6_k", 7, 256, 1), weight_of("float32", 9, 256, 2)))
    x, out = torch.randn(rows, 256), torch.empty(rows, 40)
    ops.linear(out, x, ops.linear_pack(stack, None, ["q", "k", "v"]))
    assert error_of(out, x, stack) < TOLERANCE[torch.float32]


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows in eight bits, a scale for each 32."""
    blocks = x.view(len(x), -1, 32)
    step = blocks.abs().amax(-1, keepdim=True) / 127
    return ((blocks / step).round() * step).view(x.shape)


@pytest.mark.parametrize("name", [*SMALL, *LARGE])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 35])
def test_rounded_inputs_give_the_product_of_rounded_inputs(name, rows) -> None:
    """Few rows and many take other kernels; 33 columns are no whole panels."""
    weight = weight_of(name, 33, 512)
    x, out = torch.randn(rows, 512), torch.empty(rows, 33)
    ops.linear(out, x, ops.linear_pack_int8(weight, None, ["a"]))
    assert error_of(out, rounded(x), weight) < 1e-3
    assert error_of(out, x, weight) < 2e-2


@pytest.mark.parametrize("name", ["q4_0", "q5_1", "q8_0", "int8_channel", "int4_group"])
def test_sums_of_sixteen_bits_never_overflow(name) -> None:
    """The largest numbers on both sides, all of one sign."""
    weight = quant.quantize(torch.full((16, 256), 2.0) * torch.tensor([1.0, -1.0]).repeat(8)[:, None], name)
    for sign in (1.0, -1.0):
        x, out = torch.full((6, 256), sign * 3.0), torch.empty(6, 16)
        ops.linear(out, x, ops.linear_pack_int8(weight, None, ["a"]))
        assert error_of(out, x, weight) < 1e-4


@pytest.mark.parametrize("rows", [2, 9])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("half", [48, 40])
def test_a_gate_between_rounding_products_is_the_reference_on_rounded_inputs(rows, kind, half) -> None:
    """48 columns are whole panels and are gated there, 40 are not."""
    weight, bias = weight_of("q4_1", 2 * half, 64), torch.randn(2 * half)
    packed = ops.linear_pack_int8(weight, bias, ["gate", "up"])
    x, norm = torch.randn(rows, 64), torch.rand(64) + 0.5
    out = torch.empty(rows, half)
    ops.rms_norm_gated_linear(out, torch.empty(rows, 2 * half), torch.empty(rows, 64), x, norm, 1e-6, packed, kind)
    normed = rounded(torch.nn.functional.rms_norm(x, (64,), norm, 1e-6))
    wide = normed @ quant.decode(weight, torch.float32).t() + bias
    expected = torch.empty(rows, half)
    reference_rows.gated_activation(expected, wide, kind)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 7])
def test_rounding_products_add_to_what_is_there_over_parts_of_several_formats(rows) -> None:
    stack = QuantStack((weight_of("q4_k", 24, 256), weight_of("q6_k", 7, 256, 1), weight_of("q8_0", 16, 256, 2)))
    x, there = torch.randn(rows, 256), torch.randn(rows, 47)
    out = there.clone()
    ops.linear_add(out, torch.empty(rows, 47), x, ops.linear_pack_int8(stack, None, ["q", "k", "v"]))
    assert error_of(out - there, rounded(x), stack) < 1e-3


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_where_inputs_are_rounded(rows, value) -> None:
    x, out = torch.randn(rows, 64), torch.zeros(rows, 16)
    x[-1, 40] = value
    ops.linear(out, x, ops.linear_pack_int8(weight_of("q4_1", 16, 64), None, ["a"]))
    assert not out[-1].isfinite().any()
    assert out[:-1].isfinite().all()


def test_zero_inputs_of_rounding_products_give_zeros() -> None:
    out = torch.full((1, 8), torch.nan)
    ops.linear(out, torch.zeros(1, 64), ops.linear_pack_int8(weight_of("q4_1", 8, 64), None, ["a"]))
    assert torch.equal(out, torch.zeros(1, 8))


@pytest.mark.parametrize("name", [*FLOATS, *SMALL, *LARGE])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_embeddings_are_decoded_rows_and_zeros_where_another_worker_holds_them(name, ids_dtype) -> None:
    table = weight_of(name, 20, 512)
    ids = torch.tensor([3, 19, 0, 3], dtype=ids_dtype)
    out = torch.empty(4, 512)
    ops.embedding(out, ids, table, 2.0)
    torch.testing.assert_close(out, quant.decode(table, torch.float32)[ids.long()] * 2, rtol=2e-6, atol=2e-6)
    ops.embedding_shard(out, ids, table, 10, 1.0)
    assert out[:1].count_nonzero() == 0
    torch.testing.assert_close(out[1], quant.decode(table, torch.float32)[9], rtol=2e-6, atol=2e-6)


def test_what_has_no_kernel_is_refused() -> None:
    groups = QuantTensor(
        "int4_group", (4, 48), torch.zeros(4, 24, dtype=torch.uint8), torch.ones(4, 3), torch.zeros(4, 3, dtype=torch.uint8)
    )
    with pytest.raises(UnsupportedError, match="multiple of 32"):
        ops.linear_pack(groups, None, ["a"])
    with pytest.raises(UnsupportedError, match="has no kernel"):
        ops.linear_pack(QuantTensor("q3_k", (1, 256), torch.zeros(1, 110, dtype=torch.uint8)), None, ["a"])


def test_every_variant_that_this_cpu_runs_agrees() -> None:
    library = native.load().library
    assert library is not None
    weight = weight_of("q5_k", 19, 512)
    x = torch.randn(7, 512)
    ran = []
    try:
        for name in (b"baseline", b"avx2", b"avx512vnni"):
            if library.vllm_ops_use(name) == 0:
                out = torch.empty(7, 19)
                ops.linear(out, x, ops.linear_pack(weight, None, ["a"]))
                assert error_of(out, x, weight) < TOLERANCE[torch.float32], name
                ran.append(name)
    finally:
        assert library.vllm_ops_use(native.load().variant.encode()) == 0
    assert ran[0] == b"baseline"
