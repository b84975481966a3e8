# ruff: noqa: N999 - the extension has this name
"""The ops of ``torch.ops._C`` that are called."""

from __future__ import annotations

import torch

library = torch.library.Library("_C", "DEF")


def _gated(out, input, activate):
    gate, up = input.float().chunk(2, -1)
    out.copy_(activate(gate) * up)


def silu_and_mul(result, input):
    _gated(result, input, torch.nn.functional.silu)


def gelu_and_mul(out, input):
    _gated(out, input, torch.nn.functional.gelu)


def gelu_tanh_and_mul(out, input):
    _gated(out, input, lambda gate: torch.nn.functional.gelu(gate, approximate="tanh"))


def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    assert kv_cache_dtype == "auto"
    size = key_cache.shape[1]
    key_cache[slot_mapping // size, slot_mapping % size] = key
    value_cache[slot_mapping // size, slot_mapping % size] = value


library.define("silu_and_mul(Tensor! result, Tensor input) -> ()")
library.define("gelu_and_mul(Tensor! out, Tensor input) -> ()")
library.define("gelu_tanh_and_mul(Tensor! out, Tensor input) -> ()")
library.define(
    "reshape_and_cache_flash(Tensor key, Tensor value, Tensor! key_cache, Tensor! value_cache, Tensor slot_mapping, "
    "str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()"
)
for call in (silu_and_mul, gelu_and_mul, gelu_tanh_and_mul, reshape_and_cache_flash):
    library.impl(call.__name__, call, "CompositeExplicitAutograd")
