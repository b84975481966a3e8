"""Kernels against core's references, on the inputs that core generates."""

from __future__ import annotations

import torch

from vllm_core.api import OPS, BatchState
from vllm_core.api import batch as layout
from vllm_toy import ops

SIZE, HEADS, WIDTH = 16, 2, 8


def on(device, tensor):
    return device.adopt("workspace", tensor)


def bound(device, name, blocks):
    memory = torch.zeros(blocks, 2 * SIZE * HEADS * WIDTH * 4, dtype=torch.uint8)
    make = ops.kv_bind if device is not None else OPS["kv_bind"].load_reference()
    return make(memory if device is None else on(device, memory), HEADS, WIDTH, "float32", SIZE)


def test_attention_over_written_blocks_is_the_references(device):
    """Two sequences, of which one has a window's length behind it; queries, tables and lengths of both."""
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(40, HEADS, WIDTH, generator=generator) for _ in range(2))
    q = torch.randn(5, 4, WIDTH, generator=generator)
    slots = torch.cat([torch.arange(16, 48), torch.arange(64, 72)])
    inputs = (
        torch.tensor([0, 3, 5]).int(),
        torch.tensor([32, 8]).int(),
        torch.tensor([[1, 2], [4, 0]]).int(),
    )
    for window, cap in ((0, 0.0), (5, 0.0), (0, 3.0)):
        outs = []
        for where in (None, device):
            move = (lambda t: t) if where is None else (lambda t: on(device, t))
            kv, out = bound(where, "kv", 6), move(torch.zeros(5, 4, WIDTH))
            get = (lambda name: OPS[name].load_reference()) if where is None else (lambda name: getattr(ops, name))
            get("kv_write")(kv, move(k), move(v), move(slots))
            get("paged_attention")(out, move(q), kv, *map(move, inputs), 3, 32, 0.3, window, cap)
            outs.append(out.cpu())
        torch.testing.assert_close(outs[0], outs[1], rtol=2e-5, atol=2e-5)


def test_blocks_leave_and_come_back_in_the_canonical_layout(device):
    kv = bound(device, "kv", 4)
    blocks = torch.randn(2, 2, SIZE, HEADS, WIDTH)
    index, out = on(device, torch.tensor([3, 1])), on(device, torch.zeros_like(blocks))
    ops.kv_import(kv, on(device, blocks), index)
    ops.kv_export(out, kv, index)
    assert torch.equal(out.cpu(), blocks)
    ops.kv_copy(kv, on(device, torch.tensor([3])), on(device, torch.tensor([2])))
    ops.kv_export(out, kv, on(device, torch.tensor([2, 3])))
    assert torch.equal(out.cpu(), blocks[:1].expand(2, -1, -1, -1, -1))


def test_a_row_of_a_product_does_not_depend_on_the_others(device):
    x, weight = torch.randn(11, 32), ops.linear_pack(on(device, torch.randn(48, 32)), on(device, torch.randn(48)), ["a"])
    whole, alone = on(device, torch.zeros(11, 48)), on(device, torch.zeros(1, 48))
    ops.linear(whole, on(device, x), weight)
    ops.linear(alone, on(device, x[5:6]), weight)
    assert torch.equal(whole.cpu()[5:6], alone.cpu())


def test_the_step_is_gathered_as_the_reference_does(device):
    """Sizes come from the header alone; values from the device."""
    rows, states = 4, []

    def table(*size, dtype=torch.int32):
        return torch.zeros(rows, *size, dtype=dtype)

    for move in (lambda t: t, lambda t: on(device, t)):
        wide = (layout.MAX_BIAS, layout.MAX_STOP, layout.MAX_BAD_WORDS)
        states.append(
            BatchState(
                num_slots=3,
                tokens=move(torch.arange(4 * 9).view(4, 9).int()),
                computed=move(torch.tensor([2, 0, 5, 0]).int()),
                params=move(table(layout.ADMIT_WORDS)),
                bias_ids=move(table(wide[0])),
                bias_values=move(table(wide[0], dtype=torch.float32)),
                stop_ids=move(table(wide[1])),
                bad_words=move(table(wide[2])),
                block_tables=(move(torch.arange(12).view(4, 3).int()),),
                tokens_per_block=(4,),
            )
        )
    header = [layout.LAYOUT_VERSION, 0, 0, 0, 0, 2, 4, 1, 3, 6, *[0] * 6]
    packed = torch.tensor([*header, 0, 3, 0, 0, 2, 1, 1, 0]).int()
    expected = OPS["build_step"].load_reference()(states[0], packed, header)
    found = ops.build_step(states[1], on(device, packed), header)
    for name in ("token_ids", "positions", "slots", "query_start", "seq_lens", "sample_rows", "sample_slots", "sample_lengths"):
        assert getattr(found, name).cpu().tolist() == getattr(expected, name).tolist(), name
        assert getattr(found, name).dtype is getattr(expected, name).dtype, name
    assert found.slot_mapping[0].cpu().tolist() == expected.slot_mapping[0].tolist()
    assert found.block_tables[0].cpu().tolist() == expected.block_tables[0].tolist()
