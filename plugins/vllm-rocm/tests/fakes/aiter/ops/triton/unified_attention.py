"""``aiter.ops.triton.unified_attention``."""

from __future__ import annotations

import torch


def unified_attention(
    q,
    k,
    v,
    out,
    cu_seqlens_q,
    max_seqlen_q,
    seqused_k,
    max_seqlen_k,
    softmax_scale,
    causal,
    window_size,
    block_table,
    softcap,
    q_descale,
    k_descale,
    v_descale,
    alibi_slopes=None,
    output_scale=None,
    qq_bias=None,
    sinks=None,
):
    assert causal, "Only causal attention is supported"
    assert q_descale is None, "Q scales not supported"
    group = q.shape[1] // k.shape[2]
    window = 1 + window_size[0]
    bounds, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    for row, length in enumerate(lengths):
        begin, end = bounds[row], bounds[row + 1]
        blocks = block_table[row, : -(-length // k.shape[1])].long()
        keys, values = (x[blocks].flatten(0, 1)[:length].float().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,nhd->hqn", q[begin:end].float(), keys) * softmax_scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        place = torch.arange(length - (end - begin), length, device=q.device)[:, None]
        key = torch.arange(length, device=q.device)[None, :]
        hidden = key > place
        if window > 0:
            hidden = hidden | (key <= place - window)
        scores = scores.masked_fill(hidden[None], float("-inf"))
        out[begin:end] = torch.einsum("hqn,nhd->qhd", scores.softmax(-1), values).to(out.dtype)
