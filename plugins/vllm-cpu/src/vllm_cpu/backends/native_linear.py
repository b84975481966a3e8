"""Offers of the native library's linear, expert and embedding kernels, which read weights packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm_core.api import PLAIN, STACK, Offer
from vllm_cpu import native

PROVIDER = "vllm-cpu-native"
FORMATS = frozenset(
    {"q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "int8_channel", "int4_group", PLAIN, STACK}
)
ROUNDING = "vllm-cpu-native-int8"
"""Chosen where the user asks for ``--activation int8``."""

_DTYPES = frozenset({"float32", "bfloat16", "float16"})
_MODULE = "vllm_cpu.ops.native_linear"
_EXPERTS = "vllm_cpu.ops.native_experts"


def offers() -> Sequence[Offer]:
    """What the loaded library has of these; nothing without a library."""
    found = native.load()
    made = []
    if "linear" in found.ops:
        names = ("linear_pack", "linear", "linear_add", "rms_norm_linear", "rms_norm_gated_linear")
        for plain, pack in ((_offer(*names), "linear_pack"), (_offer("moe_pack", "moe", module=_EXPERTS), "moe_pack")):
            made += [plain, _rounding(plain, pack)]
    if "embedding" in found.ops:
        made += [_offer("embedding"), _offer("embedding_shard")]
    return made


def _rounding(plain: Offer, pack: str) -> Offer:
    """The same ops on weights that another function packs, which then round their inputs."""
    ops = {**plain.ops, pack: f"{plain.ops[pack]}_int8"}
    return replace(plain, provider=ROUNDING, priority=-10, ops=ops, features=frozenset({"int8_activation"}))


def _offer(*names: str, module: str = _MODULE) -> Offer:
    ops = {name: f"{module}:{name}" for name in names}
    return Offer(provider=PROVIDER, kind="kernel", priority=10, ops=ops, dtypes=_DTYPES, formats=FORMATS)
