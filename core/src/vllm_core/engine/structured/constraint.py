"""What the scheduler knows of a grammar: a state per sequence, and the masks of one step. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from vllm_core.engine.request import Request

DEAD_END = "structured output: its grammar allows no further token"
"""How the error of a sequence begins whose grammar, though well formed, leads nowhere."""


class Constraint(Protocol):
    """Where one sequence stands in its grammar."""

    @property
    def ended(self) -> bool:
        """Whether the grammar is complete and nothing may follow."""

    def accept(self, token: int) -> bool:
        """Take a token that was sampled; False where the grammar does not allow it, or allowed none."""

    def mask(self) -> npt.NDArray[np.int32] | None:
        """A bit per token of the vocabulary that may follow, in words of 32; None where no token may."""


class MaskRows(Mapping[int, "npt.NDArray[np.int32]"]):
    """Masks of one step by sampled row, worked out when they are first looked at.

    A mask depends on the token before, which may still be in flight when the step is launched: ``wait`` is called first and
    reads it. A program therefore looks as late as it can, when the forward part of the step is under way. Rows whose request
    has ended meanwhile have no mask: what they sample is dropped.
    """

    def __init__(self, rows: Iterable[tuple[int, Request]]) -> None:
        self.wait: Callable[[], None] | None = None
        self._rows = list(rows)
        self._masks: dict[int, npt.NDArray[np.int32]] | None = None

    def __getitem__(self, row: int) -> npt.NDArray[np.int32]:
        return self._found[row]

    def __iter__(self) -> Iterator[int]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    @property
    def _found(self) -> dict[int, npt.NDArray[np.int32]]:
        if self._masks is None:
            if self.wait is not None:
                self.wait()
            self._masks = {}
            for row, request in self._rows:
                mask = None if request.constraint is None or request.finished else request.constraint.mask()
                if mask is not None:
                    self._masks[row] = mask
        return self._masks


def mask_rows(rows: Iterable[tuple[Request, int, bool]]) -> MaskRows:
    """The constrained ones among a step's rows."""
    sampled = (request for request, _, is_sampled in rows if is_sampled)
    return MaskRows((index, request) for index, request in enumerate(sampled) if request.constraint is not None)
