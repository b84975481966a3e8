"""The CPU platform beside other engines, and its native kernels beside its kernels on torch.

    python bench/cpu.py peers [--what q4_1,q8_0] --llama PYTHON --vllm PYTHON [--runs 5] [--out FILE.json] [--table FILE.md]
    python bench/cpu.py ops [--runs 9] [--threads 2] [--out FILE.json]

`peers` makes what it needs (--folder keeps it), loads every engine once, in a process of its own, and asks all of them in
turns, so that what else the machine does falls on all alike; the first round warms up and is dropped. It prints a table with
medians, ranges, ratios and the goals. A peer is the Python of the environment that it is installed in (or a script that starts
it with what it needs): llama-cpp-python, built natively, reads the same file; vLLM's CPU build reads a folder made of it, in
float32 and bfloat16, of which the better one counts. --what: models of cpu_models.py, several with commas between.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cpu_table
from cpu_engines import Engine, lineup, measure, read_bandwidth
from cpu_models import MODELS, Models


def peers(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all engines in turns, print the table."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        models = Models(arguments.folder or Path(scratch), arguments.llama)
        entries = lineup(arguments, models)
        engines = [Engine(entry, arguments.threads, arguments.batch_out) for entry in entries]
        try:
            bandwidth = read_bandwidth(arguments.threads)
            measure(engines, arguments.runs, arguments.workloads.split(","))
            bandwidth = max(bandwidth, read_bandwidth(arguments.threads))
        finally:
            for engine in engines:
                engine.close()
        result = {
            "seconds": round(time.perf_counter() - started),
            "read GB/s": bandwidth,
            "batch out": arguments.batch_out,
            "engines": [engine.summary() for engine in engines],
        }
    table = cpu_table.markdown(result)
    print(table)
    if arguments.table is not None:
        arguments.table.write_text(table + "\n", encoding="utf-8")
    return result


def ops(arguments: argparse.Namespace) -> dict[str, Any]:
    """Microseconds per call of each op: the native library and the kernels that serve without it, in turns."""
    from cpu_ops import compare

    rows = compare(arguments.runs, arguments.threads)
    print(f"{'op':24} {'shape':26} {'native us':>10} {'torch us':>10} {'ratio':>7}")
    for row in rows:
        print(
            f"{row['op']:24} {row['shape']:26} {row['native']:10.1f} {row['other']:10.1f} {row['other'] / row['native']:7.2f}"
        )
    return {"ops": rows}


def main() -> None:
    """Measure, print, and write a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("peers", "ops"))
    parser.add_argument("--what", default="q4_1,q8_0", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--llama", metavar="PYTHON")
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--workloads", default=",".join(cpu_table.WORKLOADS))
    parser.add_argument(
        "--modes",
        default="int8,exact",
        help="of our products, int8+bfloat16 with the model in bfloat16; all but the first decode and prefill only",
    )
    parser.add_argument("--folder", type=Path, help="where models that are made are kept")
    parser.add_argument("--batch-out", type=int, default=128, help="tokens that each of 32 requests gets; fewer take less time")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    arguments = parser.parse_args()
    if unknown := set(arguments.what.split(",")) - set(MODELS):
        sys.exit(f"--what: {', '.join(sorted(unknown))} is none of {', '.join(MODELS)}")
    result = peers(arguments) if arguments.command == "peers" else ops(arguments)
    if arguments.out is not None:
        machine = {"machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()}
        arguments.out.write_text(json.dumps(machine | result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
