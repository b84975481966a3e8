"""Compile the kernels that steps launch, for one architecture: ``compiled.py sm_90 ROWSxQUERIES... [rest] [experts] [large]``.

The rest are those of quantised weights and caches, encoders, and log-probabilities; the large attend heads of 256.
The launchers run on host tensors with Triton's launch replaced by a recorder, so that what is compiled is what they ask
for. Prints a line of JSON per kernel: name, shared memory in bytes, registers and stack of a thread. A process of its own,
since a compiler that meets an unsupported type may abort.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from vllm_core.api import BatchState, StepInputs
from vllm_core.api import batch as layout
from vllm_cuda.backends.families import family_of
from vllm_triton import tuning
from vllm_triton.offers import block_bytes_of

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
}
OPTIONS = {"num_warps", "num_stages", "launch_pdl"}
KV_DTYPES = ("bfloat16", "fp8", "fp8_e5m2", "int8")
EVERYTHING = 0x1FF
"""Feature bits of a request that asks for all that sampling has."""

HIDDEN, INNER, HEADS, KV_HEADS, SIZE, VOCABULARY, BLOCK = 1024, 3072, 16, 8, 128, 151936, 64


class Recorder:
    """Stands in for the launch of any kernel."""

    def __init__(self) -> None:
        self.launches: dict[str, tuple[JITFunction[Any], dict[str, Any], dict[str, Any]]] = {}

    def __call__(self, kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS & set(kwargs)}
        values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        kinds = [value.dtype if isinstance(value, torch.Tensor) else value for value in values.values()]
        self.launches[f"{kernel.__name__} {kinds} {options}"] = (kernel, values, options)


def source_of(kernel: JITFunction[Any], values: dict[str, Any]) -> ASTSource:
    """The specialisation that a launch with these values gets."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            if value == 1 and not parameter.do_not_specialize:
                signature[parameter.name], constants[parameter.name] = "constexpr", 1
                continue
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def launch_all(rows: int, queries: int, kv_dtypes: tuple[str, ...] = ("bfloat16",)) -> None:
    """What a step of ``rows`` sequences with ``queries`` tokens each launches."""
    from vllm_triton.ops import attention, batch, cache, elementwise, fresh, linear, norm, sampling

    tokens, kind = rows * queries, torch.bfloat16
    state = BatchState(
        num_slots=256,
        tokens=torch.zeros(257, 4097, dtype=torch.int32),
        computed=torch.zeros(257, dtype=torch.int32),
        params=torch.zeros(257, layout.ADMIT_WORDS, dtype=torch.int32),
        bias_ids=torch.zeros(257, layout.MAX_BIAS, dtype=torch.int32),
        bias_values=torch.zeros(257, layout.MAX_BIAS),
        stop_ids=torch.zeros(257, layout.MAX_STOP, dtype=torch.int32),
        bad_words=torch.zeros(257, layout.MAX_BAD_WORDS, dtype=torch.int32),
        block_tables=(torch.zeros(257, 65, dtype=torch.int32),),
        tokens_per_block=(BLOCK,),
    )
    header = [1, 1, 4, 1, 1, rows, tokens, rows, queries, 4096, *[0] * 6]
    packed = torch.zeros(layout.HEADER_WORDS + layout.ADMIT_WORDS + 4 + 4 + 5 + 4 * rows, dtype=torch.int32)
    batch.batch_update(state, packed, header)
    inputs: StepInputs = batch.build_step(state, packed, header)
    hidden, residual = torch.zeros(tokens, HIDDEN, dtype=kind), torch.zeros(tokens, HIDDEN, dtype=kind)
    weight = torch.ones(HIDDEN)
    elementwise.embedding(residual, inputs.token_ids, torch.zeros(1024, HIDDEN, dtype=kind), 1.0)
    norm.rms_norm(hidden, residual, weight, 1e-6)
    norm.add_rms_norm(hidden, residual, hidden, weight, 1e-6)
    qkv = torch.zeros(tokens, HEADS + 2 * KV_HEADS, SIZE, dtype=kind)
    q, k, v = qkv[:, :HEADS], qkv[:, HEADS : HEADS + KV_HEADS], qkv[:, HEADS + KV_HEADS :]
    table, ones = torch.zeros(4097, 2, SIZE // 2), torch.ones(SIZE)
    (mapping,), (blocks,) = inputs.slot_mapping, inputs.block_tables
    out = torch.zeros(tokens, HEADS, SIZE, dtype=kind)
    bounds = (inputs.query_start, inputs.seq_lens, blocks, queries, 4096, 0.1)
    for dtype in kv_dtypes:
        memory = torch.zeros(2, block_bytes_of(KV_HEADS, SIZE, dtype, BLOCK), dtype=torch.uint8)
        kv = cache.kv_bind(memory, KV_HEADS, SIZE, dtype, BLOCK)
        cache.qk_norm_rope_kv_write(q, k, v, ones, ones, 1e-6, inputs.positions, table, False, kv, mapping)
        cache.kv_write(kv, k, v, mapping)
        attention.paged_attention(out, q, kv, *bounds, 0, 0.0)
        heads = (q, k, v, ones, ones, 1e-6, inputs.positions, table, False)
        fresh.qk_norm_rope_attention(out, *heads, kv, mapping, *bounds, 0, 0.0)
    sinks = torch.zeros(HEADS)
    for more in ((), (sinks,)):
        attention.paged_attention(out, q, kv, *bounds, 512, 30.0, *more)
    attention.paged_attention(out, q, kv, *bounds, 0, 0.0, sinks)
    fresh.qk_norm_rope_attention(out, *heads, kv, mapping, *bounds, 0, 0.0, sinks)
    # Eight heads share one: spans of a row are put together for four of them at a time.
    memory = torch.zeros(2, block_bytes_of(2, SIZE, "bfloat16", BLOCK), dtype=torch.uint8)
    attention.paged_attention(out, q, cache.kv_bind(memory, 2, SIZE, "bfloat16", BLOCK), *bounds, 0, 0.0)
    if tokens <= linear.FEW_SMALL:
        # More rows are cuBLAS's, which needs no compiler.
        for shape in ((4096, HIDDEN), (HIDDEN, 2048)):
            packed_weight = linear.linear_pack(torch.zeros(shape, dtype=kind), None, ())
            linear.linear(torch.zeros(tokens, shape[0], dtype=kind), torch.zeros(tokens, shape[1], dtype=kind), packed_weight)
        down = linear.linear_pack(torch.zeros(HIDDEN, INNER, dtype=kind), None, ())
        linear.linear_add(residual, hidden, torch.zeros(tokens, INNER, dtype=kind), down)
        gate_up = linear.linear_pack(torch.zeros(2 * INNER, HIDDEN, dtype=kind), None, ())
        wide, narrow = torch.zeros(tokens, 2 * INNER, dtype=kind), torch.zeros(tokens, INNER, dtype=kind)
        linear.rms_norm_gated_linear(narrow, wide, hidden, residual, weight, 1e-6, gate_up, "silu")
        elementwise.gated_activation(narrow, wide, "silu")
    logits, sampled = torch.zeros(rows, VOCABULARY), torch.zeros(rows, 1, dtype=torch.int32)
    flags = torch.zeros(rows, dtype=torch.bool)
    where = (logits, state, inputs.sample_slots, inputs.sample_lengths)
    for features in (layout.F_RANDOM, EVERYTHING):
        sampling.sample(sampled, flags, *where, features)
    sampling.logit_adjust(*where, EVERYTHING)
    batch.advance(state, inputs, sampled)


def launch_quantised(tokens: int, kind: torch.dtype) -> None:
    """Products of ``tokens`` rows of ``kind`` with a weight of every kind of code, and the widening of it."""
    from vllm_core.api import QuantTensor
    from vllm_triton.ops import linear, quant

    shape = (2 * INNER, HIDDEN)
    bytes_, nibbles = torch.zeros(shape, dtype=torch.int8), torch.zeros(2 * INNER, HIDDEN // 2, dtype=torch.uint8)
    group, zero = torch.zeros(2 * INNER, HIDDEN // 128), torch.zeros(2 * INNER, HIDDEN // 128, dtype=torch.uint8)
    fp8, squares = bytes_.view(torch.float8_e4m3fn), torch.zeros(2 * INNER // 128, HIDDEN // 128)
    for weight in (
        QuantTensor("int8_channel", shape, bytes_, torch.zeros(2 * INNER)),
        QuantTensor("fp8_channel", shape, fp8, torch.zeros(2 * INNER)),
        QuantTensor("fp8_block128", shape, fp8, squares),
        QuantTensor("int4_group", shape, nibbles, group, zero),
    ):
        packed = quant.pack(weight, None, on="linear_pack")
        x, wide = torch.zeros(tokens, HIDDEN, dtype=kind), torch.zeros(tokens, 2 * INNER, dtype=kind)
        linear.linear(wide, x, packed)
        linear.gated_linear(torch.zeros(tokens, INNER, dtype=kind), wide, x, packed, "silu")
        quant.widened(packed, kind)


def launch_large(kind: torch.dtype) -> None:
    """Attention of heads of 256, over numbers and over codes, and where so many share a head that their queries crowd keys."""
    from vllm_triton.ops import attention, cache, encoder

    size, rows, queries = 256, 2, 32
    counts, table = torch.zeros(rows + 1, dtype=torch.int32), torch.zeros(rows, 65, dtype=torch.int32)
    for heads, kv_heads, dtype in ((4, 2, str(kind).removeprefix("torch.")), (4, 2, "int8"), (48, 1, "int8")):
        q = torch.zeros(rows * queries, heads, size, dtype=kind)
        memory = torch.zeros(2, block_bytes_of(kv_heads, size, dtype, BLOCK), dtype=torch.uint8)
        kv = cache.kv_bind(memory, kv_heads, size, dtype, BLOCK)
        attention.paged_attention(q, q, kv, counts, counts[1:], table, queries, 4096, 0.1, 512, 30.0)
    x = torch.zeros(64, 4, size, dtype=kind)
    encoder.encoder_attention(x, x, x, x, counts, 32, 0.1)


def launch_all_experts() -> None:
    """Experts of one token, of a decoding step and of prompts; of weights as they are and, for one step, quantised."""
    from vllm_core.api import QuantTensor
    from vllm_triton.ops import experts
    from vllm_triton.workload import SPARSE, launch_experts

    for tokens in (1, 64, 512, 4096):
        launch_experts(SPARSE, torch.empty(tokens, SPARSE.hidden, dtype=torch.bfloat16))
    tokens, count = 64, 8
    chosen, weights = torch.zeros(tokens, 2, dtype=torch.int32), torch.zeros(tokens, 2)
    shapes = ((count * 2 * 256, HIDDEN), (count * HIDDEN, 256))
    codes = [QuantTensor("int8_channel", one, torch.zeros(one, dtype=torch.int8), torch.zeros(one[0])) for one in shapes]
    index = torch.zeros(4 * (2 * tokens + count), dtype=torch.int32)
    for kind in (torch.bfloat16, torch.float32):
        x = torch.zeros(tokens, HIDDEN, dtype=kind)
        scratch = [torch.zeros(2 * tokens, size, dtype=kind) for size in (512, 256, HIDDEN)]
        experts.moe(x.clone(), *scratch, index, x, chosen, weights, experts.moe_pack(*codes, count, ()), "silu")


def launch_rest() -> None:
    """What no decode step of a dense decoder launches."""
    from vllm_triton.ops import cache, elementwise, encoder, norm, sampling

    x, weight = torch.zeros(64, HIDDEN, dtype=torch.bfloat16), torch.ones(HIDDEN)
    norm.layer_norm(x, x, weight, weight, 1e-6)
    elementwise.add(x, x, x)
    elementwise.activation(x, x, "gelu")
    elementwise.embedding_shard(x, torch.zeros(64, dtype=torch.int32), x, 8, 1.0)
    heads, start = x.view(64, -1, 64), torch.tensor([0, 30, 64], dtype=torch.int32)
    encoder.encoder_attention(heads, heads, heads, heads, start, 34, 0.1)
    for kind in ("mean", "last"):
        encoder.pool(torch.zeros(2, HIDDEN), x, start, kind, True)
    logits, rows = torch.zeros(64, VOCABULARY), torch.zeros(64, dtype=torch.int64)
    sampling.grammar_mask(logits, torch.zeros(64, VOCABULARY // 32, dtype=torch.int32), rows)
    sampling.soft_cap(logits, 30.0)
    sampling.log_probabilities(logits, rows, 20)
    for dtype in KV_DTYPES:
        memory = torch.zeros(2, block_bytes_of(KV_HEADS, SIZE, dtype, BLOCK), dtype=torch.uint8)
        kv = cache.kv_bind(memory, KV_HEADS, SIZE, dtype, BLOCK)
        canonical = torch.zeros(1, 2, BLOCK, KV_HEADS, SIZE)
        cache.kv_export(canonical, kv, rows[:1])
        cache.kv_import(kv, canonical, rows[:1])
        cache.kv_copy(kv, rows[:1], rows[:1] + 1)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread; a stack stands for spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def compile_all(architecture: str, sizes: list[tuple[int, int]], more: list[str]) -> Iterator[dict[str, Any]]:
    family = family_of(architecture)
    assert family is not None, architecture
    tuning.use(family.tuning, 132)
    recorder = Recorder()
    JITFunction.run = lambda kernel, *args, **kwargs: recorder(kernel, *args, **kwargs)  # type: ignore[method-assign,assignment]
    for rows, queries in sizes:
        launch_all(rows, queries)
    if "experts" in more:
        launch_all_experts()
    if "rest" in more:
        launch_rest()
        for rows, queries in ((64, 1), (4, 32)):
            launch_all(rows, queries, KV_DTYPES)
        for rows in (1, 64, 128):
            launch_quantised(rows, torch.bfloat16)
        launch_quantised(16, torch.float32)
    if "large" in more:
        for kind in (torch.bfloat16, torch.float16, torch.float32):
            launch_large(kind)
    target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    for kernel, values, options in recorder.launches.values():
        compiled = triton.compile(source_of(kernel, values), target=target, options=options)
        registers, stack = resources(compiled.asm["cubin"])
        shared = compiled.metadata.shared
        yield {"kernel": kernel.__name__, "shared": shared, "registers": registers, "stack": stack, "options": options}


if __name__ == "__main__":
    more = [name for name in sys.argv[2:] if name in ("rest", "experts", "large")]
    wanted = [tuple(map(int, size.split("x"))) for size in sys.argv[2:] if size not in more]
    for row in compile_all(sys.argv[1], wanted, more):  # type: ignore[arg-type]
        print(json.dumps(row))
