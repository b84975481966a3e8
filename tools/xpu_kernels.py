"""docs/xpu-kernels.md: what Intel's Triton and Intel's offline compiler make of the kernels, and lower bounds of their times.

python tools/xpu_kernels.py                  compile all (minutes; in the environment of `nox -s xpu-kernels`), then write
python tools/xpu_kernels.py --from FOLDER    write from files ARCHITECTURE-MODEL.jsonl of `python -m vllm_xpu.machine_code`
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_xpu.backends.families import family_of
from vllm_xpu.chips import chip_of

PATH = Path(__file__).resolve().parent.parent / "docs" / "xpu-kernels.md"
MODELS = ("Qwen2.5-0.5B", "Qwen3-0.6B", "Qwen3-30B-A3B")
ARCHITECTURES = ("pvc", "bmg", "dg2")
MACHINE_CODE = frozenset({"pvc"})
"""Architectures that Debian's offline compiler knows, and compiles all of these kernels for; for dg2 not all (float64)."""

STEPS, LIMIT_S = ("1x1", "64x1", "1x2048"), 1800
Rows = list[dict[str, Any]]

INTRODUCTION = f"""# Kernels on Intel architectures

Written by `python tools/xpu_kernels.py`, with triton-xpu 3.3.0b1 and, for {", ".join(sorted(MACHINE_CODE))}, Intel's offline
compiler ocloc 22.43 (Debian's, of 2022). Nothing here was run on an Intel GPU: kernels were compiled to SPIR-V, and that to
machine code, on a machine without one, with the specialisations that a step's launches get. Steps are of
{", ".join(MODELS)} in bfloat16 with 4,096 tokens of context: `1x1` decodes one sequence, `64x1` 64 of
them, `1x2048` is a prompt of 2,048 tokens. The first model has heads of 64, the others of 128; the last is a mixture of 128
experts.

- **warps** of **lanes** each: sub-groups. **SLM**: shared local memory of one work-group. **DPAS**: products that go to the
  matrix engines. **spilled**: registers that did not fit, by ocloc; **code**: its machine code. Empty where it was not asked.
- **floor** is the least time of one launch, by bandwidth and matrix rate of the chip's data sheet: predicted, never measured.

Other tiles, numbers of sub-groups and stages were tried for what spills: with none does attention over heads above 64 fit on
pvc (a prompt's spills 84 to 132 registers, a decode step's 23 to 173). It is offered all the same, and the manifest says so:
numbers in memory are the same numbers, and core's references would take far longer. Over heads of 256 a prompt's spills
1,286 and a decode step's 498, on dg2 over heads above 64 thousands, in every tile that was tried: this is not offered, and
neither in these tables nor in the lower bounds. That compiler finds no spilled register in the attention over heads of 64 in
the table of dg2, and up to 2,352 in products, which are offered: references are products too. KV caches in 8 bits are
offered on pvc for heads up to 64 alone.
"""


def rows_of(architecture: str, model: str, folder: Path | None) -> Rows:
    """Lines of the compiler's report. Raises CalledProcessError where it fails."""
    if folder is not None:
        text = (folder / f"{architecture}-{model}.jsonl").read_text("utf-8")
    else:
        steps = [argument for step in STEPS for argument in ("--step", step)]
        code = ["--ocloc"] if architecture in MACHINE_CODE and shutil.which("ocloc") else []
        command = [sys.executable, "-W", "ignore", "-m", "vllm_xpu.machine_code", architecture, "--model", model]
        text = subprocess.run([*command, *steps, *code], capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout
    return [json.loads(line) for line in text.splitlines()]


def chapter(architecture: str, by_model: dict[str, Rows]) -> Iterator[str]:
    """One architecture."""
    family, chip = family_of(architecture), chip_of(architecture)
    assert family is not None
    yield f"## {architecture}: {chip.name}\n"
    yield (
        f"Matrix instructions of {family.lanes} lanes. Floors for {chip.bandwidth / 1e9:,.0f} GB/s and "
        f"{chip.matrix_rate / 1e12:,.1f} TFLOPS ({chip.source}).\n"
    )
    for model, rows in by_model.items():
        yield from _tables(model, rows, family.slm_bytes)


def _tables(model: str, rows: Rows, slm_bytes: int) -> Iterator[str]:
    """Kernels of a model's steps, and its whole steps."""
    kernels, steps = [row for row in rows if "kernel" in row], [row for row in rows if "launches" in row]
    asked = any(row["spills"] is not None for row in kernels)
    spilled = ", ".join(f"{row['kernel']} {row['step']} ({row['spills']})" for row in kernels if row["spills"]) or "none"
    most = max(row["slm_bytes"] for row in kernels)
    yield (
        f"**{model}**: {len(kernels)} specialisations; registers spilled: {spilled if asked else 'not asked'}; "
        f"most SLM {most / 1024:.0f} KiB of {slm_bytes >> 10}.\n"
    )
    yield "| kernel | step | warps | lanes | SLM KiB | DPAS | spilled | code KiB | floor us |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in sorted(kernels, key=lambda row: (row["kernel"], row["step"], row["floor_us"])):
        if row["floor_us"] or row["matrix_ops"] or row["spills"]:
            code = "" if row["binary_bytes"] is None else f"{row['binary_bytes'] / 1024:.0f}"
            spills = "" if row["spills"] is None else row["spills"]
            floor = f"{row['floor_us']:.1f}" if row["floor_us"] else ""
            yield (
                f"| {row['kernel']} | {row['step']} | {row['warps']} | {row['lanes']} | {row['slm_bytes'] / 1024:.0f} | "
                f"{row['matrix_ops']} | {spills} | {code} | {floor} |"
            )
    yield "\n| whole step (lower bound) | launches | floor us |\n|---|---|---|"
    for row in steps:
        yield f"| {row['step']} | {row['launches']} | {row['floor_us']:,.0f} |"
    yield ""


def main(arguments: list[str]) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="folder", type=Path, metavar="FOLDER")
    folder = parser.parse_args(arguments).folder
    lines = [INTRODUCTION]
    for architecture in ARCHITECTURES:
        lines += chapter(architecture, {model: rows_of(architecture, model, folder) for model in MODELS})
    PATH.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
