"""``vllm_xpu_kernels.flash_attn_interface``."""

from __future__ import annotations

import torch


def flash_attn_varlen_func(
    q,
    k,
    v,
    max_seqlen_q,
    cu_seqlens_q,
    max_seqlen_k,
    cu_seqlens_k=None,
    seqused_k=None,
    q_v=None,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=None,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    return_softmax_lse=False,
    out=None,
    scheduler_metadata=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    num_splits=0,
    fa_version=2,
    s_aux=None,
    num_splits_kv=None,
    is_mix_batch=True,
    host_kv_lens=None,
):
    assert causal
    assert block_table is not None
    assert seqused_k is not None
    assert cu_seqlens_k is None
    group, left = q.shape[1] // k.shape[2], window_size[0]
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
        if left >= 0:
            hidden = hidden | (key < place - left)
        scores = scores.masked_fill(hidden[None], float("-inf"))
        out[begin:end] = torch.einsum("hqn,nhd->qhd", scores.softmax(-1), values).to(out.dtype)
    return out
