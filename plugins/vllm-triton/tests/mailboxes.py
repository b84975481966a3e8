"""One of two ranks in Triton's interpreter; their mailboxes are files: ``mailboxes.py RANK FOLDER`` prints what differs.

A process of its own, since the interpreter is chosen when Triton is imported; bfloat16 is left out, with which that computes
wrongly.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
import triton.language as tl

from vllm_core.ops.norm import add_rms_norm
from vllm_triton import portable, tuning
from vllm_triton.kernels import reduce as kernels
from vllm_triton.ops import reduce

CALLS = 16
GIVEN_UP = -1


def boxes_of(rank: int, areas: list[torch.Tensor], stop: int = 0) -> reduce.Mailboxes:
    bases = torch.tensor([area.data_ptr() for area in areas])
    return reduce.Mailboxes(rank=rank, world_size=2, bases=bases, stop=torch.tensor([stop], dtype=torch.int32))


def waits_on_after_stop() -> bool:
    """A rank that is told to stop returns, though the other is gone, and never waits again."""
    areas = [torch.full((reduce.mailbox_bytes(2) // 4,), reduce.EMPTY, dtype=torch.int32) for _ in range(2)]
    boxes, kernels.SPINS = boxes_of(0, areas, stop=1), tl.constexpr(2)
    reduce.all_reduce(torch.ones(3, 32), boxes)
    given_up = boxes.phases.tolist()
    boxes.stop.zero_()
    reduce.all_gather(torch.ones(5, 64), torch.ones(5, 32), boxes)
    return given_up != [GIVEN_UP] * 3 or boxes.phases.tolist() != given_up


def differences(rank: int, call: int, boxes: reduce.Mailboxes) -> list[str]:
    """A call of random kind and size, the same on both ranks."""
    draw, g = random.Random(call), torch.Generator().manual_seed(call)
    dtype = draw.choice((torch.float32, torch.float16))
    kind, rows, width = draw.choice(("sum", "norm", "gather")), draw.randint(1, 8), draw.choice((2, 30, 32, 44))
    if kind == "gather":
        rows, width = draw.randint(1, 3), draw.choice((5, 64, 150))
        parts = [torch.randn(rows, width, generator=g) for _ in range(2)]
        whole = torch.cat(parts, 1)[:, : 2 * width - draw.randint(0, 2)].contiguous()
        out = torch.empty_like(whole)
        reduce.all_gather(out, parts[rank], boxes)
        pairs = [(out, whole)]
    else:
        parts = [torch.randn(rows, width, generator=g).to(dtype) for _ in range(2)]
        total = (parts[0].float() + parts[1].float()).to(dtype)
        if kind == "sum":
            reduce.all_reduce(parts[rank], boxes)
            pairs = [(parts[rank], total)]
        else:
            residual, out, weight = torch.randn(rows, width, generator=g).to(dtype), torch.empty_like(total), torch.rand(width)
            own = residual.clone()
            reduce.all_reduce_add_rms_norm(out, own, parts[rank], weight, 1e-6, boxes)
            summed, normed = residual.float() + parts[0].float() + parts[1].float(), torch.empty_like(total)
            zero = torch.zeros_like(total)
            expected = summed.to(dtype)
            add_rms_norm(normed, expected, zero, weight, 1e-6)
            pairs = [(own, summed.to(dtype)), (out, normed)]
    close = all(torch.allclose(a.float(), b.float(), rtol=2e-3, atol=2e-3) for a, b in pairs)
    return [] if close else [f"{kind} {dtype} {rows} x {width}"]


def main(rank: int, folder: Path) -> None:
    tuning.use(portable.TUNING, 1)
    # So few and so short that lanes take several rows, rows several pieces, and mailboxes are used again and again.
    reduce.LANES, reduce.LANE_BYTES = 3, 256
    size = reduce.mailbox_bytes(2) // 4
    areas = [torch.from_file(str(folder / str(one)), shared=True, size=size, dtype=torch.int32) for one in range(2)]
    boxes = boxes_of(rank, areas)
    wrong = [line for call in range(CALLS) for line in differences(rank, call, boxes)]
    if bool((areas[rank] != reduce.EMPTY).any()):
        wrong.append("a mailbox is not empty after all calls")
    if waits_on_after_stop():
        wrong.append("lanes wait on after stop")
    for line in wrong:
        print(line)
    print(f"{CALLS} calls, {len(wrong)} differences")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
