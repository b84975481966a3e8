"""Calls of the native library's ops against those that serve without it, at the shapes of a small decoder (SmolLM2-135M)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from vllm_core.api import OPS, load_entry
from vllm_core.engine.decompose import DECOMPOSITIONS
from vllm_core.ops import check
from vllm_cpu import native, native_kv
from vllm_cpu.backends import generic
from vllm_cpu.backends import native as native_offers

SHAPES: dict[str, tuple[str, ...]] = {
    "rms_norm": ("one_token/h576", "decode/h576", "long/h576"),
    "add_rms_norm": ("one_token/h576", "decode/h576", "long/h576"),
    "layer_norm": ("one_token/h576", "long/h576"),
    "gated_activation": ("one_token/h1536", "decode/h1536", "long/h1536"),
    "rotary_embedding": ("one_token/q9/k3/d64/plain", "decode/q9/k3/d64/plain", "long/q9/k3/d64/plain"),
    "qk_norm_rope_kv_write": ("one_token/q9/k3/d64/b16/plain", "decode/q9/k3/d64/plain", "long/q9/k3/d64/b16/plain"),
    "kv_write": ("one_token/q9/k3/d64/plain", "decode/q9/k3/d64/plain", "long/q9/k3/d64/b16/plain"),
    "paged_attention": (
        *("one_token/q9/k3/d64/plain", "decode/q9/k3/d64/plain", "thousands/q9/k3/d64/plain"),
        *("long/q9/k3/d64/b16/plain", "decode/q9/k3/d64/cap", "long/q9/k3/d64/b16/window"),
        *("thousands/q9/k3/d64/kv_bfloat16", "thousands/q16/k8/d128/kv_float16"),
    ),
    "encoder_attention": ("mixed/q12/k12/d32", "long/q12/k12/d32"),
    "pool": ("mixed/h384", "long/h384"),
    "gather_rows": ("decode/h576",),
    "batch_update": ("one_sequence", "mixed", "long"),
    "build_step": ("one_token", "decode", "mixed"),
    "advance": ("one_token", "decode", "mixed"),
    "sample": ("mixed", "long", "wide_vocab"),
    "logit_adjust": ("mixed", "long", "wide_vocab"),
    "log_probabilities": ("decode/v49152",),
    "soft_cap": ("mixed/v49152",),
    "grammar_mask": ("mixed/v49152",),
}
SEED = 2
"""Of the generators: no window or cap of its own where the shape says plain, k = 2 in log_probabilities."""


def compare(runs: int, threads: int) -> list[dict[str, Any]]:
    """Median microseconds of each op and shape, both in turns in one run."""
    torch.set_num_threads(threads)
    native.set_threads(threads)
    own = {name: load_entry(entry) for offer in generic.offers() for name, entry in offer.ops.items()}
    others = {name: spec.load_reference() for name, spec in OPS.items()} | own
    # As the engine puts together what nobody offers; a private layout has no other fused op.
    fused = DECOMPOSITIONS["qk_norm_rope_kv_write"]
    others["qk_norm_rope_kv_write"] = fused(lambda name, role: others[name], "kv")
    mine = {name: load_entry(entry) for offer in native_offers.offers() for name, entry in offer.ops.items()}
    with torch.inference_mode():
        return [
            _row(op, shape, runs, check.Provider(others | mine, native_kv.kv_layout), check.Provider(others, generic.kv_layout))
            for op, shapes in SHAPES.items()
            if op in mine
            for shape in shapes
        ]


def _row(op: str, shape: str, runs: int, ours: check.Provider, theirs: check.Provider) -> dict[str, Any]:
    calls = [_call(op, shape, ours), _call(op, shape, theirs)]
    count = max(1, int(2e-3 / max(_seconds(call, 1) for call in calls)))
    times: list[list[float]] = [[], []]
    for _ in range(runs):
        for call, found in zip(calls, times, strict=True):
            found.append(_seconds(call, count) / count * 1e6)
    native_us, other_us = (statistics.median(found) for found in times)
    return {"op": op, "shape": shape, "native": native_us, "other": other_us, "ranges": [(min(t), max(t)) for t in times]}


def _call(op: str, shape: str, provider: check.Provider) -> Callable[[], Any]:
    arguments = [provider.realize(value) for value in OPS[op].load_generator()("float32", SEED, shape)]
    function = provider.ops[op]
    function(*arguments)
    return lambda: function(*arguments)


def _seconds(call: Callable[[], Any], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - started
