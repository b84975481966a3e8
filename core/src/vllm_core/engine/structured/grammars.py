"""Grammars of structured output, compiled with xgrammar beside the engine's thread, and kept.

xgrammar (Dong et al. 2024, arXiv:2411.15100) works out most of a state's mask when it compiles, so that filling one takes
tens of microseconds. It is an optional dependency; nothing here imports it before the first grammar.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_core.engine.structured import schema
from vllm_core.errors import RequestError
from vllm_core.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

log = logging.getLogger("vllm_core.engine")

MAX_COMPILE_S = 30.0
MAX_CACHE_BYTES = 256 * 2**20
MAX_WHITESPACE = 4
"""Characters of white space between two parts of a JSON text: a model that likes them must not write them for ever."""

_COMPILING = 2
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a grammar must know of a tokenizer and its model.

    ``tokens`` are the bytes of each token, empty for special ones; ``size`` is the model's, with padding; ``stops`` end a text.
    """

    tokens: Sequence[bytes]
    size: int
    stops: tuple[int, ...]


class Grammars:
    """Compiled grammars by what was asked for. ``vocabulary`` is called once, when the first is needed."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary = vocabulary
        self._lock, self._making = threading.Lock(), threading.Lock()
        self._jobs: deque[tuple[bytes, StructuredOutputsParams, Future[Any]]] = deque()
        self._asked: dict[bytes, float] = {}
        """When each that waits in the jobs was asked for last."""
        self._working = 0
        self._compiler: Any = None
        self._has_stops = False
        self._known: OrderedDict[bytes, Future[Any]] = OrderedDict()

    def compile(self, wanted: StructuredOutputsParams) -> Future[Any]:
        """The grammar, now or later, from another thread. Its exception is a RequestError."""
        key = _encode(wanted)
        with self._lock:
            found = self._known.get(key)
            if found is None or key in self._asked:
                self._asked[key] = time.monotonic()
            if found is not None:
                self._known.move_to_end(key)
                return found
            future: Future[Any] = Future()
            self._known[key] = future
            self._jobs.append((key, wanted, future))
            if self._working < _COMPILING:
                self._working += 1
                # A daemon: a grammar that takes for ever must not keep the process.
                threading.Thread(target=self._run, name="grammar", daemon=True).start()
        return future

    def constraint(self, wanted: StructuredOutputsParams) -> Matcher:
        """A sequence at the start of its grammar. Waits for it to be compiled; raises RequestError."""
        try:
            grammar = self.compile(wanted).result(MAX_COMPILE_S)
        except FutureTimeoutError:
            raise too_slow() from None
        return self.start(grammar)

    def start(self, grammar: Any) -> Matcher:
        """A sequence at the start of a grammar that `compile` brought."""
        return Matcher(grammar, self._has_stops)

    def _run(self) -> None:
        """Compile what there is to compile."""
        while True:
            with self._lock:
                if not self._jobs:
                    self._working -= 1
                    return
                key, wanted, future = self._jobs.popleft()
                is_late = time.monotonic() > self._asked.pop(key) + MAX_COMPILE_S
            self._work(key, wanted, future, is_late)

    def _work(self, key: bytes, wanted: StructuredOutputsParams, future: Future[Any], is_late: bool) -> None:
        try:
            if is_late:  # whoever waited for it has been refused: the time belongs to those that still wait
                raise too_slow()
            grammar = self._compile(wanted)
        except Exception as error:  # whatever it is, it belongs to the request
            if not isinstance(error, (RequestError, RuntimeError, ValueError, TypeError)):
                log.exception("a grammar was not compiled")
            with self._lock:
                self._known.pop(key, None)
            future.set_exception(error if isinstance(error, RequestError) else _refused(error))
            return
        with self._lock:  # who gets the result and asks for another finds a cache that is within its size
            future.set_result(grammar)
            self._forget()

    def _compile(self, wanted: StructuredOutputsParams) -> Any:
        import xgrammar

        with self._making:  # a large vocabulary takes a while, and the engine's thread must not wait for it
            if self._compiler is None:
                vocabulary = self._vocabulary()
                info = xgrammar.TokenizerInfo(
                    list(vocabulary.tokens), vocab_size=vocabulary.size, stop_token_ids=list(vocabulary.stops)
                )
                self._has_stops = bool(info.stop_token_ids)
                self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            compiler = self._compiler
        grammar = compiler.compile_grammar(_build(wanted))
        if Matcher(grammar, self._has_stops).mask() is None:
            raise _refused("it allows no first token")
        return grammar

    def _forget(self) -> None:
        """Drop the grammars that were not used for longest, beyond what the cache may hold. The lock is held."""
        done = [(key, one) for key, one in self._known.items() if one.done() and one.exception() is None]
        size = sum(one.result().memory_size_bytes for _, one in done)
        for key, one in done[:-1]:
            if size <= MAX_CACHE_BYTES:
                break
            size -= one.result().memory_size_bytes
            del self._known[key]


class Matcher:
    """Where one sequence stands in its grammar; see `Constraint`."""

    def __init__(self, grammar: Any, has_stops: bool) -> None:
        import numpy
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=not has_stops)
        self._words = numpy.zeros(-(-grammar.tokenizer_info.vocab_size // 32), dtype=numpy.int32)
        self._stuck = False

    @property
    def ended(self) -> bool:
        """See Constraint."""
        return bool(self._matcher.is_terminated())

    def accept(self, token: int) -> bool:
        """See Constraint."""
        return not self._stuck and bool(self._matcher.accept_token(token))

    def mask(self) -> npt.NDArray[np.int32] | None:
        """See Constraint."""
        if self._matcher.is_terminated():
            return None
        words = self._words
        limited = self._matcher.fill_next_token_bitmask(words.reshape(1, -1))
        self._stuck = limited and not words.any()
        return None if self._stuck else words


def _build(wanted: StructuredOutputsParams) -> Any:
    from xgrammar import Grammar

    grammar = _grammar(wanted)
    if wanted.after is None:
        return grammar
    # White space between the two belongs to neither.
    before = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": wanted.after}
    first = Grammar.from_structural_tag(_encode({"type": "structural_tag", "format": before}).decode())
    return Grammar.concat(first, Grammar.from_ebnf('root ::= "\\n"{0,2}'), grammar)


def _grammar(wanted: StructuredOutputsParams) -> Any:
    from xgrammar import Grammar

    if wanted.json is not None or wanted.json_object:
        asked = {"type": "object"} if wanted.json is None else schema.read(wanted.json)
        schema.check(asked)
        free = not wanted.disable_any_whitespace
        return Grammar.from_json_schema(
            _encode(schema.prepared(asked)).decode(),
            any_whitespace=free,
            max_whitespace_cnt=MAX_WHITESPACE if free else None,
            strict_mode=not wanted.json_object,
        )
    if wanted.regex is not None:
        return Grammar.from_regex(wanted.regex)
    if wanted.choice is not None:
        texts = (msgspec.json.encode(text).decode() for text in wanted.choice)
        return Grammar.from_ebnf(f"root ::= {' | '.join(texts)}")
    if wanted.grammar is not None:
        return Grammar.from_ebnf(wanted.grammar)
    tag = wanted.structural_tag
    return Grammar.from_structural_tag(tag if isinstance(tag, str) else _encode(tag).decode())


def too_slow() -> RequestError:
    """The error for a grammar that is not there in time."""
    return RequestError(
        "Structured output cannot be prepared",
        on="structured_outputs",
        found=f"a grammar that compiles for more than {MAX_COMPILE_S:.0f} s",
        expected="a smaller one",
        fix="bound its repetitions, or split it",
    )


def _refused(error: object) -> RequestError:
    # xgrammar's messages begin with the place in its source.
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = lines[0].rpartition(".cc:")[2].partition(": ")[2] if ".cc:" in lines[0] else lines[0]
    return RequestError(
        "Structured output cannot be prepared",
        on="structured_outputs",
        found=text[:300] or type(error).__name__,
        expected="a JSON schema, regular expression, choice or EBNF grammar that xgrammar takes",
        fix="change it; docs/serving.md lists what is possible",
    )
