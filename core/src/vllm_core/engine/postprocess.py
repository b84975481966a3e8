"""From updates of the engine core to what a user gets: text, stop strings, log-probabilities, `n` sequences as one."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_core.engine.messages import RequestUpdate, TokenLogprobs
from vllm_core.engine.preprocess import Prepared
from vllm_core.outputs import CompletionOutput, EmbeddingOutput, EmbeddingRequestOutput, Logprob, RequestOutput
from vllm_core.sampling_params import PoolingParams, SamplingParams

if TYPE_CHECKING:
    from vllm_core.loader.token_stream import TokenStream
    from vllm_core.loader.tokenizer import Tokenizer


@dataclass(slots=True)
class _Sequence:
    """One child: its text so far, how much of it may be shown, and its stop strings."""

    out: CompletionOutput
    stream: TokenStream | None
    stops: list[str]
    include_stop: bool
    held: int
    text: str = ""

    def push(self, ids: list[int], finished: bool) -> str | None:
        """Append tokens; returns the stop string that was found, if any. Updates ``out.text``."""
        if self.stream is None:
            return None
        before = len(self.text)
        self.text += self.stream.push(ids)
        if finished:
            self.text += self.stream.flush()
        found = self._find(before)
        if found is not None:
            return found
        # The tail that may still become a stop string is not shown until it cannot.
        self.out.text = self.text if finished or not self.held else self.text[: max(0, len(self.text) - self.held)]
        return None

    def _find(self, before: int) -> str | None:
        best: tuple[int, str] | None = None
        for stop in self.stops:
            at = self.text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0 and (best is None or at < best[0]):
                best = (at, stop)
        if best is None:
            return None
        at, stop = best
        self.out.text = self.text[: at + len(stop)] if self.include_stop else self.text[:at]
        return stop


@dataclass(slots=True)
class _Request:
    prepared: Prepared
    sequences: list[_Sequence]
    output: RequestOutput
    started: float
    open: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Processed:
    """What updates became. `abort` are children that a stop string ended: the core does not know yet."""

    outputs: list[RequestOutput | EmbeddingRequestOutput]
    abort: list[str]


class Postprocessor:
    """Holds the requests that are not finished. One thread calls all methods."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, prepared: Prepared) -> None:
        """Start to follow a request."""
        params = prepared.params
        sequences = [self._sequence(index, params) for index in range(len(prepared.children))]
        output = RequestOutput(
            request_id=prepared.request_id,
            prompt=prepared.prompt,
            prompt_token_ids=prepared.prompt_token_ids,
            outputs=[s.out for s in sequences],
            finished=False,
        )
        request = _Request(prepared, sequences, output, time.monotonic())
        request.open = set(range(len(sequences)))
        self._requests[prepared.request_id] = request

    def _sequence(self, index: int, params: SamplingParams | PoolingParams) -> _Sequence:
        out = CompletionOutput(index=index, text="", token_ids=[])
        if isinstance(params, PoolingParams):
            return _Sequence(out, None, [], False, 0)
        if params.logprobs is not None:
            out.logprobs, out.cumulative_logprob = [], 0.0
        if self._tokenizer is None or not params.detokenize:
            return _Sequence(out, None, [], False, 0)
        stops = params.stop_strings
        stream = self._tokenizer.stream(skip_special_tokens=params.skip_special_tokens)
        held = 0 if params.include_stop_str_in_output else max((len(s) for s in stops), default=1) - 1
        return _Sequence(out, stream, stops, params.include_stop_str_in_output, held)

    def drop(self, request_id: str) -> list[str]:
        """Stop following; returns the children that the core should abort."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return []
        return [request.prepared.children[index].request_id for index in sorted(request.open)]

    def active(self) -> list[str]:
        """Ids of the requests that are not finished."""
        return list(self._requests)

    def process(self, updates: Iterable[RequestUpdate]) -> Processed:
        """Apply updates; each touched request appears once in the outputs."""
        touched: dict[str, RequestOutput | EmbeddingRequestOutput] = {}
        abort: list[str] = []
        for update in updates:
            request_id, _, number = update.request_id.rpartition("#")
            request = self._requests.get(request_id)
            if request is None or int(number) not in request.open:
                continue
            index = int(number)
            if isinstance(request.prepared.params, PoolingParams):
                touched[request_id] = self._embedding(request.prepared, request.prepared.params, update)
                request.open.discard(index)
            else:
                if self._apply(request, request.sequences[index], request.prepared.params, update):
                    abort.append(update.request_id)
                touched[request_id] = request.output
            if request.sequences[index].out.finished:
                request.open.discard(index)
            if not request.open:
                request.output.finished = True
                del self._requests[request_id]
        return Processed(list(touched.values()), abort)

    def _apply(self, request: _Request, sequence: _Sequence, params: SamplingParams, update: RequestUpdate) -> bool:
        """Returns whether a stop string ended the sequence while the core still runs it."""
        out = sequence.out
        if not out.token_ids and update.token_ids:
            request.output.metrics.setdefault("time_to_first_token_s", time.monotonic() - request.started)
        out.token_ids.extend(update.token_ids)
        # A stop token belongs to the ids, not to the text, unless the user asked for it.
        shown = update.token_ids
        if update.stop_reason is not None and not params.include_stop_str_in_output:
            shown = shown[:-1]
        if out.logprobs is not None:
            for entry in update.logprobs or ():
                out.logprobs.append(self._logprobs(entry))
                out.cumulative_logprob = (out.cumulative_logprob or 0.0) + entry.logprob
        if update.prompt_logprobs is not None:
            request.output.prompt_logprobs = [None if p is None else self._logprobs(p) for p in update.prompt_logprobs]
        if update.num_cached_tokens:
            request.output.num_cached_tokens = update.num_cached_tokens
        if update.error is not None:
            request.output.error = update.error
        stop = sequence.push(shown, update.finish_reason is not None)
        if stop is not None:
            out.finish_reason, out.stop_reason = "stop", stop
            return update.finish_reason is None
        if update.finish_reason is not None:
            out.finish_reason, out.stop_reason = update.finish_reason, update.stop_reason
            request.output.metrics.update(queue_s=update.queue_s, prefill_s=update.prefill_s, decode_s=update.decode_s)
        return False

    def _logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        chosen = {entry.token: Logprob(entry.logprob, entry.rank, self._text(entry.token))}
        for rank, (token, value) in enumerate(zip(entry.top_ids, entry.top, strict=True), start=1):
            chosen.setdefault(token, Logprob(value, rank, self._text(token)))
        return chosen

    def _text(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token)

    @staticmethod
    def _embedding(prepared: Prepared, params: PoolingParams, update: RequestUpdate) -> EmbeddingRequestOutput:
        vector = update.pooled or []
        if params.dimensions is not None:
            vector = shorten(vector, params.dimensions)
        error = update.error if update.pooled is not None else update.error or update.finish_reason
        return EmbeddingRequestOutput(prepared.request_id, prepared.prompt_token_ids, EmbeddingOutput(vector), error=error)


def shorten(vector: list[float], dimensions: int) -> list[float]:
    """Keep the first ``dimensions`` values and make the length 1 again (Kusupati et al. 2022)."""
    cut = vector[:dimensions]
    length = sum(value * value for value in cut) ** 0.5
    return [value / length for value in cut] if length else cut
