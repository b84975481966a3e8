"""The batch state through the C ABI. Oracle: `vllm_core.ops.batch`.

The C structs of a state, and the tensors of pure decode steps, are made once: such a step is a call, and nothing is
allocated while its rows and the width of its block tables stay.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_core.api import BatchState, StepInputs
from vllm_core.api import batch as layout
from vllm_cpu import recording
from vllm_cpu.ops.native_call import function, packer

_pack_update, _pack_build, _pack_advance = packer("PPq"), packer("PPPq"), packer("PPPPPqq")
_batch_update, _build_step, _advance = map(function, ("batch_update", "build_step", "advance"))
_MOST = 8


class CState(ctypes.Structure):
    """`vllm_state` of ops.h."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("tokens", "computed", "params", "bias_ids", "bias_values", "stop_ids")],
        *[(name, ctypes.c_void_p) for name in ("bad_words", "tables", "table_widths", "tokens_per_block")],
        *[(name, ctypes.c_int64) for name in ("num_groups", "num_slots", "tokens_width")],
        *[(name, ctypes.c_int64) for name in ("bias_width", "stop_width", "bad_width")],
    ]


class CStep(ctypes.Structure):
    """`vllm_step` of ops.h."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("token_ids", "positions", "slots", "query_start", "seq_lens")],
        *[(name, ctypes.c_void_p) for name in ("sample_rows", "sample_slots", "sample_lengths")],
        *[(name, ctypes.c_void_p) for name in ("slot_mapping", "tables", "table_columns")],
    ]


class NativeState:
    """The C struct of a batch state, and the inputs of its last decode step."""

    __slots__ = ("_kept", "_struct", "address", "decode", "sizes", "state", "widths")

    def __init__(self, state: BatchState) -> None:
        count = len(state.block_tables)
        self.state, self.decode = state, None
        self.sizes = state.tokens_per_block
        self.widths = tuple(table.shape[1] for table in state.block_tables)
        self._kept = (
            (ctypes.c_void_p * count)(*(table.data_ptr() for table in state.block_tables)),
            (ctypes.c_int64 * count)(*self.widths),
            (ctypes.c_int64 * count)(*self.sizes),
        )
        names = ("tokens", "computed", "params", "bias_ids", "bias_values", "stop_ids", "bad_words")
        self._struct = CState(
            *(getattr(state, name).data_ptr() for name in names),
            *(ctypes.addressof(array) for array in self._kept),
            count,
            state.num_slots,
            *(tensor.shape[1] for tensor in (state.tokens, state.bias_ids, state.stop_ids, state.bad_words)),
        )
        self.address = ctypes.addressof(self._struct)

    decode: Step | None

    def step(self, rows: int, longest: int) -> Step:
        """The inputs of a decode step of as many rows, kept while their number stays."""
        step = self.decode
        if step is None or step.rows != rows:
            step = self.decode = Step(self, rows, rows, rows, longest)
        elif step.longest != longest:
            step.fit(longest)
        return step


class Step:
    """A step's tensors and their C struct; the tables follow the longest sequence."""

    def __init__(self, native: NativeState, rows: int, tokens: int, sampled: int, longest: int) -> None:
        groups = len(native.sizes)
        ints = torch.empty(2 * tokens + 3 * rows + 1 + sampled, dtype=torch.int32)
        longs = torch.empty(2 * sampled + groups * tokens, dtype=torch.int64)
        token_ids, positions, slots, query_start, seq_lens, lengths = torch.split(
            ints, [tokens, tokens, rows, rows + 1, rows, sampled]
        )
        sample_rows, sample_slots, *mapping = torch.split(longs, [sampled, sampled, *[tokens] * groups])
        self._native, self.rows, self.longest = native, rows, longest
        self._columns = (ctypes.c_int64 * groups)()
        self._mapping = (ctypes.c_void_p * groups)(*(each.data_ptr() for each in mapping))
        self._tables = (ctypes.c_void_p * groups)()
        self.inputs = StepInputs(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            query_start=query_start,
            seq_lens=seq_lens,
            sample_rows=sample_rows,
            sample_slots=sample_slots,
            sample_lengths=lengths,
            slot_mapping=tuple(mapping),
            block_tables=self._make_tables(longest),
            num_tokens=tokens,
            num_rows=rows,
            max_query_len=1,
            max_seq_len=longest,
        )
        tensors = (token_ids, positions, slots, query_start, seq_lens, sample_rows, sample_slots, lengths)
        arrays = (self._mapping, self._tables, self._columns)
        self._struct = CStep(*(each.data_ptr() for each in tensors), *(ctypes.addressof(each) for each in arrays))
        self.address = ctypes.addressof(self._struct)

    def fit(self, longest: int) -> None:
        """Make room for sequences of ``longest`` tokens."""
        self.longest = self.inputs.max_seq_len = longest
        if tuple(self._columns) != self._widths(longest):
            self.inputs.block_tables = self._make_tables(longest)

    def _widths(self, longest: int) -> tuple[int, ...]:
        pairs = zip(self._native.sizes, self._native.widths, strict=True)
        return tuple(min(max(1, -(-longest // size)), width) for size, width in pairs)

    def _make_tables(self, longest: int) -> tuple[Tensor, ...]:
        self._columns[:] = list(self._widths(longest))
        tables = tuple(torch.empty(self.rows, columns, dtype=torch.int32) for columns in self._columns)
        self._tables[:] = [table.data_ptr() for table in tables]
        return tables


_known: dict[int, NativeState] = {}


def native_state(state: BatchState) -> NativeState:
    """The C form of ``state``; the last few states are remembered and kept alive."""
    found = _known.get(id(state))
    if found is None or found.state is not state:
        if len(_known) >= _MOST:
            _known.clear()
        found = _known[id(state)] = NativeState(state)
    return found


def batch_update(state: BatchState, packed: Tensor, header: Sequence[int]) -> None:
    """Apply the packed difference."""
    if not (header[layout.H_ADMITTED] or header[layout.H_BLOCKS] or header[layout.H_EXTRA]):
        return
    native = native_state(state)
    _batch_update(_pack_update(0, native.address, packed.data_ptr(), packed.shape[0]), packed, native)


def build_step(state: BatchState, packed: Tensor, header: Sequence[int]) -> StepInputs:
    """Gather the step's inputs; those of a pure decode step are valid until the next one is built."""
    native = native_state(state)
    rows, tokens, sampled = header[layout.H_SCHEDULED], header[layout.H_NUM_TOKENS], header[layout.H_NUM_SAMPLED]
    longest = header[layout.H_MAX_SEQ]
    if recording.now() is not None:
        # Its own for as long as it is replayed; sequences may have any length then.
        step = Step(native, rows, tokens, sampled, longest)
        step.inputs.max_query_len = header[layout.H_MAX_QUERY]
    elif rows == tokens == sampled:
        step = native.step(rows, longest)
    else:
        step = Step(native, rows, tokens, sampled, longest)
        step.inputs.max_query_len = header[layout.H_MAX_QUERY]
    _build_step(_pack_build(0, native.address, packed.data_ptr(), step.address, packed.shape[0]), packed, native, step)
    return step.inputs


def advance(state: BatchState, inputs: StepInputs, tokens: Tensor) -> None:
    """Count the rows' tokens as computed; append the sampled ones where they fit."""
    pointers = inputs.slots.data_ptr(), inputs.seq_lens.data_ptr(), inputs.sample_slots.data_ptr(), tokens.data_ptr()
    sampled = min(tokens.shape[0], inputs.sample_slots.shape[0])
    native = native_state(state)
    kept = tokens, inputs.slots, inputs.seq_lens, inputs.sample_slots, native
    _advance(_pack_advance(0, native.address, *pointers, inputs.num_rows, sampled), *kept)
