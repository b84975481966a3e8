"""Ops of a provider that is wrong in ways that a suite must see."""

from __future__ import annotations

import torch


def add(out, a, b):
    """Right."""
    torch.add(a, b, out=out)


def rms_norm(out, x, weight, eps):
    """Forgets eps and rounds the mean to the dtype."""
    out.copy_(x / x.pow(2).mean(-1, keepdim=True).sqrt() * weight * 1.02)


def layer_norm(out, x, weight, bias, eps):
    """Never written."""


def gather_rows(out, x, rows):
    """Right, but spoils an argument that must not change."""
    torch.index_select(x, 0, rows, out=out)
    rows.zero_()


def activation(out, x, kind):
    """Raises."""
    raise IndexError("kernel table has no entry")


def rotary_embedding(q, k, positions, cos_sin, interleaved):
    """Knows only one pairing."""
    from vllm_core.ops.rope import rotary_embedding as reference

    assert not interleaved
    reference(q, k, positions, cos_sin, interleaved)
