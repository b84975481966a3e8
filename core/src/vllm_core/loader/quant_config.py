"""How a safetensors checkpoint says that its weights are quantised: `quantization_config` of its config. Imports no torch.

Read are AWQ (Lin et al. 2023, layout ``gemm``), GPTQ (Frantar et al. 2022, both conventions of the zero point, no reordered
activations), fp8 per tensor, channel or square of 128, and compressed-tensors of one group with four or eight bits. Products
are with widened weights, but where the user asks for inputs in fp8 too: scales and formats that such a config gives for
activations are not used, those are made of the inputs themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vllm_core.errors import ModelConfigError

Layout = Literal["awq", "gptq", "fp8", "packed", "codes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantScheme:
    """What all quantised weights of a checkpoint share.

    `layout` says how tensors lie in the file: ``packed`` and ``codes`` are compressed-tensors'. `format` is what they are
    brought to, one of `vllm_core.api.FORMATS`; of ``fp8`` and ``codes`` in fp8 the scale's shape says more. `group` is the
    number of inputs that share a scale, 0 all of a row. `zero_offset` is added to stored zero points.
    """

    layout: Layout
    format: str
    bits: int
    group: int = 0
    zero_offset: int = 0


def read(config: Mapping[str, Any]) -> QuantScheme | None:
    """The scheme of a config, or None where nothing is quantised. Raises ModelConfigError for one that is not supported."""
    settings = config.get("quantization_config")
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise _refused("quantization_config", type(settings).__name__, "an object")
    method = str(settings.get("quant_method", ""))
    readers = {"awq": _awq, "gptq": _gptq, "fp8": _fp8, "fbgemm_fp8": _fp8, "compressed-tensors": _compressed}
    if method not in readers:
        raise _refused("quant_method", repr(method), ", ".join(readers))
    return readers[method](settings)


def sizes(config: Mapping[str, Any]) -> Mapping[str, int]:
    """The format of a checkpoint's weights and about how many numbers are in it, by the sizes that the config gives."""
    scheme = read(config)
    if scheme is None:
        return {}
    hidden, inner, layers = (int(config.get(key, 0)) for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    heads = int(config.get("num_attention_heads", 0))
    size = int(config.get("head_dim") or (hidden // heads if heads else 0))
    kv = int(config.get("num_key_value_heads") or heads)
    return {scheme.format: layers * hidden * (2 * size * (heads + kv) + 3 * inner)}


def _awq(settings: Mapping[str, Any]) -> QuantScheme:
    _expect(settings, "bits", (4,))
    _expect(settings, "version", ("gemm", None))
    return QuantScheme(layout="awq", format="int4_group", bits=4, group=_group(settings))


def _gptq(settings: Mapping[str, Any]) -> QuantScheme:
    _expect(settings, "bits", (4,))
    _expect(settings, "checkpoint_format", ("gptq", "gptq_v2", None))
    # The first convention stores each zero point less 1. Whether activations are reordered is seen in the weights: with one
    # group a row, and in some checkpoints, `desc_act` changes nothing.
    offset = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
    return QuantScheme(layout="gptq", format="int4_group", bits=4, group=_group(settings), zero_offset=offset)


def _fp8(settings: Mapping[str, Any]) -> QuantScheme:
    _expect(settings, "fmt", ("e4m3", None))
    square = settings.get("weight_block_size")
    if square is None:
        return QuantScheme(layout="fp8", format="fp8_channel", bits=8)
    if list(square) != [128, 128]:
        raise _refused("weight_block_size", str(square), "[128, 128]")
    return QuantScheme(layout="fp8", format="fp8_block128", bits=8, group=128)


def _compressed(settings: Mapping[str, Any]) -> QuantScheme:
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _refused("config_groups", repr(groups)[:80], "an object of at least one group")
    weights = [group.get("weights") if isinstance(group, Mapping) else None for group in groups.values()]
    first = weights[0]
    if not isinstance(first, Mapping) or any(one != first for one in weights):
        raise _refused("config_groups", f"{len(groups)} groups", "groups whose weights are quantised in one way")
    kind, bits, strategy = first.get("type", "int"), first.get("num_bits"), first.get("strategy")
    if first.get("actorder") not in (None, False, "weight", "static"):
        raise _refused("actorder", repr(first["actorder"]), "null or weight")
    found = (kind, bits, strategy)
    if kind == "float" and bits == 8 and strategy == "block" and list(first.get("block_structure") or ()) == [128, 128]:
        return QuantScheme(layout="codes", format="fp8_block128", bits=8, group=128)
    if kind == "float" and bits == 8 and strategy in ("tensor", "channel"):
        return QuantScheme(layout="codes", format="fp8_channel", bits=8)
    packed = settings.get("format") == "pack-quantized"
    if kind == "int" and bits == 8 and strategy in ("tensor", "channel") and first.get("symmetric", True):
        return QuantScheme(layout="packed" if packed else "codes", format="int8_channel", bits=8)
    if kind == "int" and bits == 4 and packed and strategy in ("group", "channel"):
        group = _group(first) if strategy == "group" else 0
        return QuantScheme(layout="packed", format="int4_group", bits=4, group=group)
    expected = "int of 4 bits by group or channel, int of 8 bits by channel, float of 8 bits by tensor, channel or block"
    raise _refused("config_groups", f"{found}, format {settings.get('format')!r}", expected)


def _group(settings: Mapping[str, Any]) -> int:
    """Inputs of a group; -1 and null are all of a row."""
    size = settings.get("group_size", 128)
    if size in (-1, None):
        return 0
    if not isinstance(size, int) or size < 1 or size % 2:
        raise _refused("group_size", repr(size), "an even number, or -1")
    return size


def _expect(settings: Mapping[str, Any], key: str, values: tuple[object, ...]) -> None:
    found = settings.get(key)
    if found not in values:
        raise _refused(key, repr(found), " or ".join(str(one) for one in values if one is not None))


def _refused(key: str, found: str, expected: str) -> ModelConfigError:
    return ModelConfigError(
        "Quantised checkpoint is not supported",
        on=f"quantization_config, {key}",
        found=found,
        expected=expected,
        fix="use a checkpoint quantised in one of these ways, or the original one",
    )
