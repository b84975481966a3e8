"""docs/amd-kernels.md: what the compiler makes of the kernels for each AMD architecture, and predicted times.

python tools/amd_kernels.py                  compile all (many minutes), then write
python tools/amd_kernels.py --from FOLDER    write from files ARCHITECTURE-MODEL.jsonl of `python -m vllm_rocm.machine_code`,
                                             and ARCHITECTURE-MODEL-FORM.jsonl of caches and weights in other forms
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_rocm.backends.families import ARCHITECTURES, family_of
from vllm_rocm.chips import chip_of
from vllm_triton.tried import NUMBERS
from vllm_triton.workload import MODELS as MODELS_BY_NAME

PATH = Path(__file__).resolve().parent.parent / "docs" / "amd-kernels.md"
MODELS = ("Qwen3-0.6B", "Qwen3-8B", "Qwen3-30B-A3B")
FORMS_OF = "Qwen3-8B"
"""Of which model caches and weights in other forms are compiled."""

KERNELS = {"--kv-dtype": ("extend", "decode"), "--weights": ("few_rows", "widen")}
"""Those that read such caches and weights."""

STEPS, LIMIT_S = ("1x1", "64x1", "1x2048"), 900
SPILLS = ("vector_spills", "scalar_spills", "scratch_bytes")
Rows = list[dict[str, Any]]

INTRODUCTION = """# Kernels on AMD architectures

Written by `python tools/amd_kernels.py`, with Triton {triton}. Nothing here was run on AMD hardware: kernels were compiled to
machine code, on a machine without a GPU, with the specialisations that a step's launches get. Steps are of {models}
in bfloat16 with 4,096 tokens of context: `1x1` decodes one sequence, `64x1` 64 of them, `1x2048` is a prompt of 2,048
tokens. The last model is a mixture: each token goes through 8 of 128 experts, chosen evenly, by whose weights `one_pair`,
`one_token` and `grouped` multiply. `window, cap` is attention with a sliding window and a soft cap. Last come the forms in 8
bits and fewer that are offered on the architecture: attention over KV caches of codes, and products with packed weights, of
{forms_of}.

- **registers**: vector registers of a lane, accumulators included (CDNA: 512, RDNA: 256). **waves**: of a SIMD, as many as its
  registers hold. **LDS** of one program; **programs**: that fit on a unit (a compute unit of CDNA, two of RDNA) at a time.
- **matrix**: MFMA or WMMA instructions in the code.
- **floor** and **predicted** are times of one launch: the chip's roofline (bandwidth and matrix rate of its data sheet), and
  with what the tiles cost by a model (`vllm_triton.roofline`: bytes under way against the memory's latency, padding, a last
  round of programs that fills a part of the chip). Kernels without one take little. No caches, no launch cost, no measurement.
"""


def rows_of(architecture: str, model: str, folder: Path | None, *form: str) -> Rows:
    """Lines of the compiler's report. Raises CalledProcessError where it fails."""
    if folder is not None:
        text = (folder / f"{'-'.join((architecture, model, *form[1:]))}.jsonl").read_text("utf-8")
    else:
        steps = [argument for step in STEPS for argument in ("--step", step)]
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "vllm_rocm.machine_code",
            architecture,
            "--model",
            model,
            *form,
            *steps,
        ]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout
    return [json.loads(line) for line in text.splitlines()]


def forms_of(architecture: str) -> list[tuple[str, str]]:
    """Options of the compiler's report for the forms that are offered on an architecture beside those of the model."""
    family = family_of(architecture)
    assert family is not None
    # "fp8" is another name of "fp8_e4m3".
    wide = family.tried.codes.largest_head >= MODELS_BY_NAME[FORMS_OF].head_size
    codes = sorted(family.tried.kv_dtypes - NUMBERS - {"fp8"}) if wide else []
    packed = sorted(family.tried.formats - {"plain"})
    return [*(("--kv-dtype", name) for name in codes), *(("--weights", name) for name in packed)]


def chapter(architecture: str, by_model: dict[str, Rows], by_form: dict[tuple[str, str], Rows]) -> Iterator[str]:
    """One architecture."""
    family, chip = family_of(architecture), chip_of(architecture)
    assert family is not None
    yield f"## {architecture}: {chip.name}\n"
    yield (
        f"Waves of {family.wave_size} lanes. Predicted for {chip.bandwidth / 1e9:,.0f} GB/s and "
        f"{chip.matrix_rate / 1e12:,.1f} TFLOPS ({chip.source}).\n"
    )
    for model, rows in by_model.items():
        yield from _tables(model, rows, family.lds_bytes)
    for (option, name), rows in by_form.items():
        what = "KV cache" if option == "--kv-dtype" else "weights"
        # The output projection is not packed.
        mine = [row for row in rows if row.get("kernel") in KERNELS[option] and row not in by_model[FORMS_OF]]
        yield from _tables(f"{FORMS_OF}, {what} in {name}", mine, family.lds_bytes)


def _tables(model: str, rows: Rows, lds_bytes: int) -> Iterator[str]:
    """Kernels of a model's steps, and its whole steps."""
    kernels, steps = [row for row in rows if "kernel" in row], [row for row in rows if "launches" in row]
    spilled = [row["kernel"] for row in kernels if any(map(row.get, SPILLS))]
    most = max(row["lds_bytes"] for row in kernels)
    yield (
        f"**{model}**: {len(kernels)} specialisations; vector or scalar registers spilled: {', '.join(spilled) or 'none'}; "
        f"most LDS {most / 1024:.0f} KiB of {lds_bytes >> 10}.\n"
    )
    yield "| kernel | step | warps | registers | waves | LDS KiB | programs | matrix | floor us | predicted us |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in sorted(kernels, key=lambda row: (row["kernel"], row["step"], row["floor_us"])):
        if row["floor_us"] or row["matrix_instructions"]:
            times = f"{row['floor_us']:.1f} | {row['predicted_us']:.1f}" if row["floor_us"] else " | "
            yield (
                f"| {row['kernel']} | {row['step']} | {row['warps']} | {row['vector_registers']} | {row['waves']} | "
                f"{row['lds_bytes'] / 1024:.0f} | {row['resident']} | {row['matrix_instructions']} | {times} |"
            )
    if steps:
        yield "\n| whole step (predicted) | launches | floor us | predicted us |\n|---|---|---|---|"
    for row in steps:
        yield f"| {row['step']} | {row['launches']} | {row['floor_us']:,.0f} | {row['predicted_us']:,.0f} |"
    yield ""


def main(arguments: list[str]) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="folder", type=Path, metavar="FOLDER")
    options = parser.parse_args(arguments)
    lines = [INTRODUCTION.format(triton=metadata.version("triton"), models=", ".join(MODELS), forms_of=FORMS_OF)]
    for architecture in ARCHITECTURES:
        by_model = {model: rows_of(architecture, model, options.folder) for model in MODELS}
        by_form = {form: rows_of(architecture, FORMS_OF, options.folder, *form) for form in forms_of(architecture)}
        lines += chapter(architecture, by_model, by_form)
    PATH.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
