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


def qk_norm_rope_attention(get: Get, role: str) -> Callable[..., None]:
    """`qk_norm_rope_kv_write`, then `paged_attention`."""
    write, attend = get("qk_norm_rope_kv_write", role), get("paged_attention", role)

    def call(
        out: Any,
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
        query_start: Any,
        seq_lens: Any,
        block_table: Any,
        max_query_len: int,
        max_seq_len: int,
        scale: float,
        window: int,
        soft_cap: float,
        *sinks: Any,
    ) -> None:
        write(q, k, v, q_weight, k_weight, eps, positions, cos_sin, interleaved, kv, slot_mapping)
        attend(out, q, kv, query_start, seq_lens, block_table, max_query_len, max_seq_len, scale, window, soft_cap, *sinks)

    return call


def all_reduce_add_rms_norm(get: Get, role: str) -> Callable[..., None]:
    """`all_reduce`, then `add_rms_norm` as it is bound for a single worker."""
    reduce, add_norm = get("all_reduce", role), get("add_rms_norm", "norm")

    def call(out: Any, residual: Any, x: Any, weight: Any, eps: float, group: int) -> None:
        reduce(x, group)
        add_norm(out, residual, x, weight, eps)

    return call


def linear_add(get: Get, role: str) -> Callable[..., None]:
    """`linear` into the scratch, then `add`."""
    linear, add = get("linear", role), get("add", "residual")

    def call(residual: Any, delta: Any, x: Any, weight: Any) -> None:
        linear(delta, x, weight)
        add(residual, residual, delta)

    return call


def rms_norm_linear(get: Get, role: str) -> Callable[..., None]:
    """`rms_norm` into the scratch, then `linear`."""
    linear, rms_norm = get("linear", role), get("rms_norm", "norm")

    def call(out: Any, normed: Any, x: Any, norm: Any, eps: float, weight: Any) -> None:
        rms_norm(normed, x, norm, eps)
        linear(out, normed, weight)

    return call


def gated_linear(get: Get, role: str) -> Callable[..., None]:
    """`linear` into the scratch, then `gated_activation`."""
    linear, activation = get("linear", role), get("gated_activation", "mlp")

    def call(out: Any, wide: Any, x: Any, weight: Any, kind: str) -> None:
        linear(wide, x, weight)
        activation(out, wide, kind)

    return call


def rms_norm_gated_linear(get: Get, role: str) -> Callable[..., None]:
    """`rms_norm` and `linear` into the scratches, then `gated_activation`."""
    linear, rms_norm, activation = get("linear", role), get("rms_norm", "norm"), get("gated_activation", "mlp")

    def call(out: Any, wide: Any, normed: Any, x: Any, norm: Any, eps: float, weight: Any, kind: str) -> None:
        rms_norm(normed, x, norm, eps)
        linear(wide, normed, weight)
        activation(out, wide, kind)

    return call


DECOMPOSITIONS: dict[str, Callable[[Get, str], Callable[..., None]]] = {
    "add_rms_norm": add_rms_norm,
    "all_reduce_add_rms_norm": all_reduce_add_rms_norm,
    "gated_linear": gated_linear,
    "linear_add": linear_add,
    "qk_norm_rope_attention": qk_norm_rope_attention,
    "qk_norm_rope_kv_write": qk_norm_rope_kv_write,
    "rms_norm_gated_linear": rms_norm_gated_linear,
    "rms_norm_linear": rms_norm_linear,
}
