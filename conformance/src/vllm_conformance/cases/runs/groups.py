"""L1: collectives of two ranks, each in a process of its own, through the ops of the family ``comm``.

The ranks are on two devices, or share one whose `max_workers` allows it. Each computes on the host what it must find,
from both ranks' inputs, which a seed gives.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from vllm_conformance.case import Evidence, Subject
from vllm_conformance.cases.runs.ops import serving
from vllm_conformance.subject import places_of
from vllm_core.api import DeviceFacts

WORLD = 2
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
LIMIT_S = 120.0
MODULE = "vllm_conformance.cases.runs.rank"


class RankResult(msgspec.Struct):
    """What one rank found."""

    problems: list[str]
    digest: str


def collectives(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Every rank has the sum, all columns in the order of ranks, its own rows of the sum."""
    facts = places_of(subject, WORLD)
    with tempfile.TemporaryDirectory(prefix="vllm-conformance-") as folder:
        rendezvous = f"file://{folder}/group"
        ranks = [_start(subject.platform, rank, one, rendezvous, Path(folder)) for rank, one in enumerate(facts)]
        try:
            _wait(ranks, Path(folder))
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        results = [msgspec.json.decode((Path(folder) / f"{rank}.json").read_bytes(), type=RankResult) for rank in range(WORLD)]
    problems = [f"rank {rank}: {line}" for rank, result in enumerate(results) for line in result.problems]
    calls: dict[str, int] = {}
    for op in COLLECTIVES:
        kind = serving(subject.offers, op)[0].kind
        calls[kind] = calls.get(kind, 0) + WORLD
    return Evidence("FAIL" if problems else "PASS", "; ".join(problems), digest=results[0].digest, calls=calls)


def _start(platform: str, rank: int, facts: DeviceFacts, rendezvous: str, folder: Path) -> subprocess.Popen[bytes]:
    arguments = [platform, str(rank), str(WORLD), rendezvous, msgspec.json.encode(facts).decode(), str(folder / f"{rank}.json")]
    with _log(folder, rank).open("wb") as stream:
        return subprocess.Popen([sys.executable, "-m", MODULE, *arguments], stdout=stream, stderr=stream, cwd=folder)


def _log(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.log"


def _wait(ranks: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait for all. Raises AssertionError with the end of a rank's log where one fails, or waits for ever."""
    deadline = time.monotonic() + LIMIT_S
    for rank, process in enumerate(ranks):
        try:
            code = process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"rank {rank} is not done after {LIMIT_S:g} s") from error
        if code:
            text = " ".join(_log(folder, rank).read_text("utf-8", "replace").split())
            raise AssertionError(f"rank {rank} ended with status {code}: {text[-400:]}")
