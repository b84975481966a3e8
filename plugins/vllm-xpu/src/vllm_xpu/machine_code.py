"""What Intel's Triton makes of the kernels for a chip that need not be here: SPIR-V, shared local memory, DPAS.

``python -m vllm_xpu.machine_code pvc --step 1x1 --step 64x1`` prints a line of JSON for each specialisation that such steps
launch; ``--spirv FOLDER`` keeps the modules, ``--ocloc`` makes machine code of them as well, by Intel's offline compiler, and
tells what spills; ``--kv-dtype int8`` over a cache of that dtype, ``--weights int4_group`` with matrices in that format. ``pvc
--claim float16/int8`` prints those of all shapes of attention that are offered for a model in float16 over such a cache. Needs
Intel's Triton (on the index as triton-xpu), no GPU and no compiler of SYCL.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget

from vllm_core.api import PLAIN, Accepted
from vllm_triton import claimed, roofline, tried, tuning
from vllm_triton.offers import ITEM_BYTES, LINEAR_FORMATS
from vllm_triton.offline import Compiled, Launch, OfflineDriver, compiled
from vllm_triton.workload import MODELS, Model, Step, launch_layer, launch_step
from vllm_xpu.backends.families import FAMILIES, Family, family_of
from vllm_xpu.chips import chip_of

TARGETS = tuple(family.architectures[0] for family in FAMILIES)
CONTEXT = 4096
LIMIT_S = 300
"""Of the offline compiler for one kernel."""

ATTENTION = frozenset({"decode", "decode_fresh", "extend"})
"""Kernels that the families' limits of heads are about."""

_MATRIX = re.compile(r"tt\.dot .*parent = #mma")
_SPILLED = re.compile(r"spilled around (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """One specialisation; `matrix_ops` counts the products that it gives to DPAS, each of many instructions.

    `floor_us` is the chip's roofline for one launch (`vllm_triton.roofline`), 0 for kernels that take little. `spills` are
    what the offline compiler counts of registers that did not fit; `binary_bytes` of its machine code; None where it was
    not asked.
    """

    kernel: str
    step: str
    warps: int
    lanes: int
    slm_bytes: int
    matrix_ops: int
    spirv_bytes: int
    floor_us: float = 0.0
    spills: int | None = None
    binary_bytes: int | None = None


def _family(architecture: str) -> Family:
    family = family_of(architecture)
    if family is None:
        raise KeyError(architecture)
    return family


def device_facts(architecture: str) -> dict[str, Any]:
    """What Intel's backend asks of a device."""
    family = _family(architecture)
    lanes = family.lanes
    return {
        "name": architecture,
        "platform_name": "",
        "vendor": "Intel(R) Corporation",
        "driver_version": "",
        "version": "",
        "architecture": 0,
        "gpu_eu_count": 512,
        "gpu_subslice_count": 64,
        "max_work_group_size": 1024,
        "max_num_sub_groups": 64,
        "sub_group_sizes": [lanes, 2 * lanes],
        # Whether it has them in hardware: kernels that use float64 are compiled all the same.
        "has_fp64": architecture != "dg2",
        "has_subgroup_matrix_multiply_accumulate": True,
        "has_subgroup_matrix_multiply_accumulate_tensor_float32": False,
        "has_subgroup_2d_block_io": family.block_loads,
        "has_bfloat16_conversions": True,
    }


def register_backend() -> None:
    """Give Triton's table of backends one that takes `device_facts` as they are.

    The vendor's asks a helper for the architecture's name, which it builds with SYCL's headers; only ocloc needs that name.
    """
    backends: Any = import_module("triton.backends")
    vendor: Any = import_module("triton.backends.intel.compiler")

    class Offline(vendor.XPUBackend):  # type: ignore[misc]
        def __init__(self, target: Any) -> None:
            super(vendor.XPUBackend, self).__init__(target)
            self.device_arch = ""
            self.properties = self.parse_target(target.arch)
            self.binary_ext = "spv"

    known = backends.backends["intel"]
    backends.backends["intel"] = type(known)(Offline, known.driver)


def resources_of(one: Compiled, step: str) -> Resources:
    """Read from the compiler's metadata and its last form before LLVM's."""
    return Resources(
        kernel=one.kernel,
        step=step,
        warps=int(one.metadata.num_warps),
        lanes=int(one.metadata.threads_per_warp),
        slm_bytes=one.shared_bytes,
        matrix_ops=len(_MATRIX.findall(one.asm["ttgir"])),
        spirv_bytes=len(one.asm["spv"]),
    )


def spills_of(module: bytes, architecture: str, flags: str) -> tuple[int, int]:
    """Spilled registers, and bytes of machine code, of a module of SPIR-V with one kernel, by ocloc.

    Raises FileNotFoundError where ocloc is not installed, CalledProcessError where it refuses (an architecture it does not
    know, too), TimeoutExpired.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-xpu-") as folder:
        source = Path(folder, "kernel.spv")
        source.write_bytes(module)
        command = ["ocloc", "compile", "-spirv_input", "-file", str(source), "-device", architecture, "-out_dir", folder]
        command += ["-options", flags] if flags else []
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        found = _SPILLED.search(done.stdout + done.stderr)
        return int(found[1]) if found else 0, sum(path.stat().st_size for path in Path(folder).glob("*.bin"))


def compile_steps(
    architecture: str, model: Model, steps: Sequence[Step], keep: Path | None = None, *, ocloc: bool = False
) -> Iterator[Resources | roofline.StepTime]:
    """Compile what ``steps`` launch, each specialisation once, then tell the steps' times. Once a process.

    Attention that the family does not offer for the model's heads is left out: core's reference runs in its place.
    """
    register_backend()
    family, chip = _family(architecture), chip_of(architecture)
    driver = OfflineDriver(GPUTarget("xpu", device_facts(architecture), 2 * family.lanes)).install()
    tuning.use(family.tuning, chip.units)
    asked: list[tuple[Step, int, Launch]] = []
    refused: set[str] = set()
    for step in steps:
        offered = isinstance(family.tried.judge(step.kv_dtype, head_size=model.head_size), Accepted)
        for repeats, launch_all in ((1, launch_step), (model.layers, launch_layer)):
            before = len(driver.launches)
            launch_all(model, step)
            for launch in driver.launches[before:]:
                if offered or launch.kernel not in ATTENTION:
                    asked.append((step, repeats, launch))
                else:
                    refused.add(launch.hash)
    told = {launch.hash: (step, launch) for step, _, launch in reversed(asked)}
    for number, one in enumerate(found for found in compiled() if found.metadata.hash not in refused):
        if keep is not None:
            (keep / f"{number:02}-{one.kernel}.spv").write_bytes(one.asm["spv"])
        owner = told.get(one.metadata.hash)
        found = _judged(one, architecture, _name(owner[0]) if owner else "", ocloc)
        judged = roofline.judge(owner[1], owner[0].context, owner[0].tokens) if owner else None
        yield found if judged is None else replace(found, floor_us=roofline.floor_s(judged[0], chip) * 1e6)
    for step in steps:
        launches = [(repeats, launch) for owner_step, repeats, launch in asked if owner_step is step]
        yield roofline.step_time(_name(step), model, step, launches, chip)


def compile_claims(
    architecture: str, claims: Sequence[str], *, corners: bool = False, ocloc: bool = False
) -> Iterator[Resources]:
    """Compile what is offered of each ``DTYPE/KV_DTYPE`` or ``DTYPE:FORMAT``, what several have once; of attention the
    ``corners`` alone if asked."""
    register_backend()
    family = _family(architecture)
    driver = OfflineDriver(GPUTarget("xpu", device_facts(architecture), 2 * family.lanes)).install()
    tuning.use(family.tuning, chip_of(architecture).units)
    every = tried.offers("", family.architectures, family.tried)

    def read(found: Compiled, shape: str) -> Resources:
        return _judged(found, architecture, shape, ocloc)

    sweep = claimed.Sweep(driver, every, architecture, read, corners)
    for claim in claims:
        yield from sweep.new(claim)


def _judged(one: Compiled, architecture: str, step: str, ocloc: bool) -> Resources:
    found = resources_of(one, step)
    if not ocloc:
        return found
    spills, size = spills_of(one.asm["spv"], architecture, one.metadata.build_flags)
    return replace(found, spills=spills, binary_bytes=size)


def _name(step: Step) -> str:
    return f"{step.rows}x{step.queries}"


def main(arguments: list[str]) -> None:
    """Print a line of JSON a specialisation, and a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architecture", choices=TARGETS)
    parser.add_argument("--model", choices=sorted(MODELS), default="Qwen3-0.6B")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--step", action="append", metavar="ROWSxQUERIES")
    asked.add_argument("--claim", action="append", metavar="DTYPE/KV_DTYPE or DTYPE:FORMAT")
    parser.add_argument("--corners", action="store_true", help="of a claim the extremes alone")
    parser.add_argument("--kv-dtype", choices=ITEM_BYTES, default="bfloat16")
    parser.add_argument("--weights", choices=sorted(LINEAR_FORMATS), default=PLAIN)
    parser.add_argument("--spirv", type=Path, metavar="FOLDER")
    parser.add_argument("--ocloc", action="store_true", help="machine code too, where ocloc is installed")
    options = parser.parse_args(arguments)
    if options.claim:
        for row in compile_claims(options.architecture, options.claim, corners=options.corners, ocloc=options.ocloc):
            sys.stdout.write(json.dumps(asdict(row)) + "\n")
        return
    sizes = [tuple(map(int, one.split("x"))) for one in options.step]
    forms = {"kv_dtype": options.kv_dtype, "weights": options.weights}
    steps = [Step(rows=rows, queries=queries, context=max(CONTEXT, queries), **forms) for rows, queries in sizes]
    for one in compile_steps(options.architecture, MODELS[options.model], steps, options.spirv, ocloc=options.ocloc):
        sys.stdout.write(json.dumps(asdict(one)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
