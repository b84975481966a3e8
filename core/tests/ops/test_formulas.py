"""References against independent formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from vllm_core.errors import UnsupportedError
from vllm_core.ops import activation, attention, comm, inputs, norm, pooling, rope, shapes


def _naive(q, keys, values, scale, window, cap, sinks=None):
    """One query token [Hq,D] at the last of [L,Hk,D], in plain loops over heads."""
    group = q.shape[0] // keys.shape[1]
    out = []
    for head in range(q.shape[0]):
        k, v = keys[:, head // group].double(), values[:, head // group].double()
        if window:
            k, v = k[-window:], v[-window:]
        scores = [float(q[head].double() @ row) * scale for row in k]
        if cap:
            scores = [cap * math.tanh(score / cap) for score in scores]
        beside = [] if sinks is None else [float(sinks[head])]
        weights = torch.tensor([math.exp(score - max(scores + beside)) for score in scores], dtype=torch.float64)
        total = float(weights.sum()) + sum(math.exp(sink - max(scores + beside)) for sink in beside)
        out.append((weights[:, None] * v).sum(0) / total)
    return torch.stack(out).float()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape_class", ["block_edges", "gqa", "gqa/sinks", "gqa/window/cap/sinks"])
def test_paged_attention_equals_a_softmax_per_token(seed, shape_class) -> None:
    arguments = list(inputs.paged_attention("float32", seed, shape_class))
    out, q, content, _, _, table, _, _, scale, window, cap, *sinks = arguments
    shape = shapes.shape_of(shape_class)
    blocks, size = content.blocks, shape.tokens_per_block
    memory = torch.zeros(len(blocks), blocks[0].numel() * 4, dtype=torch.uint8)
    kv = attention.kv_bind(memory, shape.num_kv_heads, shape.head_size, "float32", size)
    attention.kv_import(kv, blocks, torch.arange(len(blocks)))
    arguments[2] = kv
    attention.paged_attention(*arguments)
    token = 0
    for row, (before, count) in enumerate(shape.rows):
        cells = [(int(table[row, at // size]), at % size) for at in range(before + count)]
        keys = torch.stack([blocks[block, 0, offset] for block, offset in cells])
        values = torch.stack([blocks[block, 1, offset] for block, offset in cells])
        for at in range(before, before + count):
            expected = _naive(q[token], keys[: at + 1], values[: at + 1], scale, window, cap, *sinks)
            torch.testing.assert_close(out[token], expected, atol=2e-6, rtol=2e-5)
            token += 1


def test_attention_never_lets_the_rest_of_a_block_through() -> None:
    kv = attention.kv_bind(torch.zeros(3, 2 * 4 * 8 * 4, dtype=torch.uint8), 1, 8, "float32", 4)
    kv.blocks.fill_(float("nan"))
    k = torch.ones(2, 1, 8)
    attention.kv_write(kv, k, k * 3, torch.tensor([4, 5]))
    out, starts = torch.zeros(1, 1, 8), torch.tensor([0, 1], dtype=torch.int32)
    lengths, table = torch.tensor([2], dtype=torch.int32), torch.tensor([[1, 0]], dtype=torch.int32)
    attention.paged_attention(out, k[:1], kv, starts, lengths, table, 1, 8, 1.0, 0, 0.0)
    torch.testing.assert_close(out, torch.full_like(out, 3.0))


def test_encoder_attention_equals_torch_row_by_row() -> None:
    arguments = inputs.encoder_attention("float32", 0, "gqa")
    out, q, k, v, starts, _, scale = arguments
    attention.encoder_attention(*arguments)
    for begin, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        heads = [part[begin:end].transpose(0, 1) for part in (q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1))]
        expected = functional.scaled_dot_product_attention(*heads, scale=scale).transpose(0, 1)
        torch.testing.assert_close(out[begin:end], expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_a_complex_product(interleaved) -> None:
    torch.manual_seed(0)
    q, angles = torch.randn(5, 2, 12), torch.rand(9, 4)
    positions = torch.tensor([0, 8, 3, 3, 1], dtype=torch.int32)
    rotated = q.clone()
    table = torch.stack((angles.cos(), angles.sin()), 1)
    rope.rotary_embedding(rotated, q.clone(), positions, table, interleaved)
    pairs = (q[..., 0:8:2], q[..., 1:8:2]) if interleaved else (q[..., :4], q[..., 4:8])
    product = torch.complex(*pairs) * torch.polar(torch.ones(5, 4), angles[positions.long()])[:, None]
    got = (rotated[..., 0:8:2], rotated[..., 1:8:2]) if interleaved else (rotated[..., :4], rotated[..., 4:8])
    torch.testing.assert_close(torch.complex(*got), product)
    assert torch.equal(rotated[..., 8:], q[..., 8:])


def test_norms_equal_torchs_and_may_work_in_place() -> None:
    x, weight = torch.randn(7, 24), torch.rand(24)
    expected = functional.rms_norm(x, (24,), weight, 1e-5)
    residual, out = x - 1, torch.zeros(7, 24)
    norm.add_rms_norm(out, residual, torch.ones(7, 24), weight, 1e-5)
    torch.testing.assert_close(out, functional.rms_norm(residual, (24,), weight, 1e-5))
    torch.testing.assert_close(residual, x)
    norm.rms_norm(x, x, weight, 1e-5)
    torch.testing.assert_close(x, expected)


def test_pooling_takes_each_row_alone() -> None:
    x, starts = torch.randn(6, 4), torch.tensor([0, 1, 6], dtype=torch.int32)
    for kind, expected in (("mean", x[1:].mean(0)), ("cls", x[1]), ("last", x[5])):
        out = torch.zeros(2, 4)
        pooling.pool(out, x, starts, kind, False)
        torch.testing.assert_close(out, torch.stack((x[0], expected)))
        pooling.pool(out, x, starts, kind, True)
        torch.testing.assert_close(out.norm(dim=1), torch.ones(2))


def test_unknown_kinds_are_refused_by_name() -> None:
    x = torch.zeros(2, 2)
    with pytest.raises(UnsupportedError, match="gelu_tanh"):
        activation.activation(x, x, "gelu_tan")
    with pytest.raises(UnsupportedError, match="mean"):
        pooling.pool(x, x, torch.tensor([0, 1, 2], dtype=torch.int32), "max", False)


def test_a_group_of_one_changes_nothing() -> None:
    x = torch.randn(4, 3)
    kept, out = x.clone(), torch.zeros(4, 3)
    comm.all_reduce(x, comm.ALONE)
    assert torch.equal(x, kept)
    for op in (comm.all_gather, comm.reduce_scatter):
        op(out.zero_(), x, comm.ALONE)
        assert torch.equal(out, kept)


def test_a_registered_group_sums_and_gathers(tmp_path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        group = comm.register(torch.distributed.group.WORLD)
        x, out = torch.randn(4, 3), torch.zeros(4, 3)
        comm.all_reduce(x, group)
        for op in (comm.all_gather, comm.reduce_scatter):
            op(out.zero_(), x, group)
            assert torch.equal(out, x)
    finally:
        torch.distributed.destroy_process_group()
