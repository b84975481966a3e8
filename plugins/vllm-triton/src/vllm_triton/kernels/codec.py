"""Numbers of one byte in the KV cache: fp8 (Micikevicius et al. 2022) as it is, int8 with a float32 scale a token and head.

Codes of fp8 are bytes here, rounded to nearest even and saturated, by integer operations that every chip has; FP8 says that
the compiler converts float8e4nv itself, which takes fewer instructions where attention reads.
"""

from __future__ import annotations

import triton
import triton.language as tl

PLAIN = tl.constexpr(0)
E4M3 = tl.constexpr(1)
E5M2 = tl.constexpr(2)
INT8 = tl.constexpr(3)


@triton.jit
def widened(raw, like, KIND: tl.constexpr, FP8: tl.constexpr):
    """The numbers of codes in the dtype of ``like``; those of int8 without their scale."""
    if KIND == E4M3:
        if FP8:
            result = raw.to(tl.float8e4nv, bitcast=True).to(like.dtype)
        else:
            # The same exponent and mantissa in a float16, whose bias is larger by 8.
            word = raw.to(tl.int16)
            bits = ((word & 0x80) << 8) | ((word & 0x7F) << 7)
            result = (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(like.dtype)
    elif KIND == E5M2:
        # The upper half of a float16.
        result = (raw.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(like.dtype)
    else:
        result = raw.to(like.dtype)
    return result


@triton.jit
def narrowed(value, KIND: tl.constexpr):
    """Codes of float32 numbers; of int8, of numbers that are divided by their scale."""
    if KIND == INT8:
        # Adding and taking away 1.5 * 2**23 rounds to nearest even.
        code = ((value + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
        if KIND == E4M3:
            size = tl.minimum(tl.abs(value), 448.0)
            bits = size.to(tl.int32, bitcast=True)
            normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
            # Steps of a subnormal number are those of a float32 next to 2**14.
            tiny = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
            number = tl.where(size < 0.015625, tiny, normal)
        else:
            size = tl.minimum(tl.abs(value), 57344.0)
            bits = size.to(tl.int32, bitcast=True)
            normal = ((bits + 0xFFFFF + ((bits >> 21) & 1)) >> 21) - (112 << 2)
            tiny = (size + 128.0).to(tl.int32, bitcast=True) - 0x43000000
            number = tl.where(size < 0.00006103515625, tiny, normal)
        code = (number | sign).to(tl.uint8)
    return code


@triton.jit
def scale_of(largest):
    """The scale of int8 codes of numbers up to ``largest``; 1 where all are 0."""
    return tl.where(largest > 0.0, largest / 127.0, 1.0)
