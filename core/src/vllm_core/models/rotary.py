"""Reading the rotary embedding of a config, in the form of transformers 4 and of transformers 5, without torch.

transformers 4: ``rope_theta`` beside an optional ``rope_scaling``. transformers 5: one ``rope_parameters``, or one per
layer type. Values that the tables need and the config keeps elsewhere (``max_position_embeddings``, the original
length) are written into `RopeSpec.scaling`, so that a RopeSpec is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, cast

from vllm_core.models.fields import Fields
from vllm_core.models.spec import RopeSpec

Kind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
_KINDS = {name: name for name in ("default", "linear", "dynamic", "llama3", "yarn", "longrope")} | {"su": "longrope"}


def rope_of(fields: Fields, head_size: int, *, layer_type: str | None = None) -> RopeSpec:
    """The rotary embedding of a model, or of its layers of ``layer_type`` where the config tells them apart.

    Raises ModelConfigError for an unknown kind or a missing or wrong value.
    """
    table = fields.table("rope_parameters") or fields.table("rope_scaling")
    if table is not None and layer_type is not None:
        table = table.table(layer_type) or table
    theta = fields.number("rope_theta", 10_000.0)
    return rope_from(fields, table, theta, head_size)


def rope_from(fields: Fields, table: Fields | None, theta: float, head_size: int) -> RopeSpec:
    """Build from one object of RoPE parameters; ``theta`` where it has none."""
    table = table if table is not None else Fields({}, fields.where)
    kind = cast("Kind", table.choice("rope_type" if "rope_type" in table.config else "type", _KINDS, "default"))
    theta = table.number("rope_theta", theta)
    partial = table.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    rotary_dim = int(head_size * partial)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_size:
        fields.fail("head_dim", f"an even number of rotated elements, not {rotary_dim} of {head_size}")
    return RopeSpec(theta=theta, rotary_dim=rotary_dim, kind=kind, scaling=_READERS[kind](fields, table, rotary_dim))


def longest(fields: Fields, ropes: Iterable[RopeSpec]) -> int:
    """The longest sequence: ``max_position_embeddings``, or what YaRN stretches the original length to."""
    stretched = [_product(rope, "original_max_position_embeddings") for rope in ropes if rope.kind == "yarn"]
    return max([fields.integer("max_position_embeddings"), *stretched])


def extended(ropes: Iterable[RopeSpec]) -> int | None:
    """What dynamic NTK scaling stretches the trained length to, or None without it."""
    return next((_product(rope, "max_position_embeddings") for rope in ropes if rope.kind == "dynamic"), None)


def _product(rope: RopeSpec, length: str) -> int:
    return int(cast("float", rope.scaling["factor"]) * cast("int", rope.scaling[length]))


def _default(fields: Fields, table: Fields, rotary_dim: int) -> dict[str, object]:
    return {}


def _linear(fields: Fields, table: Fields, rotary_dim: int) -> dict[str, object]:
    return {"factor": table.number("factor")}


def _dynamic(fields: Fields, table: Fields, rotary_dim: int) -> dict[str, object]:
    return {"factor": table.number("factor"), "max_position_embeddings": fields.integer("max_position_embeddings")}


def _llama3(fields: Fields, table: Fields, rotary_dim: int) -> dict[str, object]:
    numbers = {key: table.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
    if numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        table.fail("high_freq_factor", f"more than low_freq_factor ({numbers['low_freq_factor']})")
    return {**numbers, "original_max_position_embeddings": _original(fields, table)}


def _yarn(fields: Fields, table: Fields, rotary_dim: int) -> dict[str, object]:
    original = _original(fields, table)
    return {
        **_optional(table, "attention_factor", "mscale", "mscale_all_dim"),
        "factor": table.number("factor", fields.integer("max_position_embeddings") / original),
        "original_max_position_embeddings": original,
        "beta_fast": table.number("beta_fast", 32.0),
        "beta_slow": table.number("beta_slow", 1.0),
        "truncate": table.flag("truncate", True),
    }


def _longrope(fields: Fields, table: Fields, rotary_dim: int) -> dict[str, object]:
    original = _original(fields, table)
    return {
        **_optional(table, "attention_factor"),
        "factor": table.number("factor", fields.integer("max_position_embeddings") / original),
        "original_max_position_embeddings": original,
        "short_factor": table.numbers("short_factor", rotary_dim // 2),
        "long_factor": table.numbers("long_factor", rotary_dim // 2),
    }


def _original(fields: Fields, table: Fields) -> int:
    """Length of pretraining. Phi-3 keeps it beside the parameters, and there it has priority."""
    key = "original_max_position_embeddings"
    return fields.integer(key, table.integer(key, fields.integer("max_position_embeddings")))


def _optional(table: Fields, *keys: str) -> dict[str, object]:
    return {key: table.number(key) for key in keys if table.config.get(key) is not None}


_READERS: dict[Kind, Callable[[Fields, Fields, int], dict[str, Any]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
