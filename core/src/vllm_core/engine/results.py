"""Distributing one step's arrays over its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_core.api import HostLogprobs, StepKey, StepResult, batch
from vllm_core.engine.messages import TokenLogprobs
from vllm_core.engine.request import Request

if TYPE_CHECKING:
    import numpy.typing as npt


def num_logprobs(request: Request) -> int:
    """Most likely tokens that a request wants per position."""
    params = request.request.params
    return 0 if params is None else max(params.logprobs or 0, params.prompt_logprobs or 0)


class Reader:
    """A step's results as plain lists; log-probabilities are read only where a request wants them."""

    def __init__(self, result: StepResult, key: StepKey) -> None:
        self.tokens: list[int] = result.tokens[:, 0].tolist()
        self.nonfinite: list[bool] = result.nonfinite.tolist()
        self.any_nonfinite = True in self.nonfinite
        # None stands for a vector that is not finite.
        self.pooled: list[list[float] | None] = [] if result.pooled is None else _finite_rows(result.pooled)
        self.has_prompt_logprobs = bool(key.features & batch.F_PROMPT_LOGPROBS) and result.prompt_logprobs is not None
        self._logprobs = result.logprobs
        self._prompt = result.prompt_logprobs
        self._at = 0

    def logprobs(self, request: Request, index: int) -> list[TokenLogprobs] | None:
        """Of the sampled token of row ``index``, if the request wants them."""
        params = request.request.params
        if self._logprobs is None or params is None or params.logprobs is None:
            return None
        return [_entry(self._logprobs, index, self.tokens[index], params.logprobs)]

    def take_prompt(self, request: Request, count: int) -> None:
        """Take the entries of a row's ``count`` tokens: entry i is about the token that follows the row's i-th."""
        params = request.request.params
        if self._prompt is None or params is None or not request.features & batch.F_PROMPT_LOGPROBS:
            return
        first = request.done
        if request.wants_prompt_logprobs and not request.finished:
            request.prompt_logprobs += [
                _entry(self._prompt, self._at + i, request.tokens[first + i + 1], params.prompt_logprobs or 0)
                for i in range(min(count, request.prompt_len - 1 - first))
            ]
        self._at += count


def _finite_rows(pooled: npt.NDArray[np.float32]) -> list[list[float] | None]:
    return [row.tolist() if np.isfinite(row).all() else None for row in pooled]


def _entry(source: HostLogprobs, row: int, token: int, k: int) -> TokenLogprobs:
    return TokenLogprobs(
        token,
        float(source.chosen[row]),
        int(source.rank[row]),
        source.top_ids[row, :k].tolist(),
        source.top[row, :k].tolist(),
    )
