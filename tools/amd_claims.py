"""docs/amd-claims.md: every claim of kernels for AMD, compiled whole: how many kernels it has, and what of them spills.

python tools/amd_claims.py [ARCHITECTURE...]    compile all claims of these (default: all; an hour and more each), then write
python tools/amd_claims.py --from FOLDER        write from files ARCHITECTURE-*.jsonl of `vllm_rocm.machine_code --claim`

A claim that none of the files has is written as not compiled.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_rocm.backends.families import ARCHITECTURES, family_of
from vllm_rocm.chips import chip_of
from vllm_rocm.machine_code import EVERY, claims_of

PATH = Path(__file__).resolve().parent.parent / "docs" / "amd-claims.md"
LIMIT_S = 7200
MISSING = "not compiled"
Claims = Mapping[str, Mapping[str, Any]]

INTRODUCTION = """# What is offered on AMD architectures, compiled whole

Written by `python tools/amd_claims.py`, with Triton {triton}. Nothing here was run on AMD hardware. A row is a claim of
vllm-rocm: attention of a model in a dtype over a KV cache in a dtype (`DTYPE/KV_DTYPE`: a prompt's, a decode step's, an
encoder's, and what writes, copies, exports and imports the cache), or products with weights in a format (`DTYPE:FORMAT`: of one
row, of few, of experts; widened; norms). Each kernel of a claim was compiled to machine code: heads of every kind of size with
blocks of every kind of size, 1, 8 and 64 query heads that share one, with and without window, cap and sinks.
`vllm_triton.claimed` says which sizes are alike, and a test that kernels of these take the same registers. What spilled a
register, vector or scalar, is not offered: the plan says so where it is asked for.

- **kernels**: specialisations, those included that other claims have too. **spilled**: how many of them have registers in
  memory, or scalar ones in lanes of vector registers. **registers**: the most vector registers of a lane, accumulators
  included. **LDS**: the most of one program.
"""


def compiled(architecture: str) -> Iterator[str]:
    """Lines of the compiler's report on all claims. Raises CalledProcessError where it fails."""
    command = [sys.executable, "-W", "ignore", "-m", "vllm_rocm.machine_code", architecture, "--claim", EVERY]
    yield from subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout.splitlines()


def kept(folder: Path, architecture: str) -> Iterator[str]:
    """Lines of the reports in a folder."""
    for path in sorted(folder.glob(f"{architecture}-*.jsonl")):
        yield from path.read_text("utf-8").splitlines()


def claims_in(lines: Iterator[str]) -> Claims:
    """The sums of claims, of which the last counts."""
    rows = (json.loads(line) for line in lines if line.startswith('{"claim"'))
    return {row["claim"]: row for row in rows}


def chapter(architecture: str, found: Claims) -> Iterator[str]:
    """One architecture."""
    family, claims = family_of(architecture), claims_of(architecture)
    assert family is not None
    whole = [found[claim] for claim in claims if claim in found]
    yield f"## {architecture}: {chip_of(architecture).name}\n"
    spilled = sum(row["spilled"] for row in whole)
    yield (
        f"{len(whole)} of {len(claims)} claims compiled whole, {spilled} kernels with a spilled register. "
        f"A lane has {family.registers} registers, a program up to {family.lds_bytes >> 10} KiB of LDS.\n"
    )
    yield "| claim | kernels | spilled | registers | LDS KiB |\n|---|---|---|---|---|"
    for claim in claims:
        row = found.get(claim)
        if row is None:
            yield f"| {claim} | {MISSING} | | | |"
        else:
            lds = f"{row['lds_bytes'] / 1024:.0f}"
            yield f"| {claim} | {row['kernels']} | {row['spilled']} | {row['vector_registers']} | {lds} |"
    yield ""


def page(by_architecture: Mapping[str, Claims]) -> str:
    """The whole page."""
    lines = [INTRODUCTION.format(triton=metadata.version("triton"))]
    for architecture, found in by_architecture.items():
        lines += chapter(architecture, found)
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: list[str]) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", choices=[[], *ARCHITECTURES], metavar="ARCHITECTURE")
    parser.add_argument("--from", dest="folder", type=Path, metavar="FOLDER")
    options = parser.parse_args(arguments)
    chosen = options.architectures or ARCHITECTURES
    found: dict[str, Claims] = {}
    for one in ARCHITECTURES:
        if options.folder is not None:
            found[one] = claims_in(kept(options.folder, one))
        else:
            found[one] = claims_in(compiled(one)) if one in chosen else {}
    PATH.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
