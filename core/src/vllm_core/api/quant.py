"""Weights in a quantised form, as they pass between the loader and `linear_pack`. Imports no torch at run time.

A `QuantTensor` stands for a float matrix [N, K]: one row an output, K inputs. Its format is one of `FORMATS`, whose
definition says how data, scale and zero give the numbers; `vllm_core.ops.quant.dequantize` is the executable form of these
definitions. Providers name the formats that they read in `Offer.formats`; what their provider does not read, core decodes to
the model's dtype before `linear_pack`. Layers that are stacked (q, k, v) are one `QuantTensor` where their formats agree, else
a `QuantStack`, which a provider takes that names `STACK` among its formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

PLAIN = "plain"
"""In `Offer.formats`: tensors of the model's dtype."""

STACK = "stack"
"""In `Offer.formats`: stacks whose parts have several of the named formats."""


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """How a format stores rows: `block` inputs share a scale along K (0: the whole row or more), and in how many bytes.

    `block_bytes` is that of one block of a GGUF row; 0 where data, scale and zero are tensors of their own.
    """

    name: str
    block: int
    block_bytes: int
    doc: str


def _table(*rows: QuantFormat) -> Mapping[str, QuantFormat]:
    return MappingProxyType({row.name: row for row in rows})


_GGUF = "data uint8 [N, K / block * block_bytes]: the rows of a GGUF file (ggml's block of this name)."

FORMATS: Mapping[str, QuantFormat] = _table(
    QuantFormat("q4_0", 32, 18, _GGUF),
    QuantFormat("q4_1", 32, 20, _GGUF),
    QuantFormat("q5_0", 32, 22, _GGUF),
    QuantFormat("q5_1", 32, 24, _GGUF),
    QuantFormat("q8_0", 32, 34, _GGUF),
    QuantFormat("q2_k", 256, 84, _GGUF),
    QuantFormat("q3_k", 256, 110, _GGUF),
    QuantFormat("q4_k", 256, 144, _GGUF),
    QuantFormat("q5_k", 256, 176, _GGUF),
    QuantFormat("q6_k", 256, 210, _GGUF),
    QuantFormat("int8_channel", 0, 0, "data int8 [N, K], scale float32 [N]: data * scale[n]."),
    QuantFormat(
        "int4_group",
        0,
        0,
        "data uint8 [N, K / 2]: input 2i in the low, 2i + 1 in the high four bits; scale float [N, K / g] and zero uint8 "
        "[N, K / g] of groups of g = K / scale.shape[1] inputs: (nibble - zero) * scale. AWQ (Lin et al. 2023) and GPTQ "
        "(Frantar et al. 2022) checkpoints are brought to it while loading.",
    ),
    QuantFormat("fp8_tensor", 0, 0, "data float8_e4m3fn [N, K], scale float32 [1]: data * scale."),
    QuantFormat("fp8_channel", 0, 0, "data float8_e4m3fn [N, K], scale float32 [N]: data * scale[n]."),
    QuantFormat(
        "fp8_block128",
        128,
        0,
        "data float8_e4m3fn [N, K], scale float32 [ceil(N / 128), ceil(K / 128)]: one scale a square of 128 x 128.",
    ),
)
"""All formats of the current API version, by name."""

FP8_FORMATS = frozenset({"fp8_tensor", "fp8_channel", "fp8_block128"})
"""Those whose products may have their inputs rounded to fp8, where the user asks for it."""


ONLINE_FORMATS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"int8": ("q8_0", "int8_channel"), "int4": ("q4_1", "int4_group"), "fp8": ("fp8_channel",)}
)
"""What core rounds weights to for ``--quantization``: the first format that the provider reads and the matrix can have."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantTensor:
    """A float matrix of `shape` [N, K] in `format`. `scale` and `zero` are None where the format's data holds them."""

    format: str
    shape: tuple[int, int]
    data: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""
        return sum(part.numel() * part.element_size() for part in (self.data, self.scale, self.zero) if part is not None)


@dataclass(frozen=True, slots=True, eq=False)
class QuantStack:
    """Matrices of one K on top of each other, in this order, whose formats differ; plain tensors may be among them."""

    parts: tuple[QuantTensor | Tensor, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of the whole."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]


Weight: TypeAlias = "Tensor | QuantTensor | QuantStack"
"""What `linear_pack` may be given, and what `embedding` reads."""
