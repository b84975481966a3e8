"""What the compiler makes of the kernels on an AMD chip that need not be here: registers, spills, LDS, matrix instructions.

``python -m vllm_rocm.machine_code gfx942 --model Qwen3-0.6B --step 1x1 --step 4x32`` prints a line of JSON for each
specialisation that such steps launch, and for each whole step its predicted time; ``--kv-dtype int8`` over a cache of that
dtype, ``--weights int4_group`` with matrices in that format. ``gfx942 --claim float16/int8`` prints those of all shapes of
attention that are offered for a model in float16 over such a cache, ``--claim float16:int8_channel`` of products with such
weights, and the claim's sum; ``--claim all`` of all that is offered there. Needs Triton with its AMD backend, no GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from triton.backends.compiler import GPUTarget

from vllm_core.api import PLAIN
from vllm_rocm.backends.families import ARCHITECTURES, Family, family_of
from vllm_rocm.chips import chip_of
from vllm_triton import claimed, roofline, tried, tuning
from vllm_triton.offers import ITEM_BYTES, LINEAR_FORMATS
from vllm_triton.offline import Compiled, Launch, OfflineDriver, compiled
from vllm_triton.workload import MODELS, Model, Step, launch_layer, launch_step

SIMDS = 4
"""Of a unit (`vllm_rocm.backends.families.Family`)."""

CONTEXT = 4096
EVERY = "all"
_FIELD = r"^\s*\.{name}:\s+(\d+)"
_MATRIX = re.compile(r"^\s+v_(?:mfma|smfmac|wmma|swmmac)_", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """One specialisation. Registers are of one lane; `resident` programs fit on a unit at a time.

    `scalar_spills` go to lanes of vector registers as long as `scratch_bytes` is 0. `floor_us` and `predicted_us` are those of
    `vllm_triton.roofline` for one launch, 0 for kernels that take little.
    """

    kernel: str
    step: str
    warps: int
    vector_registers: int
    accumulators: int
    scalar_registers: int
    vector_spills: int
    scalar_spills: int
    scratch_bytes: int
    lds_bytes: int
    matrix_instructions: int
    waves: int
    resident: int
    floor_us: float = 0.0
    predicted_us: float = 0.0


def resources_of(one: Compiled, family: Family, step: str = "") -> Resources:
    """Read from the compiler's own notes in the assembly."""
    text = one.asm["amdgcn"]
    vectors, accumulators = _number(text, "vgpr_count"), _number(text, "agpr_count")
    warps = int(one.metadata.num_warps)
    waves = waves_of(vectors, family)
    return Resources(
        kernel=one.kernel,
        step=step,
        warps=warps,
        vector_registers=vectors,
        accumulators=accumulators,
        scalar_registers=_number(text, "sgpr_count"),
        vector_spills=_number(text, "vgpr_spill_count"),
        scalar_spills=_number(text, "sgpr_spill_count"),
        scratch_bytes=_number(text, "private_segment_fixed_size"),
        lds_bytes=one.shared_bytes,
        matrix_instructions=len(_MATRIX.findall(text)),
        waves=waves,
        resident=resident_of(waves, warps, one.shared_bytes, family),
    )


def waves_of(registers: int, family: Family) -> int:
    """Waves of a SIMD that its register file holds; registers are given out in blocks of 8 (24 on RDNA)."""
    block = 8 if family.wave_size == 64 else 24
    given = max(block, -(-registers // block) * block)
    return min(family.max_waves, family.register_file // given)


def resident_of(waves: int, warps: int, lds_bytes: int, family: Family) -> int:
    """Programs that fit at a time by registers and by LDS."""
    by_registers = waves * SIMDS // warps
    return min(by_registers, family.unit_lds_bytes // lds_bytes) if lds_bytes else by_registers


def _number(text: str, name: str) -> int:
    found = re.search(_FIELD.replace("{name}", name), text, re.MULTILINE)
    return int(found[1]) if found else 0


@dataclass(frozen=True, slots=True)
class Compilation:
    """What became of some steps on one architecture."""

    resources: list[Resources]
    steps: list[roofline.StepTime]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What is offered, whole: how many specialisations it has, those that claims before it have too, and the most of each.

    `spilled` counts those of which a register did not fit, or that need scratch memory.
    """

    claim: str
    kernels: int
    spilled: int
    vector_registers: int
    lds_bytes: int


def compile_claims(architecture: str, claims: Sequence[str], *, corners: bool = False) -> Iterator[Resources | Claim]:
    """Compile what is offered of each ``DTYPE/KV_DTYPE`` or ``DTYPE:FORMAT``; of attention the ``corners`` alone if asked.

    A specialisation that several claims have is compiled, and told, once; each claim is told when all of it is compiled.
    """
    family = family_of(architecture)
    if family is None:
        raise KeyError(architecture)
    driver = OfflineDriver(GPUTarget("hip", architecture, family.wave_size)).install()
    tuning.use(family.tuning, chip_of(architecture).units)
    every = tried.offers("", family.architectures, family.tried)

    def read(found: Compiled, shape: str) -> Resources:
        return resources_of(found, family, shape)

    sweep = claimed.Sweep(driver, every, architecture, read, corners)
    for claim in claims:
        yield from sweep.new(claim)
        yield _whole(claim, sweep.whole())


def _whole(claim: str, rows: Sequence[Resources]) -> Claim:
    return Claim(
        claim=claim,
        kernels=len(rows),
        spilled=sum(bool(row.vector_spills or row.scalar_spills or row.scratch_bytes) for row in rows),
        vector_registers=max(row.vector_registers for row in rows),
        lds_bytes=max(row.lds_bytes for row in rows),
    )


def compile_steps(architecture: str, model: Model, steps: Sequence[Step]) -> Compilation:
    """Compile what ``steps`` launch, each specialisation once. Once a process (`vllm_triton.offline`)."""
    family = family_of(architecture)
    if family is None:
        raise KeyError(architecture)
    chip = chip_of(architecture)
    driver = OfflineDriver(GPUTarget("hip", architecture, family.wave_size)).install()
    tuning.use(family.tuning, chip.units)
    asked: list[tuple[Step, int, Launch]] = []
    for step in steps:
        for repeats, launch_all in ((1, launch_step), (model.layers, launch_layer)):
            before = len(driver.launches)
            launch_all(model, step)
            asked += [(step, repeats, launch) for launch in driver.launches[before:]]
    for step in (steps[0], steps[-1]):
        launch_layer(model, step, window=512, soft_cap=30.0)
    told = {launch.hash: (step, launch) for step, _, launch in reversed(asked)}
    resources: dict[str, Resources] = {}
    for one in compiled():
        owner = told.get(one.metadata.hash)
        found = resources_of(one, family, name_of(owner[0]) if owner else "window, cap")
        resources[one.metadata.hash] = _timed(found, *owner, chip) if owner else found
    times = [
        roofline.step_time(
            name_of(step),
            model,
            step,
            [(repeats, launch) for owner, repeats, launch in asked if owner is step],
            chip,
            lambda launch: resources[launch.hash].resident,
        )
        for step in steps
    ]
    return Compilation(list(resources.values()), times)


def name_of(step: Step) -> str:
    """Such as ``64x1``."""
    return f"{step.rows}x{step.queries}"


def _timed(resources: Resources, step: Step, launch: Launch, chip: roofline.Chip) -> Resources:
    judged = roofline.judge(launch, step.context, step.tokens)
    if judged is None:
        return resources
    work, tiling = judged
    predicted = roofline.predicted_s(work, tiling, chip, resources.resident)
    return replace(resources, floor_us=roofline.floor_s(work, chip) * 1e6, predicted_us=predicted * 1e6)


def claims_of(architecture: str) -> list[str]:
    """All that is offered on an architecture. Raises KeyError for one that is not known."""
    family = family_of(architecture)
    if family is None:
        raise KeyError(architecture)
    return claimed.claims(family.tried)


def options_of(arguments: list[str]) -> argparse.Namespace:
    """The command's arguments, read. Raises SystemExit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architecture", choices=ARCHITECTURES)
    parser.add_argument("--model", choices=sorted(MODELS), default="Qwen3-0.6B")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--step", action="append", metavar="ROWSxQUERIES")
    asked.add_argument("--claim", action="append", metavar="DTYPE/KV_DTYPE, DTYPE:FORMAT or all")
    parser.add_argument("--corners", action="store_true", help="of a claim the extremes alone")
    parser.add_argument("--kv-dtype", choices=ITEM_BYTES, default="bfloat16")
    parser.add_argument("--weights", choices=sorted(LINEAR_FORMATS), default=PLAIN)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    """Print a line of JSON a specialisation."""
    options = options_of(arguments)
    if options.claim:
        claims = claims_of(options.architecture) if EVERY in options.claim else options.claim
        for row in compile_claims(options.architecture, claims, corners=options.corners):
            sys.stdout.write(json.dumps(asdict(row)) + "\n")
            sys.stdout.flush()
        return
    sizes = [tuple(map(int, one.split("x"))) for one in options.step]
    forms = {"kv_dtype": options.kv_dtype, "weights": options.weights}
    steps = [Step(rows=rows, queries=queries, context=max(CONTEXT, queries), **forms) for rows, queries in sizes]
    done = compile_steps(options.architecture, MODELS[options.model], steps)
    rows = [*map(asdict, done.resources), *map(asdict, done.steps)]
    sys.stdout.write("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(sys.argv[1:])
