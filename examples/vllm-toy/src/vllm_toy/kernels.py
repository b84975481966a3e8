"""The device's machine code. Each function runs on the device, when the queue comes to it, on the bytes of its memory.

Names and arguments are those of `vllm_core.api.OPS`, outputs first. What is not here has no kernel of its own: core's
reference runs on the device op by op. Oracle of each: the reference of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from vllm_core.api import OPS, StepInputs

ROWS = 8

batch_update = OPS["batch_update"].load_reference()
advance = OPS["advance"].load_reference()
sample = OPS["sample"].load_reference()
logit_adjust = OPS["logit_adjust"].load_reference()
rotary_embedding = OPS["rotary_embedding"].load_reference()


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight as the device reads it: [K, N], a view of the checkpoint's [N, K]; bias [N] or None."""

    transposed: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class KV:
    """One layer's blocks [num_blocks, Hk, 2, tokens_per_block, D]: a head's keys, then its values."""

    blocks: Tensor


def build_step(out: StepInputs, state: object, packed: Tensor, header: list[int]) -> None:
    """Fill the tensors of ``out``."""
    found = OPS["build_step"].load_reference()(state, packed, header)
    for name in ("token_ids", "positions", "slots", "query_start", "seq_lens", "sample_rows", "sample_slots", "sample_lengths"):
        getattr(out, name).copy_(getattr(found, name))
    for name in ("slot_mapping", "block_tables"):
        for target, source in zip(getattr(out, name), getattr(found, name), strict=True):
            target.copy_(source)


def embedding(out: Tensor, ids: Tensor, weight: Tensor, scale: float) -> None:
    """``out[T,H] = weight[ids] * scale``."""
    torch.mul(weight[ids], scale, out=out)


def gather_rows(out: Tensor, x: Tensor, rows: Tensor) -> None:
    """``out[R,H] = x[rows]``."""
    out.copy_(x[rows])


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """Over the last dimension, in float32."""
    wide = x.float()
    out.copy_(wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight)


def add_rms_norm(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """``residual += x``, then the norm of it."""
    residual.add_(x)
    rms_norm(out, residual, weight, eps)


def gated_activation(out: Tensor, x: Tensor, kind: str) -> None:
    """``out[T,I] = f(x[:, :I]) * x[:, I:]`` in float32."""
    gate, up = x.float().chunk(2, dim=-1)
    active = (
        functional.silu(gate)
        if kind == "silu"
        else functional.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none")
    )
    out.copy_(active * up)


def linear(out: Tensor, x: Tensor, weight: Packed) -> None:
    """``out[T,N] = x[T,K] @ weight + bias``; out may be float32 where x is narrow.

    The unit multiplies ROWS rows at a time: so a row's sums do not depend on how many others there are.
    """
    padded = functional.pad(x.to(out.dtype), (0, 0, 0, -len(x) % ROWS))
    out.copy_(torch.mm(padded, weight.transposed.to(out.dtype))[: len(x)])
    if weight.bias is not None:
        out.add_(weight.bias)


def kv_write(kv: KV, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Store k and v [T,Hk,D] at int64 [T] slots."""
    size = kv.blocks.shape[3]
    block, offset = slot_mapping // size, slot_mapping % size
    kv.blocks[block, :, 0, offset] = k.to(kv.blocks.dtype)
    kv.blocks[block, :, 1, offset] = v.to(kv.blocks.dtype)


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
    """Norms and rotation in place, where there are weights and a table; then `kv_write`. One launch for three."""
    for x, weight in ((q, q_weight), (k, k_weight)):
        if weight is not None:
            rms_norm(x, x, weight, eps)
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
    """Causal attention, one sequence after the other: q and out [T,Hq,D], float32 sinks [Hq]."""
    size, starts = kv.blocks.shape[3], query_start.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        queries = q[starts[row] : starts[row + 1]].float()
        count = len(queries)
        if count == 0:
            continue
        first = max(0, length - count + 1 - window) if window else 0
        table = block_table[row, first // size : -(-length // size)].long()
        # [n, Hk, 2, size, D] -> [2, Hk, n * size, D], from the first key that a query can see to the last one written.
        both = kv.blocks[table].permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, first % size :].float()
        keys, values = both[:, :, : length - first]
        grouped = queries.view(count, keys.shape[0], -1, queries.shape[2])
        scores = torch.einsum("thgd,hld->hgtl", grouped, keys) * scale
        if soft_cap:
            scores = torch.tanh(scores / soft_cap) * soft_cap
        at, position = torch.arange(first, length), torch.arange(length - count, length)[:, None]
        hidden = (at > position) | ((at <= position - window) if window else torch.tensor(False))
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is None:
            weights = scores.softmax(-1)
        else:
            column = sinks.view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
        out[starts[row] : starts[row + 1]] = torch.einsum("hgtl,hld->thgd", weights, values).flatten(1, 2).to(out.dtype)


def kv_copy(kv: KV, source: Tensor, target: Tensor) -> None:
    """Copy whole blocks."""
    kv.blocks[target] = kv.blocks[source]


def kv_export(out: Tensor, kv: KV, blocks: Tensor) -> None:
    """Write float32 [N,2,tokens_per_block,Hk,D]."""
    out.copy_(kv.blocks[blocks].permute(0, 2, 3, 1, 4))


def kv_import(kv: KV, blocks: Tensor, target: Tensor) -> None:
    """The inverse of `kv_export`."""
    kv.blocks[target] = blocks.permute(0, 3, 1, 2, 4).to(kv.blocks.dtype)
