"""Fused ops that nobody offers, put together from their parts as the plan bound them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Get = Callable[[str, str], Callable[..., Any]]


def add_rms_norm(get: Get, role: str) -> Callable[..., None]:
    """`add`, then `rms_norm`."""
    add, norm = get("add", "residual"), get("rms_norm", role)

    def call(out: Any, residual: Any, x: Any, weight: Any, eps: float) -> None:
        add(residual, residual, x)
        norm(out, residual, weight, eps)

    return call


def qk_norm_rope_kv_write(get: Get, role: str) -> Callable[..., None]:
    """`rms_norm` of q and k where they have weights, `rotary_embedding` where there is a table, then `kv_write`."""
    norm, rotate, write = get("rms_norm", "norm"), get("rotary_embedding", "attention"), get("kv_write", role)

    def call(
        q: Any,
        k: Any,
        v: Any,
        q_weight: Any,
        k_weight: Any,
        eps: float,
        positions: Any,
        cos_sin: Any,
        interleaved: bool,
        kv: Any,
        slot_mapping: Any,
    ) -> None:
        if q_weight is not None:
            norm(q, q, q_weight, eps)
        if k_weight is not None:
            norm(k, k, k_weight, eps)
        if cos_sin is not None:
            rotate(q, k, positions, cos_sin, interleaved)
        write(kv, k, v, slot_mapping)

    return call


DECOMPOSITIONS: dict[str, Callable[[Get, str], Callable[..., None]]] = {
    "add_rms_norm": add_rms_norm,
    "qk_norm_rope_kv_write": qk_norm_rope_kv_write,
}
