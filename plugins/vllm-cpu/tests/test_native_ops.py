"""Every op of the native library against core's reference: dtypes, KV dtypes, and the variants that this machine runs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional

from vllm_core.api import KVGroupSpec, UnsupportedError, load_entry
from vllm_core.ops import check, inputs
from vllm_cpu import native, native_kv
from vllm_cpu.backends import native as native_offers

OPS = sorted({name for offer in native_offers.offers() for name in offer.ops})
KV = ("kv_write", "kv_copy", "kv_export", "kv_import", "paged_attention")
VARIANTS = ("baseline", "avx2", "avx512", "avx512vnni", "neon")


@pytest.fixture
def use(library):
    """Switches the library to a variant, for the test."""

    def switch(name: str) -> None:
        status = library.vllm_ops_use(name.encode())
        if status:
            pytest.skip(f"no {name} kernels in this build" if status == 2 else f"this CPU does not run {name}")

    yield switch
    library.vllm_ops_use(native.load().variant.encode())


def test_the_library_of_this_build_is_whole() -> None:
    """What other tests run over is empty where nothing was built; then this one says so."""
    if native.load().library is None:
        pytest.skip(str(native.load()))
    assert len(OPS) >= 25


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("op", OPS)
def test_op_equals_its_reference(op, dtype, native_provider) -> None:
    for shape_class in inputs.SHAPE_CLASSES[op]:
        for seed in range(4) if dtype == "float32" and shape_class != "long" else (3,):
            assert check.mismatches(op, native_provider, dtype, seed, shape_class) == [], (shape_class, seed)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "int8", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("op", KV)
def test_every_kv_dtype_is_kept_and_read(op, kv_dtype, native_provider) -> None:
    for shape_class in ("decode", "mixed", "gqa", "block_edges/b32"):
        assert check.mismatches(op, native_provider, "float32", 1, f"{shape_class}/kv_{kv_dtype}") == [], shape_class


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "fp8"])
def test_what_no_query_may_see_is_not_read(kv_dtype, native_provider) -> None:
    for shape_class in ("decode/window", "mixed", "block_edges/window7", "gqa/window/cap"):
        name = f"{shape_class}/rest/kv_{kv_dtype}"
        assert check.mismatches("paged_attention", native_provider, "float32", 3, name) == [], name


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sinks_count_once_however_keys_are_shared_out(dtype, threads, library, native_provider) -> None:
    """Long sequences of few heads are cut into spans, one a task, where there are threads for them."""
    library.vllm_ops_set_threads(threads)
    try:
        for shape_class in ("one_token", "long", "thousands/q4/k1", "mixed/window", "gqa/cap", "decode/q64/k8"):
            assert check.mismatches("paged_attention", native_provider, dtype, 1, f"{shape_class}/sinks") == [], shape_class
    finally:
        library.vllm_ops_set_threads(0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "gated_activation", "soft_cap", "sample", "log_probabilities"])
def test_small_ops_equal_their_references_in_every_variant(op, variant, use, native_provider) -> None:
    use(variant)
    for shape_class in inputs.SHAPE_CLASSES[op][:4]:
        for seed in range(2):
            assert check.mismatches(op, native_provider, "float32", seed, shape_class) == [], (shape_class, seed)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16", "int8", "fp8", "fp8_e5m2"])
def test_attention_equals_its_reference_in_every_variant(kv_dtype, variant, use, native_provider) -> None:
    use(variant)
    for shape_class in ("decode", "mixed/b8/d64", "gqa/cap", "block_edges/b3/d20", "gqa/sinks", "decode/q16/k2/window/sinks"):
        for op in ("paged_attention", "kv_write"):
            assert check.mismatches(op, native_provider, "float32", 2, f"{shape_class}/kv_{kv_dtype}") == [], shape_class


GELU_TANH = partial(functional.gelu, approximate="tanh")
EXACT = {"silu": functional.silu, "gelu": functional.gelu, "gelu_tanh": GELU_TANH, "relu": torch.relu}


@pytest.mark.parametrize("kind", EXACT)
def test_activations_hold_over_the_whole_range(kind, native_ops) -> None:
    x = torch.linspace(-100, 100, 40_001)[None]
    out = torch.empty_like(x)
    native_ops["activation"](out, x, kind)
    torch.testing.assert_close(out.double(), EXACT[kind](x.double()), rtol=2e-6, atol=5e-7)


def test_float8_rounds_to_the_nearest_and_stops_at_the_largest(library) -> None:
    """Every number between two neighbours, and beyond the last."""
    ops = load_entry("vllm_cpu.ops.native_attention:kv_bind"), load_entry("vllm_cpu.ops.native_attention:kv_import")
    export = load_entry("vllm_cpu.ops.native_attention:kv_export")
    for name, dtype, most in (("fp8_e4m3", torch.float8_e4m3fn, 448.0), ("fp8_e5m2", torch.float8_e5m2, 57344.0)):
        known = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        known = known[known.isfinite()].unique()
        steps = torch.cat([known, (known[1:] + known[:-1]) / 2, known * 1.03, known * 0.97]).clamp(-most, most)
        values = torch.cat([steps, torch.tensor([1e6, -1e6, 3e38, float("nan")])])
        values = torch.nn.functional.pad(values, (0, -len(values) % 16)).view(1, 1, 1, 1, -1).repeat(1, 2, 1, 1, 1)
        group = KVGroupSpec(index=0, kind="full", layers=(0,), num_kv_heads=1, head_size=values.shape[-1])
        size = native_kv.kv_layout(group, name, 1).block_bytes
        kv = ops[0](torch.zeros(1, size, dtype=torch.uint8), 1, values.shape[-1], name, 1)
        ops[1](kv, values, torch.tensor([0]))
        out = torch.empty_like(values)
        export(out, kv, torch.tensor([0]))
        expected = values.clamp(-most, most).to(dtype).float()
        assert torch.equal(out.nan_to_num(nan=7777.0), expected.nan_to_num(nan=7777.0)), name


def test_an_unknown_kv_dtype_is_refused_by_name(library) -> None:
    group = KVGroupSpec(index=0, kind="full", layers=(0,), num_kv_heads=1, head_size=8)
    with pytest.raises(UnsupportedError, match="int3"):
        native_kv.kv_layout(group, "int3", 16)


def test_places_that_do_not_exist_are_refused_and_nothing_is_written(native_ops) -> None:
    group = KVGroupSpec(index=0, kind="full", layers=(0,), num_kv_heads=1, head_size=8)
    size = native_kv.kv_layout(group, "float32", 4).block_bytes
    memory = torch.zeros(3, size, dtype=torch.uint8)
    kv, k = native_ops["kv_bind"](memory, 1, 8, "float32", 4), torch.ones(1, 1, 8)
    for slot in (-1, 12):
        with pytest.raises(UnsupportedError, match="status 2"):
            native_ops["kv_write"](kv, k, k, torch.tensor([slot]))
    starts, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    for table in ([[1, 3]], [[1]]):  # a block that is not there; a table that is too short
        block_table = torch.tensor(table, dtype=torch.int32)
        with pytest.raises(UnsupportedError, match="status 2"):
            native_ops["paged_attention"](torch.empty(1, 1, 8), k, kv, starts, lengths, block_table, 1, 5, 1.0, 0, 0.0)
    assert not memory.any()
