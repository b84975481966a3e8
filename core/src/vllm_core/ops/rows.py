"""Which row each token of a step belongs to, computed on the device."""

from __future__ import annotations

import torch
from torch import Tensor


def row_of_tokens(query_start: Tensor, num_tokens: int) -> Tensor:
    """int64 [T]: the row of each token, from int32 [S + 1]; rows may be empty. No host synchronisation."""
    tokens = torch.arange(num_tokens, dtype=query_start.dtype, device=query_start.device)
    return torch.searchsorted(query_start[1:], tokens, right=True)
