"""Attention of single queries on the host (`emulated_decode.cpp`): parts, rings, masks and what comes late, without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vllm_core.ops.attention import KV, paged_attention, qk_norm_rope_kv_write
from vllm_cuda.decode import NewTokens, given_of, program_of
from vllm_cuda.decode_tiles import Form, Fresh
from vllm_triton.offers import block_bytes_of
from vllm_triton.ops.cache import kv_bind

FILES = ("decode_plan.cuh", "decode_bring.cuh", "decode_join.cuh", "decode.cu")

FORMS = {
    "keys in the cache": Form(64, 2, 4, 16, 4, 40 << 10, False, None),
    "norms, rotation and the write": Form(64, 2, 4, 32, 4, 40 << 10, False, Fresh(True, 32, False)),
    "heads of two pieces, of which a part rotates": Form(128, 1, 2, 16, 4, 60 << 10, False, Fresh(False, 16, False)),
    "pairs side by side, eight heads": Form(64, 1, 8, 32, 4, 60 << 10, False, Fresh(True, 24, True)),
    "a head a KV head, no rotation": Form(64, 3, 1, 16, 4, 40 << 10, False, Fresh(False, 0, False)),
}
LENGTHS = (
    (1,),
    (16, 17, 1, 40),
    (150,),
    (3, 70, 33, 1, 15, 16, 48, 90),
    # More than a warp has lanes.
    (*(5,) * 40, 60),
)
GUARD = 64
"""Elements around what is written, which must stay as they are."""

Build = Callable[..., ctypes.CDLL]


@pytest.fixture(scope="session")
def build(emulate) -> Build:
    def build(form: Form, change: tuple[str, str] = ("", "")) -> ctypes.CDLL:
        return emulate("decode", FILES, program_of(form).options, change)

    return build


def garbage(tensor: Tensor, draw: torch.Generator) -> Tensor:
    """What may be there before the kernel before has ended."""
    if tensor.is_floating_point():
        return torch.full_like(tensor, float("nan"))
    return torch.randint(-5, 100, tensor.shape, generator=draw).to(tensor.dtype)


def is_right(
    library: ctypes.CDLL,
    form: Form,
    lengths: tuple[int, ...],
    seed: int,
    programs: int = 3,
    least: int = 1,
    several: bool = False,
    stale: bool = False,
) -> bool:
    """Run it once over a cache that has numbers for rows alone; whether it ended and wrote what it should, and nothing else.

    ``several``: rows of two queries, which are another kernel's, lie between. ``stale``: what it reads early is of another
    step.
    """
    draw, size, kv_heads, per_block = torch.Generator().manual_seed(seed), form.head_size, form.kv_heads, form.tokens_per_block
    queries = [2 if several and row % 3 == 1 and length > 1 else 1 for row, length in enumerate(lengths)]
    start = torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32)
    tokens, heads, fresh = int(start[-1]), kv_heads * form.heads, form.fresh
    columns = -(-max(lengths) // per_block)
    order = iter((torch.randperm(len(lengths) * columns, generator=draw) + 1).tolist())
    memory = torch.zeros(len(lengths) * columns + 1, block_bytes_of(kv_heads, size, "bfloat16", per_block), dtype=torch.uint8)
    kv = kv_bind(memory, kv_heads, size, "bfloat16", per_block)
    kv.blocks.fill_(float("nan"))
    table = torch.zeros(len(lengths), columns, dtype=torch.int32)
    places: list[tuple[int, int, int]] = []
    for row, length in enumerate(lengths):
        for column in range(-(-length // per_block)):
            table[row, column] = block = next(order)
            there = min(per_block, length - (1 if fresh else 0) - column * per_block)
            kv.blocks[block, :, :, :there] = torch.randn(2, kv_heads, max(0, there), size, generator=draw).bfloat16()
        places += [
            (position, int(table[row, position // per_block]), position % per_block)
            for position in range(length - queries[row], length)
        ]
    whole = torch.randn(tokens, heads + 2 * kv_heads + 1, size, generator=draw).bfloat16()
    q, k, v = (
        whole[:, first : first + count] for first, count in ((0, heads), (heads, kv_heads), (heads + kv_heads, kv_heads))
    )
    positions = torch.tensor([position for position, _, _ in places], dtype=torch.int32)
    slots = torch.tensor([block * per_block + offset for _, block, offset in places])
    norms = [torch.rand(size, generator=draw) + 0.5 for _ in range(2)] if fresh and fresh.norm else [None, None]
    cos_sin = torch.randn(max(lengths), 2, fresh.pairs, generator=draw) if fresh and fresh.pairs else None
    seq_lens = torch.tensor(lengths, dtype=torch.int32)

    plain = KV(
        kv.blocks.float().transpose(2, 3).reshape(len(memory), 2 * per_block, kv_heads, size), torch.float32, None, per_block
    )
    wanted, own = torch.empty(tokens, heads, size), q.float()
    masks = (max(queries), max(lengths), size**-0.5, 0, 0.0)
    rotated = (positions, cos_sin, bool(fresh and fresh.interleaved))
    if fresh:
        qk_norm_rope_kv_write(own, k.float(), v.float(), *norms, 1e-6, *rotated, plain, slots)
    paged_attention(wanted, own, plain, start, seq_lens, table, *masks)

    guarded = torch.full((tokens * heads * size + 2 * GUARD,), float("nan"), dtype=torch.bfloat16)
    out = guarded[GUARD:-GUARD].view(tokens, heads, size)
    partial, counts = (
        torch.full((programs * 2 * form.part,), float("nan")),
        torch.zeros(len(lengths) * kv_heads, dtype=torch.int32),
    )
    new = NewTokens(k, v, *norms, 1e-6, *rotated, slots) if fresh else None
    given = given_of(out, q, kv, start, seq_lens, table, size**-0.5, new, least, partial, counts)
    live = (whole, positions, slots, start, seq_lens, table)
    then = [one.clone() for one in live]
    old = [garbage(one, draw) if stale or one.is_floating_point() else one.clone() for one in live]
    pointers = [(ctypes.c_void_p * len(live))(*(one.data_ptr() for one in those)) for those in (live, old, then)]
    sizes = (ctypes.c_long * len(live))(*(one.numel() * one.element_size() for one in live))
    kept = kv.blocks.clone()
    stuck = library.run(ctypes.byref(given), len(memory), *pointers, sizes, len(live), form.shared_bytes, programs, seed)

    mine = torch.tensor([token for row, token in enumerate(start[:-1].tolist()) if queries[row] == 1], dtype=torch.long)
    others = torch.ones(tokens, dtype=torch.bool)
    others[mine] = False
    untouched = guarded[:GUARD].isnan().all() and guarded[-GUARD:].isnan().all() and out[others].isnan().all()
    right = torch.allclose(out[mine].float(), wanted[mine], rtol=1e-2, atol=2e-2)
    if fresh:
        stored = plain.blocks.view(len(memory), 2, per_block, kv_heads, size).transpose(2, 3)
        for token in mine.tolist():
            _, block, offset = places[token]
            right &= torch.allclose(kv.blocks[block, :, :, offset].float(), stored[block, :, :, offset], rtol=1e-2, atol=1e-2)
            kept[block, :, :, offset] = kv.blocks[block, :, :, offset]
    right &= torch.equal(kv.blocks.view(torch.int16), kept.view(torch.int16))
    return not stuck and bool(untouched) and right and not counts.any()


@pytest.mark.parametrize("name", FORMS)
def test_it_attends_as_the_reference_in_whatever_order_threads_run_and_copies_arrive(build, name):
    form = FORMS[name]
    library = build(form)
    wrong = [
        (lengths, programs, least)
        for seed, lengths in enumerate(LENGTHS)
        for programs, least in ((2, 1), (5, 2))[seed % 2 :]
        if not is_right(library, form, lengths, seed, programs, least)
    ]
    assert wrong == []


@pytest.mark.parametrize("name", FORMS)
def test_lengths_and_tables_that_come_late_are_looked_at_again(build, name):
    form = FORMS[name]
    library = build(form)
    assert [seed for seed, lengths in enumerate(LENGTHS) if not is_right(library, form, lengths, seed, stale=True)] == []


def test_rows_of_several_queries_are_left_to_others(build):
    form = FORMS["keys in the cache"]
    library = build(form)
    assert [seed for seed, lengths in enumerate(LENGTHS) if not is_right(library, form, lengths, seed, several=True)] == []


@pytest.mark.parametrize(
    "change",
    [
        # Keys are read before they have come.
        ("            barrier_wait(at.full + stage * 8, phase);\n", ""),
        # A box is brought where another one is still read.
        ("            barrier_wait(at.empty + ring.slot * 8, ring.phase ^ 1);\n", ""),
        # Slots behind the end of a row are multiplied by weights of zero.
        ("            if (MASK) value[0] &= seen_low", "            if (false) value[0] &= seen_low"),
        # Sums of a warp are overwritten while they are put together.
        ("            barrier_wait(at.sums_empty, taken);\n", ""),
        # Sums are put together before all warps have left theirs.
        ("            barrier_wait(at.sums_full, left);\n", ""),
        # What is not the token's own is attended to for it.
        ("if (FRESH && work.newest && next == end)", "if (FRESH && next == end)"),
    ],
)
def test_the_emulator_finds_what_is_wrong(build, change):
    form = FORMS["norms, rotation and the write"]
    library = build(form, change)
    assert not all(is_right(library, form, (90, 41, 150), seed, programs=2) for seed in range(2))


def test_the_emulator_finds_lengths_that_were_read_early_and_count_as_those_of_this_step(build):
    form = FORMS["norms, rotation and the write"]
    library = build(form, ("are_same(lengths, now)", "true"))
    assert not all(is_right(library, form, (90, 41, 150), seed, stale=True) for seed in range(3))
