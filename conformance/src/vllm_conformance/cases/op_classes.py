"""Which shape classes, layouts and seeds each op is run at: the edges at which kernels are wrong. Data; imports no torch.

Classes are names of `vllm_core.ops.classes`. Ops on float32 logits or on integers do not depend on the model's dtype and
run once, as dtype ``any``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vllm_conformance.case import Size
from vllm_core.api import FORMATS, OPS, Support, is_available
from vllm_core.api.ops import FP8_ACTIVATION

STRIDED, IN_PLACE, GRAPH = "strided", "in_place", "graph"

ANY_DTYPE = frozenset(
    {
        *("batch_update", "build_step", "advance", "logit_adjust", "grammar_mask", "sample"),
        *("log_probabilities", "soft_cap", "moe_route"),
    }
)


@dataclass(frozen=True, slots=True)
class Run:
    """One way to run an op: class, layout (plain, `STRIDED`, `IN_PLACE`, `GRAPH`), seed, and membership in the fixed subset."""

    shape: str
    seed: int = 0
    layout: str = ""
    ci: bool = False

    @property
    def name(self) -> str:
        """The end of the case's id."""
        layout = f"/{self.layout}" if self.layout else ""
        return f"{self.shape}{layout}/seed{self.seed}"


_PLAIN = (
    Run("one_token", ci=True),
    Run("one_sequence", 1),
    Run("block_edges"),
    Run("mixed", 1, ci=True),
    Run("gqa", 2),
    Run("long", 3),
    Run("empty", ci=True),
    Run("one_token/h4096", 1),
    Run("decode/h577", 2, ci=True),
)
_IN_PLACE = (Run("mixed", 2, IN_PLACE, ci=True), Run("one_token", 3, IN_PLACE))
_STRIDED = (Run("mixed", 3, STRIDED, ci=True), Run("one_token", 2, STRIDED))
_LINEAR = (
    Run("one_token/wide", 0, ci=True),
    Run("mixed/wide", 1),
    Run("one_token/h2048", 2),
    Run("decode/h1024", 3),
    *(Run(f"mixed/h{width}", 4 + width % 2) for width in (64, 127, 128, 129)),
)
_FP8 = (
    Run("one_token/h512/fp8", 0, ci=True),
    *(Run("mixed/h512/fp8", seed, ci=seed == 2) for seed in (0, 1, 2)),
    *(Run("long/h1024/fp8", seed, ci=seed == 1) for seed in (0, 1, 2)),
    Run("long/h544/fp8", 1),
    Run("gqa/fp8", 2),
    Run("empty/h512/fp8", 2),
    Run("long/h512/fp8", 2, STRIDED),
)
_PACKED: Mapping[str, tuple[Run, ...]] = {
    "linear": (
        *(Run(f"mixed/h512/{name}", 1, ci=True) for name in FORMATS),
        *(Run(f"one_token/h512/{name}") for name in FORMATS),
    ),
    **dict.fromkeys(("gated_linear", "rms_norm_gated_linear"), tuple(Run(f"mixed/h512/{name}", 2) for name in FORMATS)),
}
"""Products with packed weights: with a bias, of one row, and gated."""

_EXPERTS = (
    *_PLAIN[:7],
    Run("decode/e128/t8/h64", 2, ci=True),
    Run("one_token/e128/t8/h512", 1),
    Run("mixed/e8/t2/h256", 3),
    *(Run(f"mixed/h{width}", 4 + width % 2) for width in (127, 128)),
    Run("decode/e3/t3", 5),
)
_ROTARY = (
    *(Run(f"mixed/d{size}/plain", ci=size == 64) for size in (64, 80, 96, 128, 256)),
    *(Run(f"mixed/{pairs}", 1, ci=True) for pairs in ("interleaved", "partial", "interleaved/partial")),
    *(Run(f"{rows}/plain", 2) for rows in ("one_token", "block_edges", "gqa", "long", "empty")),
    Run("mixed/q8/k1/plain", 3),
    Run("mixed/plain", 4, STRIDED, ci=True),
    Run("thousands/plain", 5),
)
_KV = (
    *(Run(f"{rows}/plain", ci=rows in ("one_token", "block_edges")) for rows in ("one_token", "one_sequence", "block_edges")),
    *(Run(f"{rows}/plain", 1, ci=rows == "empty") for rows in ("decode", "mixed", "gqa", "long", "empty")),
    *(Run(f"mixed/d{size}/plain", 2) for size in (64, 80, 96, 256)),
    *(Run(f"block_edges/b{size}/q2/k1/plain", 3) for size in (1, 8, 32, 64, 128, 256)),
)
_KV_WRITE = (*_KV, Run("mixed/plain", 4, STRIDED, ci=True))
_FUSED = (
    *_KV_WRITE,
    *(Run(f"mixed/{pairs}", seed) for seed in (5, 6) for pairs in ("plain", "interleaved", "partial")),
    *(Run("mixed/plain", seed, STRIDED) for seed in (7, 8)),
)
_ATTENTION = (
    *(Run(f"{rows}/plain", ci=rows != "long") for rows in ("one_token", "one_sequence", "block_edges", "decode", "long")),
    *(Run(f"{rows}/plain", 1, ci=rows == "empty") for rows in ("mixed", "gqa", "thousands", "empty")),
    *(Run(f"mixed/d{size}/plain", 2, ci=size in (64, 256)) for size in (64, 80, 96, 128, 256)),
    *(Run(f"decode/q{q}/k{k}/plain", 3, ci=k == 1) for q, k in ((4, 4), (8, 4), (8, 2), (8, 1), (16, 2))),
    *(Run(f"mixed/q{q}/k{k}/d64/plain", 4) for q, k in ((4, 4), (8, 4), (8, 2), (8, 1), (16, 2))),
    *(Run(f"block_edges/b{size}/q2/k1/plain", 5, ci=size == 32) for size in (1, 8, 32, 64, 128, 256)),
    Run("mixed/plain", 6, STRIDED, ci=True),
    Run("decode/rest", 7, ci=True),
    Run("block_edges/rest", 8),
)
_FRESH = (
    *(Run(f"{rows}/plain", seed, ci=rows == "decode") for rows in ("one_token", "decode", "mixed") for seed in (0, 1)),
    *(Run(f"decode/{pairs}", seed, ci=seed == 2) for seed in (2, 3) for pairs in ("interleaved", "partial")),
    *(Run(f"decode/d{size}/plain", 4, ci=size == 80) for size in (64, 80, 96, 256)),
    *(Run(f"decode/q{q}/k{k}/plain", 5, ci=k == 1) for q, k in ((4, 4), (8, 4), (8, 1), (16, 2))),
    *(Run(f"decode/b{size}/plain", 6) for size in (1, 32, 64, 256)),
    *(Run("decode/plain", seed, STRIDED, ci=seed == 7) for seed in (7, 8)),
    Run("block_edges/plain", 9),
    Run("empty/plain", 9),
)
_WINDOW = (
    *(Run(f"{rows}/window", 9, ci=rows == "mixed") for rows in ("block_edges", "decode", "mixed", "long")),
    *(Run(f"block_edges/window{size}", 10) for size in (1, 15, 16, 17, 4096)),
    Run("thousands/window1024", 11),
    *(Run(f"{rows}/window/rest", 12, ci=True) for rows in ("decode", "mixed")),
    Run("block_edges/b64/window/rest", 12),
)
_CAP = (*(Run(f"{rows}/cap", 13, ci=rows == "mixed") for rows in ("block_edges", "decode", "mixed")),)
_SINKS = (
    *(Run(f"{rows}/sinks", 16, ci=True) for rows in ("decode", "mixed")),
    *(Run(f"{rows}/sinks", 17) for rows in ("one_token", "block_edges", "gqa", "long", "thousands")),
    *(Run(f"decode/q{q}/k{k}/d64/sinks", 18, ci=q == 64) for q, k in ((4, 4), (8, 1), (64, 8))),
    *(Run(f"mixed/d{size}/sinks", 18) for size in (80, 256)),
    Run("mixed/sinks", 19, STRIDED),
)
_KV_DTYPES = ("float32", "bfloat16", "float16", "fp8", "int8")
_ENCODER = (
    *(Run(rows, ci=rows in ("one_token", "mixed")) for rows in ("one_token", "one_sequence", "block_edges", "mixed", "empty")),
    *(Run(f"mixed/d{size}", 1) for size in (64, 80, 96, 256)),
    *(Run(f"gqa/q8/k{heads}", 2) for heads in (1, 2, 4, 8)),
    Run("long/q2/d64", 3),
    Run("mixed", 4, STRIDED, ci=True),
)
_LAYERS = (
    *(Run(f"{rows}/plain", seed, ci=seed == 0) for rows in ("one_token", "single", "singles") for seed in (0, 1)),
    *(Run(f"single/q{q}/k{k}/d{size}/plain", 2) for q, k, size in ((4, 4, 128), (8, 2, 128))),
    Run("single/q9/k3/h320/plain", 2),
    *(Run(f"single/b{size}/plain", 3) for size in (32, 64, 128)),
)
_STEP = tuple(
    Run(rows, seed, ci=seed == 0)
    for rows in ("one_token", "one_sequence", "mixed", "long", "decode", "chunks")
    for seed in range(2 if rows == "long" else 4)
)
_TAIL = tuple(
    Run(rows, seed, ci=seed < 2 and rows != "wide_vocab")
    for rows in ("one_token", "one_sequence", "mixed", "long", "ties", "wide_vocab")
    for seed in range({"long": 3, "wide_vocab": 4}.get(rows, 10))
)
_LOGITS = (
    *(Run(rows, seed, ci=seed == 1) for rows in ("one_token", "mixed", "decode", "gqa") for seed in (0, 1, 5)),
    Run("mixed/v32", 2, ci=True),
    Run("mixed/v33", 3),
    Run("one_token/v128256", 4),
    Run("empty", 2),
)

_GRAPH = {
    **dict.fromkeys(("embedding", "gather_rows", "add", "rms_norm", "add_rms_norm", "layer_norm"), "decode/h577"),
    **dict.fromkeys(("gated_activation", "activation", "linear", "soft_cap"), "decode/h577"),
    **dict.fromkeys(("linear_add", "rms_norm_linear", "gated_linear", "rms_norm_gated_linear"), "decode/h577"),
    **dict.fromkeys(
        ("rotary_embedding", "kv_write", "paged_attention", "qk_norm_rope_kv_write", "qk_norm_rope_attention"), "decode/plain"
    ),
    "decode_layers": "single/plain",
    **dict.fromkeys(("moe_route", "moe"), "decode/e16/t4"),
    **dict.fromkeys(("build_step", "advance"), "decode"),
    **dict.fromkeys(("logit_adjust", "sample"), "mixed"),
}
"""Ops that a decode step calls: where graphs are claimed they are captured with other contents and replayed."""

_BY_OP: Mapping[str, tuple[Run, ...]] = {
    **dict.fromkeys(("add", "rms_norm", "layer_norm", "activation"), (*_PLAIN, *_IN_PLACE, *_STRIDED)),
    **dict.fromkeys(("add_rms_norm", "gated_activation", "gather_rows", "pool"), (*_PLAIN, *_STRIDED)),
    "linear": (*_PLAIN[:7], *_LINEAR, *_STRIDED),
    **dict.fromkeys(("linear_add", "rms_norm_linear", "gated_linear", "rms_norm_gated_linear"), (*_PLAIN[:7], *_STRIDED)),
    "moe_route": _EXPERTS,
    "moe": (*_EXPERTS, *_STRIDED),
    "rotary_embedding": _ROTARY,
    "kv_write": _KV_WRITE,
    **dict.fromkeys(("kv_copy", "kv_export", "kv_import"), _KV),
    "qk_norm_rope_kv_write": _FUSED,
    "decode_layers": _LAYERS,
    "encoder_attention": _ENCODER,
    **dict.fromkeys(("batch_update", "build_step", "advance"), _STEP),
    **dict.fromkeys(("logit_adjust", "sample"), _TAIL),
    **dict.fromkeys(("grammar_mask", "log_probabilities", "soft_cap"), _LOGITS),
}


_MASKS = (("window", "attention.sliding_window"), ("cap", "attention.soft_cap"), ("sinks", "attention.sinks"))


def runs_of(op: str, dtype: str, claims: Mapping[str, Support]) -> Iterator[Run]:
    """Every way to run an op in a dtype that the claims promise."""
    if op in _GRAPH and _claimed(claims, "graphs"):
        yield from (Run(_GRAPH[op], seed, GRAPH, ci=seed == 20) for seed in (20, 21))
    if op == "paged_attention":
        yield from _attention(dtype, claims)
    elif op == "qk_norm_rope_attention":
        yield from _fresh(claims)
    elif op != "encoder_attention" or _claimed(claims, "attention.encoder"):
        yield from _BY_OP.get(op, _PLAIN)
        if FP8_ACTIVATION in OPS[op].features and dtype != "float32" and _claimed(claims, "quantization.fp8_activation"):
            yield from _FP8
            if _claimed(claims, "graphs"):
                yield Run("long/h512/fp8", 20, GRAPH)
        if _claimed(claims, "quantization.weight_only"):
            yield from _PACKED.get(op, ())
        if op in ("kv_write", "kv_copy", "kv_export", "kv_import"):
            yield from _other_kv(dtype, claims, ("mixed",))


def _attention(dtype: str, claims: Mapping[str, Support]) -> Iterator[Run]:
    yield from _ATTENTION
    yield from _other_kv(dtype, claims, ("decode", "mixed"))
    window, cap = _claimed(claims, "attention.sliding_window"), _claimed(claims, "attention.soft_cap")
    yield from _WINDOW if window else ()
    yield from _CAP if cap else ()
    if window and cap:
        yield Run("mixed/window/cap", 14, ci=True)
    if _claimed(claims, "attention.sinks"):
        yield from _SINKS
        yield from _other_kv(dtype, claims, ("decode", "mixed"), "/sinks")
        yield from (Run(f"{rows}/window/sinks", 16, ci=True) for rows in ("decode", "mixed") if window)
        yield from (Run(f"{rows}/cap/sinks", 16) for rows in ("decode", "mixed") if cap)
        if _claimed(claims, "graphs"):
            yield Run("decode/sinks", 20, GRAPH)


def _fresh(claims: Mapping[str, Support]) -> Iterator[Run]:
    yield from _FRESH
    # Heads that differ in their last bit may be rounded to neighbours, which are far apart in fp8.
    if _claimed(claims, "kv_dtype.int8"):
        yield Run("decode/kv_int8", 15)
    for name, claim in _MASKS:
        if _claimed(claims, claim):
            yield from (Run(f"{rows}/{name}", 10, ci=rows == "decode") for rows in ("decode", "block_edges", "mixed"))


def _other_kv(dtype: str, claims: Mapping[str, Support], patterns: tuple[str, ...], variant: str = "") -> Iterator[Run]:
    for kv_dtype in _KV_DTYPES:
        plain = kv_dtype not in ("fp8", "int8")
        if kv_dtype != dtype and _claimed(claims, f"dtype.{kv_dtype}" if plain else f"kv_dtype.{kv_dtype}"):
            yield from (Run(f"{pattern}/kv_{kv_dtype}{variant}", 15) for pattern in patterns)


def _claimed(claims: Mapping[str, Support], name: str) -> bool:
    support = claims.get(name)
    return support is not None and is_available(support)


def size_of(op: str) -> Size:
    """Size class: kernels of many variants may have to be compiled first, and long sequences cost the reference a second."""
    return (
        "medium"
        if OPS[op].family in ("kv", "linear", "moe") or op in ("sample", "encoder_attention", "decode_layers")
        else "small"
    )
