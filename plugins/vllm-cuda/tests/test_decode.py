"""Attention of single queries on Hopper: what it is compiled to, and which calls it takes."""

from __future__ import annotations

import pytest
import torch

from vllm_cuda import attention, decode, programs
from vllm_cuda.backends import decodes, families, hopper
from vllm_cuda.decode_tiles import Form, Fresh
from vllm_triton import tuning
from vllm_triton.offers import block_bytes_of
from vllm_triton.ops.cache import kv_bind


def form_of(heads=4, kv_heads=8, size=128, block=64, half=False, fresh=None, rows=16, multiprocessors=132) -> Form | None:
    return decodes.form_of(rows, heads, kv_heads, size, block, half, fresh, multiprocessors)


ROTATED = Fresh(True, 64, False)
FORMS = {
    "Qwen3 8B": form_of(fresh=ROTATED),
    "Qwen3 8B, in mixed steps": form_of(),
    "Qwen3 0.6B, float16": form_of(heads=2, half=True, fresh=ROTATED),
    "eight heads, small blocks": form_of(heads=8, block=16, fresh=Fresh(False, 64, False)),
    "a part rotates": form_of(heads=7, kv_heads=2, fresh=Fresh(False, 16, False)),
    "a head a KV head, pairs side by side": form_of(heads=1, half=True, fresh=Fresh(True, 64, True)),
}


@pytest.mark.parametrize("name", FORMS)
def test_it_compiles_to_bulk_copies_and_matrix_instructions_without_spills(name, machine_code):
    form = FORMS[name]
    assert form.shared_bytes <= families.HOPPER.shared_bytes
    text = machine_code(decode.program_of(form).binary(), form.threads)
    kind = "F32" if form.half else "F32.BF16"
    # Keys and values, of a box that has them all and of one that has not.
    assert text.count(f"HMMA.16816.{kind}") == 2 * 2 * form.head_size // 16
    assert all(word in text for word in ("UTMALDG.5D", "UBLKCP", "PREEXIT", "ACQBULK", "MOVM.16.MT88"))


@pytest.mark.parametrize("name", FORMS)
def test_pieces_of_all_programs_have_their_place(name):
    assert 4 * decodes.MOST_UNITS <= decode.COUNTS_BYTES
    assert hopper.PROGRAMS * 2 * FORMS[name].part * 4 <= decode.PARTS_BYTES


@pytest.mark.parametrize("name", FORMS)
def test_a_stage_of_the_ring_is_always_the_same_warps(name):
    form = FORMS[name]
    assert form.stages % (form.threads // 32 - 3) == 0
    assert form.stages * form.box_bytes >= 40 << 10, "as much is on its way as memory needs"


@pytest.mark.parametrize(("rows", "kv_heads", "taken"), [(32, 8, True), (33, 8, False), (128, 2, True), (128, 3, False)])
def test_steps_of_many_rows_and_heads_are_left_to_the_shared_kernels(rows, kv_heads, taken):
    assert (form_of(rows=rows, kv_heads=kv_heads) is not None) is taken


def test_one_row_is_left_to_the_shared_kernels_whose_products_need_the_cache_that_a_ring_takes():
    assert form_of(rows=1) is None
    assert form_of(rows=2) is not None


@pytest.fixture
def on_hopper():
    before = list(tuning._active)
    tuning.use(hopper.TUNING, hopper.PROGRAMS)
    yield
    tuning._active[:] = before


class Call:
    """Tensors of a call of ``rows`` rows; what it launches is noted, and runs nothing."""

    def __init__(self, dtype="bfloat16", kv_dtype=None, heads=8, size=128, block=64, rows=3, wide=0, half_rope=64, inter=False):
        kind = getattr(torch, dtype)
        memory = torch.zeros(3, block_bytes_of(2, size, kv_dtype or dtype, block), dtype=torch.uint8)
        self.kv = kv_bind(memory, 2, size, kv_dtype or dtype, block)
        every = torch.zeros(rows, (heads + 4) * size + wide, dtype=kind)[:, wide:].unflatten(1, (heads + 4, size))
        self.q, self.k, self.v = every[:, :heads], every[:, heads : heads + 2], every[:, heads + 2 :]
        self.out = torch.zeros(rows, heads, size, dtype=kind)
        self.weights, self.positions = (torch.ones(size), torch.ones(size)), torch.zeros(rows, dtype=torch.int32)
        self.cos_sin, self.inter = torch.zeros(9, 2, half_rope), inter
        start = torch.arange(rows + 1, dtype=torch.int32)
        self.rows = (start, torch.ones(rows, dtype=torch.int32), torch.zeros(rows, 2, dtype=torch.int32))

    def attend(self, queries=1, longest=9, scale=0.1, window=0, cap=0.0, sinks=None) -> set[str]:
        with programs.rehearsal():
            attention.paged_attention(self.out, self.q, self.kv, *self.rows, queries, longest, scale, window, cap, sinks)
            return {one.function for one in programs._rehearsed[-1][1]}

    def attend_fresh(self, weights=None) -> set[str]:
        q_weight, k_weight = weights or self.weights
        heads = (self.q, self.k, self.v, q_weight, k_weight, 1e-6, self.positions, self.cos_sin, self.inter, self.kv)
        with programs.rehearsal():
            slots = torch.zeros(len(self.q), dtype=torch.int64)
            attention.qk_norm_rope_attention(self.out, *heads, slots, *self.rows, 1, 9, 0.1, 0, 0.0)
            return {one.function for one in programs._rehearsed[-1][1]}


@pytest.fixture
def shared_calls(monkeypatch) -> list[str]:
    """Names of the shared kernels' calls, which run nothing."""
    calls: list[str] = []
    monkeypatch.setattr(attention.shared, "paged_attention", lambda *_: calls.append("paged_attention"))
    monkeypatch.setattr(attention.fresh, "qk_norm_rope_attention", lambda *_: calls.append("qk_norm_rope_attention"))
    monkeypatch.setattr(attention, "qk_norm_rope_kv_write", lambda *_: calls.append("qk_norm_rope_kv_write"))
    return calls


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "float16"},
        {"half_rope": 16},
        {"block": 16},
        {"heads": 2},
        {"heads": 16},
        {"rows": 128},
        {"inter": True},
    ],
    ids=str,
)
def test_steps_of_single_queries_are_taken_with_what_comes_before_attention(on_hopper, shared_calls, changes):
    call = Call(**changes)
    assert call.attend_fresh() == call.attend() == {"decode"}
    assert shared_calls == []


def test_in_mixed_steps_it_takes_single_queries_beside_the_kernel_of_prompts(on_hopper, shared_calls):
    assert Call(rows=64).attend(queries=7, longest=2000) == {"extend", "decode"}
    assert shared_calls == []


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float32"},
        {"kv_dtype": "float16"},
        {"kv_dtype": "fp8"},
        {"kv_dtype": "int8"},
        {"size": 64, "half_rope": 32},
        {"size": 96, "half_rope": 48},
        {"size": 256, "half_rope": 128},
        {"block": 8},
        {"heads": 18},
        {"rows": 257},
        # Heads that begin at no multiple of 16 bytes.
        {"wide": 4},
    ],
    ids=str,
)
def test_what_it_has_no_form_for_is_left_to_the_shared_kernels(on_hopper, shared_calls, changes):
    call = Call(**changes)
    assert call.attend() == call.attend_fresh() == set()
    assert shared_calls == ["paged_attention", "qk_norm_rope_attention"]


@pytest.mark.parametrize("changes", [{"window": 4}, {"cap": 30.0}, {"sinks": torch.zeros(8)}, {"scale": -0.1}], ids=str)
def test_masks_caps_and_sinks_are_left_to_the_shared_kernels(on_hopper, shared_calls, changes):
    assert Call().attend(**changes) == set()
    assert shared_calls == ["paged_attention"]


@pytest.mark.parametrize("changes", [{"half_rope": 24}, {"half_rope": 4, "inter": True}], ids=str)
def test_pairs_that_no_thread_has_both_of_are_left_to_the_shared_kernels(on_hopper, shared_calls, changes):
    assert Call(**changes).attend_fresh() == set()
    assert shared_calls == ["qk_norm_rope_attention"]


def test_a_norm_of_queries_alone_is_left_to_the_shared_kernels(on_hopper, shared_calls):
    assert Call().attend_fresh(weights=(torch.ones(128), None)) == set()
    assert shared_calls == ["qk_norm_rope_attention"]


@pytest.mark.parametrize(
    ("family", "multiprocessors"), [(families.AMPERE, 132), (families.BLACKWELL, 132), (families.HOPPER, 78)]
)
def test_other_chips_keep_the_shared_kernels(on_hopper, shared_calls, family, multiprocessors):
    tuning.use(family.tuning, multiprocessors)
    assert Call().attend() == set()
    assert shared_calls == ["paged_attention"]
