"""`vllm-core bench latency`, `throughput`, `startup` and `compare`: the engine itself, without a server."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_core.bench.workloads import SHAPES, WORKLOADS, Workload
from vllm_core.cli.argument_types import count, positive
from vllm_core.cli.options import add_engine_options, engine_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_core.bench.tables import Table

BATCHES = tuple(name for name in WORKLOADS if name != "latency")
MAX_RUNS = 100


def add_parsers(kinds: Any) -> None:
    """Add the commands to `bench`."""
    for name, text, workloads in (
        ("latency", "one request at a time: tokens per second, and where a request's time goes", ("latency",)),
        ("throughput", "many requests at once: tokens per second, latencies, memory", BATCHES),
        ("startup", "from the process's start until it serves, without compiled kernels and with them", ("throughput",)),
    ):
        parser = kinds.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        _add_workload_options(parser, name, workloads)
        add_engine_options(parser, leave_out={"model"})
        parser.set_defaults(func=run_startup if name == "startup" else run)
    compare = kinds.add_parser(
        "compare",
        help="judge one result file against another",
        description="Judge B against A: throughput at least 0.95 of it, 99th percentiles of queue, prefill and decode and peak "
        "memory at most 10 %% above, both correct. Exit status 0: it holds, 1: it does not, 2: they cannot be compared.",
    )
    for name in ("A", "B"):
        compare.add_argument(name, type=Path, help="file of `bench latency` or `bench throughput`")
    _add_out(compare)
    compare.set_defaults(func=run_compare)


def _add_workload_options(parser: argparse.ArgumentParser, kind: str, workloads: tuple[str, ...]) -> None:
    section = parser.add_argument_group("What is run")
    names = ", ".join(SHAPES)
    section.add_argument(
        "--model", required=True, metavar="MODEL", help=f"folder, GGUF file, 'demo', or a shape with dummy weights: {names}"
    )
    if kind == "startup":
        section.set_defaults(workloads=[WORKLOADS["throughput"]])
    else:
        section.add_argument(
            "--workloads",
            type=_workloads,
            default=",".join(workloads),
            metavar="LIST",
            help=f"of {', '.join(WORKLOADS)}; one after the other (default: %(default)s)",
        )
        section.add_argument(
            "--reset-prefix-cache", action="store_true", help="forget it before each run (default: as a server, keep it)"
        )
    section.add_argument("--runs", type=_runs, default=3, metavar="N", help="counted, after a first (default: %(default)s)")
    section.add_argument("--num-prompts", type=positive, metavar="N", help="requests, instead of the workload's number")
    section.add_argument(
        "--input-len", type=_span, metavar="N", help="tokens of a prompt, N or LOW:HIGH, instead of its lengths"
    )
    section.add_argument(
        "--output-len", type=_span, metavar="N", help="tokens to generate, N or LOW:HIGH, instead of its lengths"
    )
    section.add_argument("--shared-len", type=count, metavar="N", help="tokens that all prompts begin with, before the others")
    _add_out(section)


def _add_out(section: Any) -> None:
    section.add_argument(
        "--out",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="write it; the ending says how: .json, .md, .csv, .png, .svg; repeatable",
    )


def run(args: argparse.Namespace) -> int:
    """Run `bench latency` or `bench throughput`."""
    from vllm_core.bench import files, measure, tables

    files.check(args.out)
    job = measure.Job(
        kind=args.kind,
        model=args.model,
        options=_engine(args),
        workloads=[_changed(one, args) for one in args.workloads],
        runs=args.runs,
        reset=args.reset_prefix_cache,
    )
    result = measure.measure(job, lambda row: print("  ".join(tables.rate_row(row)), flush=True))
    _print(tables.of_result(result))
    files.save(result, args.out)
    return 0


def run_startup(args: argparse.Namespace) -> int:
    """Run `bench startup`; 1 where a start does not reach its rate in its first run."""
    from vllm_core.bench import files, startup, tables

    files.check(args.out)
    workload = _changed(args.workloads[0], args)
    watch = lambda kind, one: print("  ".join((kind, *tables.start_row(one)[:-1])), flush=True)  # noqa: E731
    result = startup.measure(args.model, _engine(args), workload, args.runs, watch)
    _print(tables.of_result(result))
    files.save(result, args.out)
    found = result.startup
    assert found is not None, "a startup result has its starts"
    return int(any(one.full_speed_s is None for one in (found.cold, *found.cached)))


def run_compare(args: argparse.Namespace) -> int:
    """Run `bench compare`."""
    from vllm_core.bench import compare, files, results, tables

    files.check(args.out)
    found = compare.compare(results.read(args.A), results.read(args.B))
    _print(tables.of_judgement(found))
    print(tables.verdict(found))
    files.save(found, args.out)
    return 1 if found.failed else 0


def _engine(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in engine_options(args).items() if name != "model"}


def _changed(workload: Workload, args: argparse.Namespace) -> Workload:
    given = {"requests": args.num_prompts, "prompt": args.input_len, "output": args.output_len, "shared": args.shared_len}
    return replace(workload, **{name: value for name, value in given.items() if value is not None})


def _print(found: Sequence[Table]) -> None:
    from rich.console import Console

    from vllm_core.registry.explain import table

    console = Console()
    if not console.is_terminal:
        console.width = 140  # a file is read as it is; the usual 80 would break every cell
    for one in found:
        console.print(table(one.title, one.heads, one.rows))


def _workloads(text: str) -> list[Workload]:
    names = text.split(",")
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r}, where names of {', '.join(WORKLOADS)}, each once, are expected")
    return [WORKLOADS[name] for name in names]


def _runs(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= MAX_RUNS:
        raise argparse.ArgumentTypeError(f"{text!r}, where 1 to {MAX_RUNS} is expected")
    return int(text)


def _span(text: str) -> tuple[int, int]:
    parts = text.split(":")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) > 0 for part in parts) or int(parts[0]) > int(parts[-1]):
        raise argparse.ArgumentTypeError(f"{text!r}, where N or LOW:HIGH, at least 1, is expected")
    return int(parts[0]), int(parts[-1])
