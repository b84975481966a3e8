"""Storage formats of weights: ND (2) and FRACTAL_NZ (29), as CANN's `aclFormat` numbers them.

The simulator keeps the bytes in order and remembers the format; what may read a tensor in FRACTAL_NZ is only a product.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from vllm_simulator.npu.dispatch import rule

ND, FRACTAL_NZ = 2, 29
BLOCK = 16
"""A fractal has 16 rows; in columns it has 32 bytes."""


def functions(native: ModuleType) -> dict[str, Callable[..., object]]:
    """`npu_format_cast` and `get_npu_format`, which are no ops of the dispatcher for callers."""

    def get_npu_format(input: Tensor) -> int:
        return int(native.format_of(input))

    def npu_format_cast(
        input: Tensor, acl_format: int, *, customize_dtype: int | None = None, input_dtype: int | None = None
    ) -> Tensor:
        rule(input.device.type == "npu", f"a tensor of {input.device} has no storage format")
        rule(acl_format in (ND, FRACTAL_NZ), f"format {acl_format} is not simulated")
        if acl_format == FRACTAL_NZ:
            rule(input.dim() >= 2 and input.is_contiguous(), "FRACTAL_NZ needs a contiguous matrix")
            rule(input.dtype in (torch.float16, torch.bfloat16, torch.int8), f"FRACTAL_NZ of {input.dtype}")
            columns = 32 // input.element_size()
            aligned = input.shape[-2] % BLOCK == 0 and input.shape[-1] % columns == 0
            rule(aligned, f"FRACTAL_NZ needs multiples of {BLOCK} and {columns}, not {tuple(input.shape[-2:])}")
        result = input.clone()
        native.set_format(result, acl_format)
        return result

    return {"get_npu_format": get_npu_format, "npu_format_cast": npu_format_cast}
