"""Two GPUs of one host under vllm-cuda: the link between them, sums and gathers by size, KV from one engine to another.

    python bench/peers.py link|sums|pairs|rate [--model MODEL] [--out FILE]

`sums` measures NCCL and the peers' memory in captured graphs, two processes; `pairs` computes a prompt of MODEL on one GPU
and continues it on the other, with equal and with different caches; `rate` times such transfers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vllm_core import LLM, SamplingParams
from vllm_core.api import DeviceFacts
from vllm_core.bench.workloads import SHAPES, engine_options
from vllm_cuda import comm, nccl, platform, probe
from vllm_cuda.device import CudaDevice

ROWS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
HIDDEN, VOCABULARY = 4096, 151936
COPIES = (1 << 20, 16 << 20, 256 << 20, 1 << 30)
REPEATS = 9


def gpus() -> tuple[DeviceFacts, ...]:
    """The GPUs of the host."""
    return probe.probe().devices


def seconds_of(work: Callable[[], None]) -> float:
    """Median; everything that was queued on all GPUs included."""
    times = []
    for _ in range(REPEATS):
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
        begun = time.perf_counter()
        work()
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def link() -> dict[str, Any]:
    """GB/s of copies from the first GPU to the second, and of copies both ways at once, each way."""
    first, second = (CudaDevice(facts) for facts in gpus()[:2])
    result: dict[str, Any] = {"one way": {}, "both ways": {}}
    for size in COPIES:
        here, there = (torch.empty(size, dtype=torch.uint8, device=one.torch_device) for one in (first, second))
        back = [torch.empty_like(one) for one in (here, there)]

        def over() -> None:
            first.copy_into_peer(here, back[1], second)  # noqa: B023 - used at once

        def both() -> None:
            over()
            second.copy_into_peer(there, back[0], first)  # noqa: B023

        over()
        both()
        result["one way"][size] = round(size / seconds_of(over) / 1e9, 1)
        result["both ways"][size] = round(size / seconds_of(both) / 1e9, 1)
    return result


def sums() -> dict[str, Any]:
    """Microseconds a call. Two processes, of which the first writes the result."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        command = [sys.executable, __file__, "rank", "--out", str(out), "--meet", f"file://{folder}/meet"]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(2)]
        try:
            assert [one.wait(240) for one in ranks] == [0, 0], "a rank failed"
        finally:
            for one in ranks:
                one.kill()
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def rank_main(rank: int, meet: str, out: Path) -> None:
    """One process of `sums`."""
    facts = gpus()[rank]
    platform.start(facts)
    device = CudaDevice(facts)
    members = device.communicator(rank, 2, meet)
    assert isinstance(members, comm.CudaCommunicator), "the platform's own"
    group = members.handle
    found: dict[str, Any] = {"nccl": nccl.version(), "sums": [], "gathers": []}

    def timed(work: Callable[[], None], calls: int) -> float:
        def many() -> None:
            for _ in range(calls):
                work()

        many()
        device.synchronize()
        return round(seconds_of(device.capture(many).replay) / calls * 1e6, 2)

    for rows in ROWS:
        x = 1e-3 * torch.randn(rows, HIDDEN, device=device.torch_device).bfloat16()
        residual, normed = torch.zeros_like(x), torch.empty_like(x)
        weight = torch.ones(HIDDEN, device=device.torch_device)
        ways = {"nccl": comm.all_reduce_add_rms_norm, "peers": comm.peer_all_reduce_add_rms_norm}
        line: dict[str, float] = {"rows": rows, "bytes": x.numel() * 2}
        for name, op in ways.items():
            line[name] = timed(lambda op=op: op(normed, residual, x, weight, 1e-6, group), 50 if rows <= 1024 else 10)  # type: ignore[misc]  # noqa: B023
        found["sums"].append(line)
    for rows in (1, 16, 64, 256):
        part = torch.randn(rows, VOCABULARY // 2, device=device.torch_device)
        whole = torch.empty(rows, VOCABULARY, device=device.torch_device)
        line = {"rows": rows, "bytes": part.numel() * 4}
        for name, gather in {"nccl": comm.all_gather, "peers": comm.peer_all_gather}.items():
            line[name] = timed(lambda gather=gather: gather(whole, part, group), 10)  # type: ignore[misc]  # noqa: B023
        found["gathers"].append(line)
    if rank == 0:
        out.write_text(json.dumps(found))
    members.close()


CACHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "equal": ({}, {}),
    "blocks of 16 tokens": ({}, {"block_size": 16}),
    "another order": ({}, {"provider": {"all": "reference"}}),
    "to fp8": ({}, {"kv_cache_dtype": "fp8"}),
    "to int8": ({}, {"kv_cache_dtype": "int8"}),
    "from float16": ({"kv_cache_dtype": "float16"}, {}),
}
"""Options of the source and of the target."""


@contextmanager
def engines(model: str) -> Iterator[Callable[..., LLM]]:
    """Makes engines on the first GPU or the second."""
    ids = [one.id for one in gpus()]
    options = {"dtype": "bfloat16", "max_model_len": 8192, "max_num_seqs": 8, "device_memory_utilization": 0.2}
    with tempfile.TemporaryDirectory() as folder:

        def make(index: int, **changes: Any) -> LLM:
            chosen = {**options, "platform": "cuda", "device_ids": [ids[index]], **changes}
            return LLM(**engine_options(model, chosen, Path(folder)))

        yield make


def pairs(model: str) -> list[dict[str, Any]]:
    """Tokens continued on the other GPU against those of a GPU that has computed the prompt itself, by route."""
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    rows: list[dict[str, Any]] = []
    with engines(model) as engine:
        for here, names in itertools.groupby(CACHES, lambda name: CACHES[name][0]):
            with engine(0, **here) as source:
                prompt = list(range(100, 1100)) if model in SHAPES else source.get_tokenizer().encode(TEXT, max_tokens=4096)
                source.generate([prompt], one, use_tqdm=False)
                for name in names:
                    with engine(1, **CACHES[name][1]) as target:
                        rows += [{"caches": name, **row} for row in _continued(source, target, prompt)]
    return rows


def _continued(source: LLM, target: LLM, prompt: list[int]) -> list[dict[str, Any]]:
    """By each route: how many tokens are those of a target that has computed the prompt itself, before the first other one."""
    params, rows = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True), []
    own = list(target.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)
    for route in ("auto", "host"):
        target.reset_prefix_cache()
        hits = target.get_metrics().prefix_hits
        done = source.send_kv(prompt, target, route=route)
        again = list(target.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)
        same = next((at for at, (a, b) in enumerate(zip(own, again, strict=True)) if a != b), len(own))
        row: dict[str, Any] = {"form": done.form, "reason": done.form_reason, "route": done.route, "sent": done.num_tokens}
        rows.append(row | {"found there": target.get_metrics().prefix_hits - hits, "equal tokens": same, "of": len(own)})
        print(rows[-1], flush=True)
    return rows


def rate(model: str) -> dict[str, Any]:
    """GB/s over all of `send_kv`, looking blocks up included."""
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    rates: dict[str, Any] = {}
    with engines(model) as engine, engine(0) as source, engine(1) as target:
        for form, route in itertools.product(("raw", "canonical"), ("peer", "host")):
            found = []
            for turn in range(4):
                prompt = [(turn * 7 + 3 * at) % 9000 + 100 for at in range(8000)]
                source.generate([prompt], one, use_tqdm=False)
                target.reset_prefix_cache()
                begun = time.perf_counter()
                done = source.send_kv(prompt, target, form=form, route=route)  # type: ignore[arg-type]
                found.append(done.size_bytes / (time.perf_counter() - begun) / 1e9)
            rates[f"{form}, {route}"] = {"bytes": done.size_bytes, "GB/s": [round(one, 1) for one in sorted(found)]}
            print(form, route, rates[f"{form}, {route}"], flush=True)
    return rates


TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. " * 24


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("link", "sums", "pairs", "rate", "rank"))
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part == "rank":
        rank_main(args.rank, args.meet, args.out)
        return
    parts: dict[str, Callable[[], Any]] = {"link": link, "sums": sums}
    parts |= {"pairs": lambda: pairs(args.model), "rate": lambda: rate(args.model)}
    result = {"gpu": torch.cuda.get_device_name(0), "model": Path(args.model).name, args.part: parts[args.part]()}
    print(json.dumps(result), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + os.linesep, encoding="utf-8")


if __name__ == "__main__":
    main()
