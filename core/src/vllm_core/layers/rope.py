"""Tables of cosines and sines for rotary embeddings (Su et al. 2021, arXiv:2104.09864) with all scalings of configs.

One table serves all sequences, so the two scalings that depend on a sequence's length take the longest sequence
that the engine allows instead: `dynamic` and `longrope`. Up to ``max_position_embeddings`` (dynamic) or the original
length (longrope) that is what transformers computes for every sequence; beyond, what it computes for the longest.
The arithmetic is float32 in transformers' order, so that long positions round as they do there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from vllm_core.models.spec import RopeSpec


def cos_sin(rope: RopeSpec, longest: int, positions: int) -> torch.Tensor:
    """Return float32 [positions, 2, rotary_dim / 2]: cosines at [p, 0], sines at [p, 1], the attention factor included.

    ``longest`` is the longest sequence in tokens, which some scalings depend on.
    """
    frequencies, factor = inverse_frequencies(rope, longest)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=1) * factor


def inverse_frequencies(rope: RopeSpec, longest: int) -> tuple[torch.Tensor, float]:
    """Return float32 [rotary_dim / 2] in radians per token, and the factor on cosines and sines."""
    return _SCALINGS[rope.kind](rope, longest, dict(rope.scaling))


def _plain(theta: float, rotary_dim: int) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim))


def _default(rope: RopeSpec, longest: int, scaling: dict[str, Any]) -> tuple[torch.Tensor, float]:
    return _plain(rope.theta, rope.rotary_dim), 1.0


def _linear(rope: RopeSpec, longest: int, scaling: dict[str, Any]) -> tuple[torch.Tensor, float]:
    return _plain(rope.theta, rope.rotary_dim) / scaling["factor"], 1.0


def _dynamic(rope: RopeSpec, longest: int, scaling: dict[str, Any]) -> tuple[torch.Tensor, float]:
    factor, trained, dim = scaling["factor"], scaling["max_position_embeddings"], rope.rotary_dim
    stretch = (factor * max(longest, trained) / trained) - (factor - 1)
    return _plain(rope.theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _llama3(rope: RopeSpec, longest: int, scaling: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Long wavelengths are divided, short ones kept, those between interpolated (Llama 3.1, arXiv:2407.21783)."""
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    original = scaling["original_max_position_embeddings"]
    frequencies = _plain(rope.theta, rope.rotary_dim)
    wavelength = 2 * math.pi / frequencies
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelength > original / low, frequencies / factor, between)
    return torch.where(wavelength < original / high, frequencies, scaled), 1.0


def _yarn(rope: RopeSpec, longest: int, scaling: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Interpolates slow dimensions, extrapolates fast ones (Peng et al. 2023, arXiv:2309.00071)."""
    factor, dim = scaling["factor"], rope.rotary_dim
    powers = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    first, last = _yarn_range(rope, scaling)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    extrapolated = 1 - ramp
    frequencies = 1.0 / (factor * powers) * (1 - extrapolated) + 1.0 / powers * extrapolated
    return frequencies, _yarn_attention_factor(scaling)


def _yarn_range(rope: RopeSpec, scaling: dict[str, Any]) -> tuple[float, float]:
    """The dimensions between which interpolation fades in."""

    def dimension(rotations: float) -> float:
        turns = scaling["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    first, last = dimension(scaling["beta_fast"]), dimension(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    return first, last if first != last else last + 0.001


def _yarn_attention_factor(scaling: dict[str, Any]) -> float:
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    if "mscale" in scaling and "mscale_all_dim" in scaling:
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)


def _longrope(rope: RopeSpec, longest: int, scaling: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """One searched factor per dimension, a set for short and one for long contexts (Ding et al. 2024, arXiv:2402.13753)."""
    original, factor, dim = scaling["original_max_position_embeddings"], scaling["factor"], rope.rotary_dim
    factors = torch.tensor(scaling["long_factor" if longest > original else "short_factor"], dtype=torch.float32)
    powers = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return 1.0 / (factors * powers), float(attention)


_SCALINGS: dict[str, Callable[[RopeSpec, int, dict[str, Any]], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
