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


@dataclass(slots=True, eq=False)
class _Sequence:
    """One child: its text so far, how much of it may be shown, and its stop strings.

    `bare` is one of which a step brings a token and nothing else to do: its text, if any, is made at its end.
    """

    request: _Request
    out: CompletionOutput
    stream: TokenStream | None = None
    stops: list[str] = field(default_factory=list)
    include_stop: bool = False
    held: int = 0
    least: int = 0
    bare: bool = False
    text: str = ""

    def push(self, ids: list[int], finished: bool) -> str | None:
        """Append tokens; returns the stop string that was found, if any. Updates ``out.text``."""
        if self.stream is None:
            return None
        before = len(self.text)
        self.text += self.stream.push(ids)
        if finished:
            self.text += self.stream.flush()
        if self.stops and len(self.out.token_ids) > self.least:
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


@dataclass(slots=True, eq=False)
class _Request:
    prepared: Prepared
    output: RequestOutput
    started: float
    open: int


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
        self._open: dict[str, _Sequence] = {}
        """The sequences that are not finished, by the id of the child."""

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, prepared: Prepared, *, partial: bool = True) -> None:
        """Start to follow a request. Without ``partial`` nobody looks at text before a sequence has finished."""
        output = RequestOutput(
            request_id=prepared.request_id,
            prompt=prepared.prompt,
            prompt_token_ids=prepared.prompt_token_ids,
            outputs=[CompletionOutput(index=index, text="", token_ids=[]) for index in range(len(prepared.children))],
            finished=False,
        )
        request = _Request(prepared, output, time.monotonic(), len(prepared.children))
        self._requests[prepared.request_id] = request
        for child, out in zip(prepared.children, output.outputs, strict=True):
            self._open[child.request_id] = self._sequence(request, out, prepared.params, partial)

    def _sequence(
        self, request: _Request, out: CompletionOutput, params: SamplingParams | PoolingParams, partial: bool
    ) -> _Sequence:
        if isinstance(params, PoolingParams):
            return _Sequence(request, out)
        wants_logprobs = params.logprobs is not None
        if wants_logprobs:
            out.logprobs, out.cumulative_logprob = [], 0.0
        if self._tokenizer is None or not params.detokenize:
            return _Sequence(request, out, bare=not wants_logprobs)
        stops = params.stop_strings
        return _Sequence(
            request,
            out,
            stream=self._tokenizer.stream(skip_special_tokens=params.skip_special_tokens),
            stops=stops,
            include_stop=params.include_stop_str_in_output,
            held=0 if params.include_stop_str_in_output else max((len(s) for s in stops), default=1) - 1,
            least=params.min_tokens,
            bare=not (partial or stops or wants_logprobs),
        )

    def drop(self, request_id: str) -> list[str]:
        """Stop following; returns the children that the core should abort."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return []
        children = [child.request_id for child in request.prepared.children]
        return [child for child in children if self._open.pop(child, None) is not None]

    def active(self) -> list[str]:
        """Ids of the requests that are not finished."""
        return list(self._requests)

    def process(self, updates: Iterable[RequestUpdate]) -> Processed:
        """Apply updates; each touched request appears once in the outputs."""
        touched: dict[str, RequestOutput | EmbeddingRequestOutput] = {}
        abort: list[str] = []
        # Once a step for every running request.
        for update in updates:
            sequence = self._open.get(update.request_id)
            if sequence is None:
                continue
            request = sequence.request
            if sequence.bare and update.finish_reason is None and sequence.out.token_ids:
                sequence.out.token_ids += update.token_ids
                touched[request.output.request_id] = request.output
                continue
            params = request.prepared.params
            if isinstance(params, PoolingParams):
                touched[request.output.request_id] = self._embedding(request.prepared, params, update)
                self._close(update.request_id, request)
                continue
            touched[request.output.request_id] = request.output
            if self._apply(sequence, params, update):
                abort.append(update.request_id)
            if sequence.out.finished:
                self._close(update.request_id, request)
        return Processed(list(touched.values()), abort)

    def _close(self, child_id: str, request: _Request) -> None:
        del self._open[child_id]
        request.open -= 1
        if not request.open:
            request.output.finished = True
            del self._requests[request.output.request_id]

    def _apply(self, sequence: _Sequence, params: SamplingParams, update: RequestUpdate) -> bool:
        """Returns whether a stop string ended the sequence while the core still runs it."""
        out, output = sequence.out, sequence.request.output
        ending = update.finish_reason is not None
        if not out.token_ids and update.token_ids:
            output.metrics.setdefault("time_to_first_token_s", time.monotonic() - sequence.request.started)
        out.token_ids += update.token_ids
        if out.logprobs is not None:
            for entry in update.logprobs or ():
                out.logprobs.append(self._logprobs(entry))
                out.cumulative_logprob = (out.cumulative_logprob or 0.0) + entry.logprob
        if update.prompt_logprobs is not None:
            output.prompt_logprobs = [None if p is None else self._logprobs(p) for p in update.prompt_logprobs]
        if update.num_cached_tokens:
            output.num_cached_tokens = update.num_cached_tokens
        if update.error is not None:
            output.error = update.error
        stop = None
        if ending or not sequence.bare:
            shown = out.token_ids if sequence.bare else update.token_ids
            # A stop token belongs to the ids, not to the text, unless the user asked for it.
            hidden = update.stop_reason is not None and not params.include_stop_str_in_output
            stop = sequence.push(shown[:-1] if hidden else shown, ending)
        if stop is not None:
            out.finish_reason, out.stop_reason = "stop", stop
            return not ending
        if ending:
            asked = update.stop_reason in (params.stop_token_ids or ())
            # The model's own end is no reason that somebody gave.
            out.finish_reason, out.stop_reason = update.finish_reason, update.stop_reason if asked else None
            output.metrics.update(queue_s=update.queue_s, prefill_s=update.prefill_s, decode_s=update.decode_s)
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


def cosine(one: list[float], other: list[float]) -> float:
    """Cosine of the angle between two vectors; 0 where one has no length."""
    product = sum(a * b for a, b in zip(one, other, strict=True))
    length = (sum(a * a for a in one) * sum(b * b for b in other)) ** 0.5
    return product / length if length else 0.0
