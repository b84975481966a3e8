"""The paged KV cache and attention over it: `_npu_reshape_and_cache`, `npu_fused_infer_attention_score`.

The vendor's attention takes lengths as lists of the host. The engine's lengths are on the device, so a step waits once for
them, before its first layer; the other layers use the same lists. A captured step is cut there (`vllm_ascend.graphs`).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
import torch_npu
from torch import Tensor

from vllm_ascend import graphs
from vllm_ascend.backends.offers import BLOCK_SIZES, HALF, HEAD_SIZES
from vllm_ascend.ops.rope import rotary_embedding
from vllm_core.api import UnsupportedError

MASK = 2048
"""The vendor's compressed causal mask has this many rows and columns, whatever the lengths."""
CAUSAL = 3
"""`sparse_mode`: the last query sees the last key."""
LENGTHS = ("actual_seq_lengths", "actual_seq_lengths_kv")
"""Arguments that are lists of the host: running sums of queries, and each row's keys."""


@dataclass(frozen=True, slots=True)
class KV:
    """One layer's keys and values, each [num_blocks, tokens_per_block, Hk, D]."""

    keys: Tensor
    values: Tensor

    @property
    def tokens_per_block(self) -> int:
        """Tokens of a block."""
        return self.keys.shape[1]


@dataclass(frozen=True, slots=True)
class _Lengths:
    """A step's lengths on the host, and the device's tensors that they were read from."""

    query_start: weakref.ref[Tensor]
    seq_lens: weakref.ref[Tensor]
    ends: list[int]
    """Queries up to the end of each row, as running sums."""
    keys: list[int]
    """Keys of each row."""
    capture: int
    """The number of the capture that they stand in; 0 for lengths that were read."""


_masks: dict[torch.device, Tensor] = {}
_last: list[_Lengths] = []


def kv_bind(memory: Tensor, num_kv_heads: int, head_size: int, dtype: str, tokens_per_block: int) -> KV:
    """View uint8 [num_blocks, block_bytes]: its first half holds all keys, the second all values. Raises UnsupportedError."""
    for what, wanted, supported in (
        ("KV dtype", dtype, HALF),
        ("head size", head_size, HEAD_SIZES),
        ("block size", tokens_per_block, BLOCK_SIZES),
    ):
        if wanted not in supported:
            raise _unsupported(what, wanted, ", ".join(map(str, sorted(supported, key=str))))
    both = memory.view(-1).view(getattr(torch, dtype)).view(2, len(memory), tokens_per_block, num_kv_heads, head_size)
    return KV(both[0], both[1])


def kv_write(kv: KV, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Store k and v [T,Hk,D] at int64 [T] slots. Raises UnsupportedError for another dtype than the cache's."""
    _same_dtype(k, kv)
    if len(slot_mapping):
        slots = slot_mapping.to(torch.int32)
        torch_npu._npu_reshape_and_cache(k.contiguous(), v.contiguous(), kv.keys, kv.values, slots)


def qk_norm_rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor | None,
    interleaved: bool,
    kv: KV,
    slot_mapping: Tensor,
) -> None:
    """Norms where there are weights, rotation where there is a table, then the write. Raises UnsupportedError."""
    _same_dtype(k, kv)
    for x, weight in ((q, q_weight), (k, k_weight)):
        if weight is not None:
            x.copy_(torch_npu.npu_rms_norm(x, weight.to(x.dtype), eps)[0])
    if cos_sin is not None:
        rotary_embedding(q, k, positions, cos_sin, interleaved)
    kv_write(kv, k, v, slot_mapping)


def paged_attention(
    out: Tensor,
    q: Tensor,
    kv: KV,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None = None,
) -> None:
    """Causal attention over mixed rows, q and out [T,Hq,D]. Raises UnsupportedError for a window, a soft cap or sinks."""
    _same_dtype(q, kv)
    for what, value in (("sliding window", window), ("soft cap", soft_cap), ("attention sinks", sinks is not None)):
        if value:
            raise _unsupported(what, value, "none: the vendor's attention has no such mask here")
    if not len(q):
        return
    lengths = _lengths(query_start, seq_lens, len(q))
    heads = kv.keys.shape[2]
    found, _ = torch_npu.npu_fused_infer_attention_score(
        q.contiguous(),
        kv.keys.flatten(2),
        kv.values.flatten(2),
        atten_mask=_mask(q.device),
        actual_seq_lengths=lengths.ends,
        actual_seq_lengths_kv=lengths.keys,
        block_table=block_table,
        num_heads=q.shape[1],
        num_key_value_heads=heads,
        scale=scale,
        input_layout="TND",
        sparse_mode=CAUSAL,
        block_size=kv.tokens_per_block,
    )
    out.copy_(found)


def _same_dtype(x: Tensor, kv: KV) -> None:
    if x.dtype != kv.keys.dtype:
        raise _unsupported("dtype", str(x.dtype).removeprefix("torch."), f"the cache's, {kv.keys.dtype}")


def _unsupported(what: str, found: object, expected: str) -> UnsupportedError:
    return UnsupportedError(
        "The vendor's attention has another rule",
        on=what,
        found=str(found),
        expected=expected,
        fix="leave it to core's reference: --provider paged_attention=reference",
    )


def _lengths(query_start: Tensor, seq_lens: Tensor, tokens: int) -> _Lengths:
    """Lengths on the host; waits for the device, or cuts the capture, the first time that a step's tensors are seen.

    A captured step has rows of one query each; what stands in for its lengths is replaced at each replay.
    """
    recording = graphs.recording()
    capture = 0 if recording is None else recording.number
    last = _last[0] if _last else None
    if last and last.query_start() is query_start and last.seq_lens() is seq_lens and last.capture == capture:
        return last
    if recording is None:
        ends, keys = _read(query_start, seq_lens)
    else:
        rows = len(seq_lens)
        if rows != tokens:
            raise _unsupported("captured step", f"{tokens} queries in {rows} rows", "one query a row")
        recording.cut(lambda: dict(zip(LENGTHS, _read(query_start, seq_lens), strict=True)))
        ends, keys = list(range(1, rows + 1)), [1] * rows
    _last[:] = [_Lengths(weakref.ref(query_start), weakref.ref(seq_lens), ends, keys, capture)]
    return _last[0]


def _read(query_start: Tensor, seq_lens: Tensor) -> tuple[list[int], list[int]]:
    starts, keys = query_start.tolist(), seq_lens.tolist()
    return starts[1:], keys


def _mask(device: torch.device) -> Tensor:
    """The compressed mask: 1 where a key is hidden."""
    if device not in _masks:
        _masks[device] = torch.ones(MASK, MASK, dtype=torch.int8, device=device).triu_(1)
    return _masks[device]


def kv_copy(kv: KV, source: Tensor, target: Tensor) -> None:
    """Copy whole blocks."""
    for cache in (kv.keys, kv.values):
        cache.index_copy_(0, target, cache.index_select(0, source))


def kv_export(out: Tensor, kv: KV, blocks: Tensor) -> None:
    """Write float32 [N,2,tokens_per_block,Hk,D]."""
    for index, cache in enumerate((kv.keys, kv.values)):
        out[:, index].copy_(cache.index_select(0, blocks))


def kv_import(kv: KV, blocks: Tensor, target: Tensor) -> None:
    """The inverse of `kv_export`, rounded to the cache's dtype."""
    for index, cache in enumerate((kv.keys, kv.values)):
        cache.index_copy_(0, target, blocks[:, index].to(cache.dtype))
