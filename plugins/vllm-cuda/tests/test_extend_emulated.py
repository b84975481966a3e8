"""Attention of prompts on the host (`emulated_extend.cpp`): tiles, rings, turns and masks, without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vllm_core.ops.attention import KV, paged_attention
from vllm_cuda.extend import LOG2E, program_of
from vllm_cuda.extend_tiles import Form, Tile

FILES = ("extend_tiles.cuh", "extend_bring.cuh", "extend.cu")

FORMS = {
    "two groups in turn, several boxes a tile": Form(Tile(2, 32, 2), 64, 2, 4, 16, False, False),
    "heads that leave lines of nobody, tiles within a block": Form(Tile(2, 64, 3), 64, 1, 7, 128, False, False),
    "three groups, heads of two pieces": Form(Tile(3, 32, 2), 128, 1, 16, 32, False, False),
    "a head a KV head, groups beyond the row": Form(Tile(2, 32, 2), 64, 2, 1, 16, False, False),
    "halves of the keys": Form(Tile(2, 32, 2, True, True), 64, 2, 4, 16, False, False),
    "halves of the keys without turns": Form(Tile(2, 32, 2, False, True), 128, 1, 7, 32, False, False),
    "no turns": Form(Tile(2, 32, 2, False), 64, 2, 2, 32, False, False),
    "sinks": Form(Tile(2, 64, 3), 64, 1, 7, 128, False, False, sinks=True),
    "sinks, halves of the keys": Form(Tile(2, 32, 2, True, True), 64, 2, 4, 16, False, False, sinks=True),
}
WINDOWS = {
    "two groups in turn": Form(Tile(2, 32, 2), 64, 2, 4, 16, False, False, window=True),
    "tiles within a block, sinks": Form(Tile(2, 64, 3), 64, 1, 7, 128, False, False, window=True, sinks=True),
    "halves of the keys, sinks": Form(Tile(2, 32, 2, True, True), 64, 2, 4, 16, False, False, window=True, sinks=True),
}
ROWS = (
    # A context and queries; single queries are another kernel's, and rows without any are those that a step is padded with.
    ((0, 2),),
    ((37, 40), (0, 1), (0, 9), (3, 0)),
    ((0, 65), (100, 1), (64, 3), (0, 33), (15, 17), (0, 0)),
    # More than a warp has lanes.
    (*((7, 1),) * 33, (20, 2), *((0, 1),) * 31, (60, 5)),
)
GUARD = 64
"""Elements around what is written, which must stay as they are."""

Build = Callable[..., ctypes.CDLL]


@pytest.fixture(scope="session")
def build(emulate) -> Build:
    def build(form: Form, change: tuple[str, str] = ("", "")) -> ctypes.CDLL:
        return emulate("extend", FILES, program_of(form).options, change)

    return build


def address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def is_right(
    library: ctypes.CDLL, form: Form, rows: tuple[tuple[int, int], ...], seed: int, programs: int = 2, window: int = 0
) -> bool:
    """Run it once over a cache that has numbers for what rows see alone; whether it ended and wrote what it should, and
    nothing else."""
    draw, size, kv_heads = torch.Generator().manual_seed(seed), form.head_size, form.kv_heads
    tokens, heads, per_block = sum(queries for _, queries in rows), kv_heads * form.heads, form.tokens_per_block
    lengths = [context + queries for context, queries in rows]
    columns = max(-(-length // per_block) for length in lengths)
    order = iter((torch.randperm(len(rows) * columns, generator=draw) + 1).tolist())
    cache = torch.full((len(rows) * columns + 1, 2, kv_heads, per_block, size), float("nan"), dtype=torch.bfloat16)
    table = torch.zeros(len(rows), columns, dtype=torch.int32)
    for row, ((context, _), length) in enumerate(zip(rows, lengths, strict=True)):
        seen = max(0, context + 1 - window) if window else 0
        for column in range(seen // per_block, -(-length // per_block)):
            table[row, column] = block = next(order)
            gone, there = max(0, seen - column * per_block), min(per_block, length - column * per_block)
            if gone < there:
                cache[block, :, :, gone:there] = torch.randn(2, kv_heads, there - gone, size, generator=draw).bfloat16()
    q = torch.randn(tokens, heads + 1, size, generator=draw).bfloat16()
    start = torch.tensor([0, *torch.tensor([queries for _, queries in rows]).cumsum(0)], dtype=torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    whole = torch.full((tokens * heads * size + 2 * GUARD,), float("nan"), dtype=torch.bfloat16)
    out = whole[GUARD:-GUARD].view(tokens, heads, size)
    sinks = torch.randn(heads, generator=draw) if form.sinks else None
    rest = (address(start), address(seq_lens), len(rows), tokens, max(lengths), ctypes.c_float(size**-0.5 * LOG2E))
    given = (window, None if sinks is None else address(sinks))
    stuck = library.run(
        *(address(q), q.stride(0), address(cache), len(cache), address(out), address(table), columns, *rest),
        *(*given, form.shared_bytes, programs, seed),
    )
    wanted = torch.empty(tokens, heads, size)
    plain = KV(
        cache.nan_to_num().transpose(2, 3).reshape(len(cache), 2 * per_block, kv_heads, size), torch.bfloat16, None, per_block
    )
    masks = (max(queries for _, queries in rows), max(lengths), size**-0.5, window, 0.0, sinks)
    paged_attention(wanted, q[:, :heads].float(), plain, start, seq_lens, table, *masks)
    others = [token for row, (_, queries) in enumerate(rows) if queries == 1 for token in range(start[row], start[row + 1])]
    untouched = whole[:GUARD].isnan().all() and whole[-GUARD:].isnan().all() and out[others].isnan().all()
    mine = torch.ones(tokens, dtype=torch.bool)
    mine[others] = False
    # Weights are rounded to bfloat16 before they are multiplied, and so is the result.
    return not stuck and bool(untouched) and torch.allclose(out[mine].float(), wanted[mine], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", FORMS)
def test_it_attends_as_the_reference_in_whatever_order_threads_run_and_copies_arrive(build, name):
    library = build(FORMS[name])
    assert [(rows, seed) for seed, rows in enumerate(ROWS) if not is_right(library, FORMS[name], rows, seed)] == []


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_that_begin_anywhere_in_a_tile_show_nothing_before_them(build, name):
    library, form = build(WINDOWS[name]), WINDOWS[name]
    windows = (1, 20, 50)
    wrong = [(rows, size) for rows in ROWS[1:3] for size in windows if not is_right(library, form, rows, size, 2, size)]
    assert wrong == []


@pytest.mark.parametrize(
    ("change", "window"),
    [
        # Keys before a tile's window are brought, in blocks that may be others' by now.
        (("clear_values(stage, 0, min(gone, brought), lane);", ""), 20),
        # Tiles in which the windows of some queries begin go without masks.
        (("tile >= front && tile < whole", "tile < whole"), 50),
    ],
)
def test_the_emulator_finds_what_is_wrong_with_windows(build, change, window):
    form = WINDOWS["two groups in turn"]
    library = build(form, change)
    assert not all(is_right(library, form, ((0, 65), (40, 50)), seed, 1, window) for seed in range(2))


@pytest.mark.parametrize(
    "change",
    [
        # Scores are read before they are there.
        ("        wait_for_groups_of_products<LEFT>();\n", ""),
        # Values are multiplied before they have come.
        ("        barrier_wait(at.v_full + value_stage() * 8, values.phase);\n", ""),
        # The next tile's queries are brought while scores of this one's are computed.
        ("            barrier_wait(at.q_empty + place * 8, queries.phase ^ 1);\n", ""),
        # Slots behind the end of a row are multiplied by weights of zero.
        ("if (there >= brought && gone <= 0)", "if (true)"),
        # A tile of keys that not all queries see goes without masks.
        ("(oldest + 1) / KEYS", "(oldest + QUERIES) / KEYS"),
    ],
)
def test_the_emulator_finds_what_is_wrong(build, change):
    form = FORMS["two groups in turn, several boxes a tile"]
    library = build(form, change)
    assert not all(is_right(library, form, ((0, 65), (40, 50)), seed, programs=1) for seed in range(2))


@pytest.mark.parametrize(
    "change",
    [
        # A group leaves its sums where those of the tile before are still read.
        ("        await_others(TAKEN);\n", ""),
        # Lines that see nothing of their first tile of keys.
        ("(SPLIT || WINDOW) && highest == NOTHING ? 0 : ", ""),
    ],
)
def test_the_emulator_finds_what_is_wrong_with_halves_of_the_keys(build, change):
    form = FORMS["halves of the keys without turns"]
    library = build(form, change)
    assert not all(is_right(library, form, ((0, 45), (30, 9)), seed, programs=1) for seed in range(3))
