"""Block sizes, warps and stages of a family's kernels, and which are in use in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from vllm_triton.tried import ALL, Tried

Options = tuple[tuple[str, int | str], ...]
"""Launch options that only some compilers know, such as the size of their matrix instructions, by name."""


MANY = 5
"""Programs of `Decode` a multiprocessor."""

WIDE = 64
"""Rows of a tile of `Quantised` whose sums are few enough for its warps."""


@dataclass(frozen=True, slots=True)
class Extend:
    """Attention of rows with several queries: lanes (queries times heads of a group) and keys of a tile."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    options: Options = ()


@dataclass(frozen=True, slots=True)
class Decode:
    """Attention of single queries. `waves`: programs wanted per multiprocessor before keys are split no further.

    `stages_of_many`, if any, is for more than `MANY` programs a multiprocessor: with as many, they wait for memory anyhow, and
    fewer of them with more on the way take less. Fewer programs are better off all at once, with little memory each.
    """

    block_n: int
    warps: int
    stages: int
    waves: int
    stages_of_many: int = 0
    options: Options = ()


@dataclass(frozen=True, slots=True)
class Codes:
    """Attention over a KV cache of codes (`kernels.codec`), whose numbers take registers beside them; wide: heads above 128."""

    extend: Extend
    extend_wide: Extend
    decode: Decode
    decode_wide: Decode


@dataclass(frozen=True, slots=True)
class OneRow:
    """Product of one row: weight rows and columns of a tile."""

    block_n: int
    block_k: int
    warps: int
    options: Options = ()


@dataclass(frozen=True, slots=True)
class FewRows:
    """Product of few rows: a tile, the parts that K is split into, bytes of each weight row asked for ahead of time."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    split: int
    ahead: int
    options: Options = ()


@dataclass(frozen=True, slots=True)
class Quantised:
    """Product of few rows with a quantised weight: most rows of a tile, stages, and rows of the weight.

    `warps` are those of up to `WIDE` rows; more of them have twice as many. K is split until there are as many `programs`, but
    into no part of fewer columns than `part`. `unit`: most inputs of four bits that a step takes.
    """

    block_m: int
    stages: int
    block_n: int = 64
    warps: int = 4
    options: Options = ()
    programs: int = 96
    part: int = 1024
    unit: int = 128

    def warps_of(self, block_m: int) -> int:
        """Of a tile of so many rows."""
        return self.warps * (2 if block_m > WIDE else 1)


@dataclass(frozen=True, slots=True)
class Grouped:
    """Products of a mixture's experts: a tile of rows, all of one expert, and of the weight's rows and columns."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    options: Options = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """One family. `multiprocessors` is that of the device in use.

    `one_row` is asked with the rows and columns of a weight, `few_rows` with the rows of x before them and whether the
    weight is a gate and an up projection. `grouped` is asked like `few_rows`, with the rows of x that an expert has on average,
    and with the rows of an expert's matrix.
    """

    family: str
    extend: Extend
    extend_wide: Extend
    """Head sizes above 128, whose tiles are twice as large."""
    decode: Decode
    one_row: Callable[[int, int], OneRow]
    few_rows: Callable[[int, int, int, bool], FewRows]
    grouped: Callable[[int, int, int, bool], Grouped]
    pdl: bool
    """Whether a kernel may start while the one before it drains (`kernels.pdl`)."""
    multiprocessors: int = 1
    fp8: bool = False
    """Whether the compiler converts float8e4nv itself."""
    quantised: Quantised = Quantised(32, 2)
    codes: Codes | None = None
    """Over a KV cache of codes; None: as over numbers."""
    tried: Tried = ALL
    """What the platform has tried: kernels refuse the rest, too."""

    @property
    def dependent(self) -> dict[str, bool]:
        """Launch arguments of kernels that wait for the one before; compilers without such launches know no such option."""
        return {"PDL": True, "launch_pdl": True} if self.pdl else {"PDL": False}


_active: list[Tuning] = []


def use(tuning: Tuning, multiprocessors: int) -> None:
    """Choose the tuning of this process, whose device has as many multiprocessors."""
    _active[:] = [replace(tuning, multiprocessors=multiprocessors)]


def active() -> Tuning:
    """The tuning of this process; the smallest one where no device was opened."""
    if not _active:
        from vllm_triton.portable import TUNING

        use(TUNING, 1)
    return _active[0]
