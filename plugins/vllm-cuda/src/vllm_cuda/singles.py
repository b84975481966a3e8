"""Attention of rows of one query by the kernel of `decode`: whether it takes them, and their launch."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from vllm_cuda import decode
from vllm_cuda.backends import decodes, hopper
from vllm_cuda.decode import NewTokens
from vllm_cuda.decode_tiles import Fresh
from vllm_triton.kernels.codec import PLAIN
from vllm_triton.ops.cache import KV
from vllm_triton.tuning import active

ALIGNED = 8
"""Numbers of 16 bits at whose multiples bulk copies find tokens, heads and blocks."""

_AT_ONCE = 16
"""Bytes that are copied or read at once."""

_form_of = lru_cache(maxsize=1024)(decodes.form_of)


def attend(
    out: Tensor,
    q: Tensor,
    kv: KV,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    new: NewTokens | None,
) -> bool:
    """Queue attention of q [T,Hq,D] where the kernel takes it; whether it did. Without masks, caps and sinks; rows of several
    queries are passed over."""
    on = active()
    if on.family != hopper.TUNING.family or scale <= 0.0 or not _is_plain(out, q, kv) or not (new is None or _is_new(new, q)):
        return False
    if query_start.data_ptr() % _AT_ONCE or seq_lens.data_ptr() % _AT_ONCE:
        return False
    heads, half = q.shape[1] // kv.num_heads, q.dtype == torch.float16
    shape = (seq_lens.shape[0], heads, kv.num_heads, q.shape[2], kv.tokens_per_block)
    form = _form_of(*shape, half, None if new is None else _fresh_of(new), on.multiprocessors)
    if form is None:
        return False
    decode.launch(out, q, kv, query_start, seq_lens, block_table, scale, new, form, decodes.LEAST, on.multiprocessors)
    return True


def is_readable(heads: Tensor) -> bool:
    """Whether heads [T,H,D] lie where 16 bytes of them are read or written at once."""
    token, head, number = heads.stride()
    return number == 1 and token % ALIGNED == 0 and head % ALIGNED == 0 and heads.data_ptr() % (2 * ALIGNED) == 0


def _is_plain(out: Tensor, q: Tensor, kv: KV) -> bool:
    """Whether all are of the same 16 bits, at addresses that bulk copies read."""
    if not q.shape[0] or q.dtype not in (torch.bfloat16, torch.float16) or kv.kind != PLAIN.value:
        return False
    if not out.dtype == kv.blocks.dtype == q.dtype or kv.block_stride % ALIGNED or kv.blocks.data_ptr() % (2 * ALIGNED):
        return False
    return is_readable(q) and is_readable(out)


def _is_new(new: NewTokens, q: Tensor) -> bool:
    table = new.cos_sin
    if (new.q_weight is None) != (new.k_weight is None) or not new.k.dtype == new.v.dtype == q.dtype:
        return False
    at_once = table is None or (table.is_contiguous() and table.data_ptr() % _AT_ONCE == 0)
    return at_once and is_readable(new.k) and is_readable(new.v)


@lru_cache(maxsize=64)
def _shared_fresh(norm: bool, pairs: int, interleaved: bool) -> Fresh:
    return Fresh(norm, pairs, interleaved)


def _fresh_of(new: NewTokens) -> Fresh:
    pairs = 0 if new.cos_sin is None else new.cos_sin.shape[2]
    return _shared_fresh(new.q_weight is not None, pairs, new.interleaved and pairs > 0)
