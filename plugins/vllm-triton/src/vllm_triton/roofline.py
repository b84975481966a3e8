"""How long a launch should take: the least that a chip's data sheet allows, and what its tiles make of it.

Predictions, for choosing block sizes where no chip is at hand; no measurement enters. `floor_s` is the roofline
(Williams, Waterman and Patterson 2009) of the work that has to be done. `predicted_s` adds what tiles cost: too few bytes
under way to fill the memory's latency (Little 1961), matrix work on padding, and a last round of programs that fills only
a part of the chip. It knows nothing of caches, of instruction issue or of clocks that fall under load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from vllm_triton.offline import Launch, Shape
from vllm_triton.ops.linear import FEW
from vllm_triton.workload import Model, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One product. `bandwidth` in bytes/s, `matrix_rate` of 16-bit products in operations/s, `latency_s` of its memory.

    `source` names the maker's page from which the first two are; `latency_s` is of the order that public microbenchmarks
    report for such memory.
    """

    name: str
    architecture: str
    units: int
    bandwidth: float
    matrix_rate: float
    memory_bytes: int
    latency_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Work:
    """What a launch has to do: bytes to read and write once, operations of matrix units."""

    num_bytes: int
    operations: int

    def __add__(self, other: Work) -> Work:
        return Work(self.num_bytes + other.num_bytes, self.operations + other.operations)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How it is cut. `ahead_bytes`: what one program has under way; `issued`: operations with padding."""

    programs: int
    ahead_bytes: int
    issued: int


def floor_s(work: Work, chip: Chip) -> float:
    """The roofline."""
    return max(work.num_bytes / chip.bandwidth, work.operations / chip.matrix_rate)


def predicted_s(work: Work, tiling: Tiling, chip: Chip, resident: int) -> float:
    """With the tiles' costs; ``resident`` programs fit on one unit at a time."""
    places = max(1, resident) * chip.units
    under_way = min(tiling.programs, places) * tiling.ahead_bytes
    bandwidth = min(chip.bandwidth, under_way / chip.latency_s)
    rounds = tiling.programs / places
    # Within the first round units share the memory; a part of a later round leaves some of them without work.
    tail = 1.0 if rounds <= 1.0 else ceil(rounds) / rounds
    busy = min(1.0, tiling.programs / chip.units)
    return max(work.num_bytes / bandwidth, tiling.issued / (chip.matrix_rate * busy) * tail)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A whole step, in microseconds: the chip's roofline, and with what tiles cost (0 where that is not known). Predicted;
    launches cost nothing here."""

    step: str
    launches: int
    floor_us: float
    predicted_us: float


def step_time(
    name: str,
    model: Model,
    step: Step,
    launches: Sequence[tuple[int, Launch]],
    chip: Chip,
    resident: Callable[[Launch], int] | None = None,
) -> StepTime:
    """What ``launches``, each with its number in the step, take; ``resident`` programs fit on a unit at a time."""
    floor = predicted = 0.0
    for repeats, launch in launches:
        judged = judge(launch, step.context, step.tokens)
        if judged is not None:
            floor += repeats * floor_s(judged[0], chip)
            predicted += repeats * predicted_s(*judged, chip, resident(launch)) if resident is not None else 0.0
    # Products of many rows are a library's: counted at the roofline in both.
    library = [(model.layers, model.layer_weights, step.tokens)] if step.tokens > FEW else []
    library += [(1, model.head_weights, step.rows)] if step.rows > FEW else []
    work = sum(repeats * floor_s(Work(2 * size, 2 * size * rows), chip) for repeats, size, rows in library)
    total = predicted + work if resident is not None else 0.0
    count = sum(repeats for repeats, _ in launches)
    return StepTime(step=name, launches=count, floor_us=(floor + work) * 1e6, predicted_us=total * 1e6)


def judge(launch: Launch, step_context: int, step_tokens: int) -> tuple[Work, Tiling] | None:
    """Work and tiles of the kernels that take nearly all of a step; None for the others.

    ``step_context`` tokens are attended to by each row, of whose new ones there are ``step_tokens`` in all rows.
    """
    values = launch.arguments
    match launch.kernel:
        case "one_row":
            return _one_row(values, launch.programs)
        case "few_rows":
            return _few_rows(values, launch.programs)
        case "one_pair" | "one_token":
            return _by_pair(launch.kernel, values, launch.programs)
        case "grouped":
            return _grouped(values)
        case "decode":
            return _decode(values, launch.programs, step_context)
        case "extend":
            return _extend(values, launch.programs, step_context, step_tokens)
        case _:
            return None


def _one_row(values: dict[str, Any], programs: int) -> tuple[Work, Tiling]:
    weight: Shape = values["weight"]
    tiles = 2 if values["EPILOGUE"] == 2 else 1
    ahead = values["BLOCK_N"] * min(values["BLOCK_K"], values["K"]) * weight.item_bytes * tiles
    # The next tile is asked for before this one is used.
    return Work(weight.num_bytes, 0), Tiling(programs, 2 * ahead, 0)


def _few_rows(values: dict[str, Any], programs: int) -> tuple[Work, Tiling]:
    weight, x = values["weight"], values["x"]
    count, tiles = values["T"], 2 if values["EPILOGUE"] == 2 else 1
    elements = tiles * values["N"] * values["K"]
    # Weights that are codes have scales beside them, and take their inputs in units.
    scales = values["scale"].num_bytes if "UNIT" in values else 0
    step = values["UNIT"] if "UNIT" in values else values["BLOCK_K"]
    read = weight.num_bytes + scales + x.item_bytes * count * (values["K"] + values["N"])
    inputs = min(count, values["BLOCK_M"]) * x.item_bytes
    stage = step * (values["BLOCK_N"] * tiles * weight.num_bytes // elements + inputs)
    work = Work(read, 2 * count * elements)
    return work, Tiling(programs, stage * max(1, values["STAGES"] - 1), 2 * values["BLOCK_M"] * elements)


def _by_pair(kernel: str, values: dict[str, Any], programs: int) -> tuple[Work, Tiling]:
    """Pairs of a token and an expert, each expert another."""
    item, matrices = values["weight"].item_bytes, 2 if kernel == "one_pair" else 1
    pairs = values["experts"].sizes[0] * values["TOP"]
    ahead = values["BLOCK_N"] * min(values["BLOCK_K"], values["K"]) * item * matrices
    return Work(pairs * matrices * values["N"] * values["K"] * item, 0), Tiling(programs, 2 * ahead, 0)


def _grouped(values: dict[str, Any]) -> tuple[Work, Tiling]:
    """Experts' products, where tokens choose evenly: an expert that somebody chose has on average half a tile too many."""
    pairs, experts, columns = values["order"].sizes[0], values["E"], values["K"]
    matrices, item = 2 if values["GATHER"] else 1, values["weight"].item_bytes
    rows, block_m = matrices * values["N"], values["BLOCK_M"]
    touched = experts * (1 - (1 - values["TOP"] / experts) ** (pairs / values["TOP"]))
    tiles = touched * max(1.0, pairs / touched / block_m + 0.5)
    read = int(touched * rows * columns * item + pairs * (columns + values["N"]) * item)
    stage = (matrices * values["BLOCK_N"] + min(block_m, ceil(pairs / touched))) * values["UNIT"] * item
    programs = int(tiles * -(-values["N"] // values["BLOCK_N"]))
    issued = int(2 * tiles * block_m * rows * columns)
    return Work(read, 2 * pairs * rows * columns), Tiling(programs, stage * max(1, values["STAGES"] - 1), issued)


def _key_bytes(values: dict[str, Any], size: int) -> int:
    """Of a token's key of one head in the cache, with its scale where there is one."""
    scales: Shape = values["scales"]
    cache: Shape = values["cache"]
    return size * cache.item_bytes + (0 if scales == cache else scales.item_bytes)


def _decode(values: dict[str, Any], programs: int, context: int) -> tuple[Work, Tiling]:
    q: Shape = values["q"]
    rows, heads, size = q.sizes
    kv_heads, key_bytes = values["HK"], _key_bytes(values, size)
    work = Work(2 * rows * context * kv_heads * key_bytes, 4 * rows * context * heads * size)
    stage = 2 * values["BLOCK_N"] * key_bytes
    issued = 4 * rows * context * kv_heads * values["GP"] * values["BLOCK_D"]
    return work, Tiling(programs, stage * max(1, values["STAGES"] - 1), issued)


def _extend(values: dict[str, Any], programs: int, context: int, tokens: int) -> tuple[Work, Tiling]:
    q: Shape = values["q"]
    _, heads, size = q.sizes
    kv_heads, key_bytes = values["HK"], _key_bytes(values, size)
    rows = values["num_rows"]
    queries = tokens // rows
    # A query at the end of a row sees all of the context, the first of them what was there before.
    seen = context - (queries - 1) / 2
    useful = int(4 * tokens * seen * heads * size)
    padding = values["GP"] / values["G"] * values["BLOCK_D"] / size
    # Keys are whole tiles: half a tile of queries and one of keys too many.
    tile_queries = values["BLOCK_M"] // values["GP"]
    masked = (seen + (tile_queries + values["BLOCK_N"]) / 2) / seen
    work = Work(2 * rows * context * kv_heads * key_bytes + 2 * tokens * heads * size * q.item_bytes, useful)
    stage = 2 * values["BLOCK_N"] * key_bytes * max(1, values["STAGES"])
    # Of the programs some find no tile and end at once.
    tiles = rows * -(-queries // tile_queries) * kv_heads
    return work, Tiling(min(programs, tiles), stage, int(useful * padding * masked))
