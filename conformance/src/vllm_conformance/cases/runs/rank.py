"""One rank of a group: opens its device, joins, runs the collectives, and compares with what the host computes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from vllm_conformance.cases.runs.expect import digest, dtypes_of, put
from vllm_conformance.cases.runs.groups import COLLECTIVES, RankResult
from vllm_conformance.cases.runs.ops import provider_of, serving
from vllm_conformance.subject import LiveSubject
from vllm_core.api import OPS, Communicator, DeviceFacts
from vllm_core.ops import comm as references

SHAPES = ((2, 8), (64, 256), (6, 1000))
REPEATS = 2


def main(arguments: list[str]) -> None:
    """``platform rank world rendezvous facts out``: writes a `RankResult`."""
    platform, rank, world, rendezvous, facts, out = arguments
    subject = LiveSubject(platform, devices=[msgspec.json.decode(facts, type=DeviceFacts)])
    group = subject.device.communicator(int(rank), int(world), rendezvous)
    assert (group.rank, group.world_size) == (int(rank), int(world)), f"joined as {group.rank} of {group.world_size}"
    assert group.handle != references.ALONE, "handle 0 is the group of one rank alone"
    references.enter(group)
    results = [_run(subject, op, group) for op in COLLECTIVES]
    result = RankResult([line for one in results for line in one.problems], "".join(one.digest for one in results)[:64])
    references.leave(group)
    references.leave(group)
    Path(out).write_bytes(msgspec.json.encode(result))


def _run(subject: LiveSubject, op: str, group: Communicator) -> RankResult:
    call = provider_of(serving(subject.offers, op)[0]).ops[op]
    problems, kept = [], []
    for dtype in (one for one in dtypes_of(subject) if one.is_floating_point):
        tolerance = OPS[op].tolerances[str(dtype).removeprefix("torch.")]
        for shape in SHAPES:
            for turn in range(REPEATS):
                inputs = [_input(shape, dtype, rank, turn) for rank in range(group.world_size)]
                expected = _expected(op, inputs, group.rank)
                found = _call(subject, call, op, inputs[group.rank], expected, group.handle)
                kept.append(found)
                close = torch.isclose(found.float(), expected, tolerance.relative, tolerance.absolute)
                if not bool(close.all()):
                    problems.append(
                        f"{op} {dtype} {shape}, turn {turn}: {int((~close).sum())} of {close.numel()} values differ"
                    )
    return RankResult(problems, digest(*kept))


def _input(shape: tuple[int, int], dtype: torch.dtype, rank: int, turn: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * turn + rank)).to(dtype)


def _expected(op: str, inputs: list[Tensor], rank: int) -> Tensor:
    """float32, on the host."""
    if op == "all_gather":
        return torch.cat([one.float() for one in inputs], dim=1)
    total = torch.stack([one.float() for one in inputs]).sum(0)
    return total if op == "all_reduce" else total.chunk(len(inputs))[rank]


def _call(subject: LiveSubject, call: Any, op: str, mine: Tensor, expected: Tensor, handle: int) -> Tensor:
    """The op's result on the host. Outputs hold NaN before."""
    device = subject.device
    x = put(device, mine)
    if op == "all_reduce":
        call(x, handle)
        out = x
    else:
        out = put(device, torch.full(tuple(expected.shape), float("nan"), dtype=mine.dtype))
        call(out, x, handle)
    device.synchronize()
    found = out.to("cpu").clone()
    device.release("workspace")
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
