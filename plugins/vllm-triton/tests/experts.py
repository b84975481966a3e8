"""Experts in Triton's interpreter against core's references: ``experts.py CASE...`` prints what differs.

A process of its own, since the interpreter is chosen when Triton is imported. Tiles are as small as the inputs, and programs as
few as may be: the interpreter takes its time for each.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import torch
from quantised import weight_of
from torch import Tensor

from vllm_core.api import OPS, QuantTensor
from vllm_core.ops.quant import dequantize
from vllm_triton import portable, tuning
from vllm_triton.ops import experts

TILES = replace(
    portable.TUNING,
    one_row=lambda rows, columns: tuning.OneRow(32, 64, 4),
    grouped=lambda mean, rows, columns, gated: tuning.Grouped(16, 32, 32, 4, 2),
)


@dataclass(frozen=True)
class Case:
    """Sizes as the op names them. ``only``: the experts that rows choose from; ``kind``, ``weights`` in which form."""

    tokens: int
    hidden: int
    inner: int
    count: int
    top: int
    dtype: torch.dtype = torch.float16
    kind: str = "silu"
    only: tuple[int, ...] = ()
    weights: str = "plain"
    strided: bool = False


CASES = {
    "no token": Case(0, 32, 16, 8, 2),
    "one token": Case(1, 72, 40, 8, 2, kind="gelu"),
    "one token of eight experts": Case(1, 32, 70, 128, 8),
    "few tokens, many experts": Case(4, 32, 16, 128, 8, strided=True),
    "one expert a token": Case(3, 40, 24, 5, 1, kind="gelu_tanh"),
    "experts without a row": Case(9, 72, 40, 8, 2, only=(1, 3, 6), strided=True),
    "all rows on one expert": Case(37, 32, 24, 8, 1, only=(5,)),
    "an expert twice": Case(5, 32, 24, 8, 2, only=(2,)),
    "many experts": Case(20, 32, 16, 128, 8),
    "more pairs than a program puts in order": Case(280, 16, 8, 3, 2),
    "float32": Case(7, 72, 40, 8, 3, dtype=torch.float32),
    "float32, one token": Case(1, 72, 40, 4, 4, dtype=torch.float32),
    "int8_channel": Case(6, 64, 48, 4, 2, weights="int8_channel"),
    "int4_group": Case(1, 64, 32, 4, 2, weights="int4_group/32"),
    "fp8_block128": Case(3, 72, 40, 4, 2, weights="fp8_block128"),
    "q4_0": Case(3, 32, 32, 4, 2, weights="q4_0"),
}


def problems(name: str) -> list[str]:
    """What the op does otherwise than its reference."""
    case, g = CASES[name], torch.Generator().manual_seed(len(name))
    matrices = [
        _weight(case, case.count * 2 * case.inner, case.hidden, g),
        _weight(case, case.count * case.hidden, case.inner, g),
    ]
    chosen, weights = _chosen(case, g)
    wide = torch.randn(case.tokens, 2 * case.hidden, generator=g).to(case.dtype)
    x = wide[:, : case.hidden] if case.strided else wide[:, : case.hidden].contiguous()
    out, expected = torch.full((case.tokens, case.hidden), 7.0, dtype=case.dtype), torch.empty(case.tokens, case.hidden)
    experts.moe(out, *_scratch(case, case.dtype), x, chosen, weights, experts.moe_pack(*matrices, case.count, ()), case.kind)
    plain = [dequantize(one) if isinstance(one, QuantTensor) else one.float() for one in matrices]
    packed = OPS["moe_pack"].load_reference()(*plain, case.count, ())
    reference = OPS["moe"].load_reference()
    reference(expected, *_scratch(case, torch.float32), x.float(), chosen, weights, packed, case.kind)
    limits = (1e-4, 1e-4) if case.dtype == torch.float32 else (1e-2, 8e-3)
    return [] if torch.allclose(out.float(), expected, *limits) else [f"{name}: {(out - expected).abs().max()}"]


def _weight(case: Case, rows: int, columns: int, g: torch.Generator) -> Tensor | QuantTensor:
    if case.weights == "plain":
        return (torch.randn(rows, columns, generator=g) * columns**-0.5).to(case.dtype)
    return weight_of(case.weights, rows, columns, g)


def _chosen(case: Case, g: torch.Generator) -> tuple[Tensor, Tensor]:
    if case.only:
        chosen = torch.tensor(case.only)[torch.randint(len(case.only), (case.tokens, case.top), generator=g)]
    else:
        chosen = torch.rand(case.tokens, case.count, generator=g).argsort(1)[:, : case.top]
    return chosen.to(torch.int32), torch.rand(case.tokens, case.top, generator=g)


def _scratch(case: Case, dtype: torch.dtype) -> tuple[Tensor, ...]:
    pairs = case.tokens * case.top
    sizes = (2 * case.inner, case.inner, case.hidden)
    poison = [torch.full((pairs, size), float("nan"), dtype=dtype) for size in sizes]
    return (*poison, torch.full((4 * (pairs + case.count),), -7777, dtype=torch.int32))


def routing() -> list[str]:
    """What `moe_route` does otherwise: ties, NaN, infinities, all of the experts."""
    g, wrong = torch.Generator().manual_seed(1), []
    for count, top in ((8, 2), (5, 5), (128, 8), (40, 1)):
        logits = torch.randn(4, count, generator=g)
        logits[1] = logits[1].round()
        logits[2, ::2] = float("-inf")
        for renormalize in (True, False):
            found = torch.full((4, top), -1, dtype=torch.int32), torch.empty(4, top)
            expected = torch.empty(4, top, dtype=torch.int32), torch.empty(4, top)
            experts.moe_route(*found, logits, renormalize)
            OPS["moe_route"].load_reference()(*expected, logits, renormalize)
            same = torch.equal(found[0], expected[0]) and torch.allclose(found[1], expected[1], 1e-5, 1e-5)
            wrong += [] if same else [f"route {count}, {top}, {renormalize}"]
        spoilt = logits.clone()
        spoilt[0] = float("nan")
        spoilt[3, 1] = float("nan")
        again = torch.full((4, top), -1, dtype=torch.int32), torch.empty(4, top)
        experts.moe_route(*again, spoilt, False)
        experts.moe_route(*found, logits, False)
        inside = bool(((again[0] >= 0) & (again[0] < count)).all())
        alone = all(torch.equal(a[1:3], b[1:3]) for a, b in zip(again, found, strict=True))
        wrong += [] if inside and alone else [f"NaN {count}, {top}"]
    return wrong


if __name__ == "__main__":
    tuning.use(TILES, 4)
    names = sys.argv[1:] or [*CASES, "routing"]
    wrong = [line for name in names for line in (routing() if name == "routing" else problems(name))]
    for line in wrong:
        print(line)
    print(f"{len(names)} cases, {len(wrong)} differences")
