"""numpy views of a batch state, made once: a step touches ten tensors, and a view costs as much as a small copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vllm_core.api import BatchState

if TYPE_CHECKING:
    from vllm_cpu.ops.decode import DecodeStep

Int32s = npt.NDArray[np.int32]
_MOST = 8
_known: dict[int, Views] = {}


@dataclass(slots=True, eq=False)
class Views:
    """The tensors of one state as arrays on the same memory, and what is kept from step to step."""

    state: BatchState
    tokens: Int32s
    computed: Int32s
    params: Int32s
    floats: npt.NDArray[np.float32]
    bias_ids: Int32s
    bias_values: npt.NDArray[np.float32]
    stop_ids: Int32s
    bad_words: Int32s
    tables: tuple[Int32s, ...]
    tokens_flat: Int32s
    tables_flat: tuple[Int32s, ...]
    decode: DecodeStep | None = None


def views(state: BatchState) -> Views:
    """The views of ``state``; the last few states are remembered and kept alive."""
    found = _known.get(id(state))
    if found is None or found.state is not state:
        if len(_known) >= _MOST:
            _known.clear()
        found = _known[id(state)] = _make(state)
    return found


def _make(state: BatchState) -> Views:
    params = state.params.numpy()
    return Views(
        state=state,
        tokens=state.tokens.numpy(),
        computed=state.computed.numpy(),
        params=params,
        floats=params.view(np.float32),
        bias_ids=state.bias_ids.numpy(),
        bias_values=state.bias_values.numpy(),
        stop_ids=state.stop_ids.numpy(),
        bad_words=state.bad_words.numpy(),
        tables=tuple(table.numpy() for table in state.block_tables),
        tokens_flat=state.tokens.view(-1).numpy(),
        tables_flat=tuple(table.view(-1).numpy() for table in state.block_tables),
    )
