"""All layers at once on the host (`emulated_flat.cpp`): rings, phases and what programs tell one another, without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from vllm_core.api import DecoderLayer, DecoderLayers
from vllm_core.ops.attention import KV
from vllm_core.ops.linear import linear_pack
from vllm_core.ops.stack import decode_layers
from vllm_cuda import flat
from vllm_cuda.flat_tiles import Form, Work

FILES = ("flat.cuh", "flat_attend.cuh", "flat.cu")


def form_of(rows: int = 1, layers: int = 2, norm: bool = True, programs: int = 3, **changes: int) -> Form:
    work = Work(**{"warps": 4, "bringers": 1, "flying": 2, "deep": 2, "span": 8, **changes})
    return Form(128, 192, 4, 2, 64, layers, norm, 16, rows, programs, 60 << 10, work)


FORMS = {
    "one row": (form_of(warps=5), (37,)),
    "one token": (form_of(layers=1, norm=False), (1,)),
    "three rows of four": (form_of(rows=4, programs=8), (9, 1, 40)),
    "two that bring, and pieces of many keys": (
        form_of(rows=2, norm=False, programs=4, bringers=2, flying=1, span=64),
        (30, 70),
    ),
}
CHANGES = {
    "a stage is taken before it has come": ("barrier_wait(full_barrier(slot), number / STAGES & 1);", ""),
    "a slot is filled before it has been read": ("if (stage >= STAGES) barrier_wait(empty", "if (false) barrier_wait(empty"),
    "words of another phase are taken": ("(u32)(first[i - FROM] >> 32) == epoch", "true"),
    "x is read before all have put it": (
        "        barrier_of_workers();\n    }\n\n    __device__ __forceinline__ void of_numbers",
        "    }\n\n    __device__ __forceinline__ void of_numbers",
    ),
    "squares of warps that there are not": ("rest().squares[i] = 0;", ";"),
    "the last piece leaves the new key out": (
        "piece.index == piece.pieces - 1 && threadIdx.x / 32",
        "false && threadIdx.x / 32",
    ),
}
GUARD = 64
"""Words and numbers around what is written, which must stay as they are."""

Build = Callable[..., ctypes.CDLL]


@pytest.fixture(scope="session")
def build(emulate) -> Build:
    def build(form: Form, change: tuple[str, str] = ("", "")) -> ctypes.CDLL:
        return emulate("flat", FILES, flat.program_of(form).options, change)

    return build


class Step:
    """Layers, caches and rows of a form, and what programs tell one another: of several launches, one after the other."""

    def __init__(self, form: Form, lengths: tuple[int, ...], seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.form, self.lengths = form, lengths

        def normal(*size: int) -> torch.Tensor:
            return (torch.randn(*size, generator=draw) * size[-1] ** -0.5).bfloat16()

        hidden, inner, size = form.hidden, form.inner, form.head_size
        q, kv = form.heads * size, form.kv_heads * size
        columns = -(-max(lengths) // form.tokens_per_block)
        blocks = len(lengths) * columns + 1
        self.table = (
            (torch.randperm(blocks - 1, generator=draw)[: len(lengths) * columns] + 1).view(len(lengths), columns).int()
        )
        norm = (torch.rand(size, generator=draw) + 0.5) if form.norm else None
        self.weights = [
            [normal(q + 2 * kv, hidden), normal(hidden, q), normal(2 * inner, hidden), normal(hidden, inner)]
            for _ in range(form.layers)
        ]
        self.norms = [
            [torch.rand(hidden, generator=draw) + 0.5, torch.rand(hidden, generator=draw) + 0.5, norm, norm]
            for _ in range(form.layers)
        ]
        shape = (blocks, 2, form.kv_heads, form.tokens_per_block, size)
        self.caches = [torch.full(shape, float("nan")).bfloat16() for _ in range(form.layers)]
        for cache in self.caches:
            for row, length in enumerate(lengths):
                for at in range(length - 1):
                    block = self.table[row, at // form.tokens_per_block]
                    cache[block, :, :, at % form.tokens_per_block] = torch.randn(
                        2, form.kv_heads, size, generator=draw
                    ).bfloat16()
        self.cos_sin = torch.randn(max(lengths), 2, size // 2, generator=draw)
        self.residual = torch.randn(len(lengths), hidden, generator=draw).bfloat16()
        self.positions = torch.tensor([length - 1 for length in lengths], dtype=torch.int32)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32)
        at = self.positions.long()
        self.slots = self.table[torch.arange(len(lengths)), at // form.tokens_per_block].long() * form.tokens_per_block
        self.slots += at % form.tokens_per_block
        self.words = torch.zeros(sum(form.words) + 2 * GUARD, dtype=torch.int64)
        self.epoch = torch.zeros(1, dtype=torch.int64)

    def expected(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The reference's residual stream, and the caches as the reference lays them out."""
        form, layers, caches = self.form, [], []
        for weights, norms, cache in zip(self.weights, self.norms, self.caches, strict=True):
            plain = cache.float().transpose(2, 3).reshape(len(cache), 2 * form.tokens_per_block, form.kv_heads, form.head_size)
            caches.append(KV(plain, torch.float32, None, form.tokens_per_block))
            packed = [linear_pack(weight.float(), None, ()) for weight in weights]
            names = ("qkv", "out", "gate_up", "down", "input_norm", "mlp_norm", "q_norm", "k_norm", "kv")
            layers.append(dict(zip(names, (*packed, *norms, caches[-1]), strict=True)))
        described = DecoderLayers(
            layers=tuple(DecoderLayer(**one) for one in layers),
            hidden_size=form.hidden,
            intermediate_size=form.inner,
            num_heads=form.heads,
            num_kv_heads=form.kv_heads,
            head_size=form.head_size,
            eps=1e-6,
            scale=form.head_size**-0.5,
            activation="silu",
            cos_sin=self.cos_sin,
        )
        residual = self.residual.float()
        decode_layers(residual, described, self.positions, self.slots, self.seq_lens, self.table)
        return residual, [one.blocks for one in caches]

    def is_right(self, library: ctypes.CDLL, seed: int, poison: int = 0) -> bool:
        """Run it once; whether it ended and wrote what it should, and nothing else."""
        form, wanted = self.form, self.expected()
        pointers = []
        for weights, norms, cache in zip(self.weights, self.norms, self.caches, strict=True):
            pointers += [0 if one is None else one.data_ptr() for one in (*weights, *norms, cache)]
        layers = torch.tensor(pointers, dtype=torch.int64)
        guarded = torch.full((self.residual.numel() + 2 * GUARD,), float("nan"), dtype=torch.bfloat16)
        residual = guarded[GUARD:-GUARD].view_as(self.residual)
        residual.copy_(self.residual)
        rows = flat.Rows(self.positions, self.seq_lens, self.table, self.slots)
        told = self.words[GUARD:].data_ptr()
        given = flat.given_of(
            residual,
            layers,
            self.cos_sin,
            rows,
            self.caches[0].stride(0),
            1e-6,
            form.head_size**-0.5,
            form,
            told,
            self.epoch.data_ptr(),
        )
        stuck = library.run(ctypes.byref(given), form.shared_bytes, poison, seed)
        right = torch.allclose(residual.float(), wanted[0], rtol=2e-2, atol=6e-2)
        size, per_block = form.head_size, form.tokens_per_block
        for cache, plain in zip(self.caches, wanted[1], strict=True):
            found = cache.float().transpose(2, 3).reshape(len(cache), 2 * per_block, form.kv_heads, size)
            right &= torch.allclose(found, plain, rtol=2e-2, atol=4e-2, equal_nan=True)
        untouched = guarded[:GUARD].isnan().all() and guarded[-GUARD:].isnan().all()
        untouched &= not self.words[:GUARD].any() and not self.words[-GUARD:].any()
        return not stuck and bool(right) and bool(untouched)


@pytest.mark.parametrize("name", FORMS)
def test_it_computes_what_the_reference_does_in_whatever_order_threads_run_and_copies_arrive(build, name):
    form, lengths = FORMS[name]
    library = build(form)
    assert all(Step(form, lengths, seed).is_right(library, seed, poison=255 * (seed % 2)) for seed in range(2))


def test_launches_that_share_their_words_follow_one_another(build):
    form, lengths = FORMS["one row"]
    library, step = build(form), Step(form, lengths, 0)
    for seed in range(3):
        assert step.is_right(library, seed)
    assert int(step.epoch) == 3 * form.layers


def test_words_of_other_forms_and_steps_are_not_taken_for_those_of_this_one(build):
    form, lengths = FORMS["three rows of four"]
    library, step = build(form), Step(form, lengths, 0)
    step.epoch.fill_(7)
    step.words[GUARD:-GUARD] = torch.randint(0, 8, (sum(form.words),)) << 32 | 0x7FC00000
    assert step.is_right(library, 1)


@pytest.mark.parametrize("name", CHANGES)
def test_a_fault_is_found(build, name):
    form, lengths = FORMS["one row"]
    library = build(form, CHANGES[name])
    assert not all(Step(form, lengths, seed).is_right(library, seed, poison=255) for seed in range(4))
