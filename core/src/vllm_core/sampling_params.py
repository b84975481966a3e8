"""`SamplingParams` and `PoolingParams`, with the names and defaults that users of vLLM know."""

from __future__ import annotations

from typing import Any

import msgspec

from vllm_core.api import batch
from vllm_core.errors import RequestError

MAX_N = 128
MAX_LOGPROBS = 20
SMALLEST_TEMPERATURE = 1e-5
"""Below it the most likely token is taken, which draws would bring as well: logits over less may leave float32."""
SMALLEST_REPETITION_PENALTY = 1e-6
"""Logits are divided by it: over much less they leave float32."""
MAX_GRAMMAR_BYTES = 1 << 16
"""Largest schema, expression or grammar, as JSON."""
MAX_SHOWN = 200
"""Characters of a wrong value that its error repeats: requests may hold megabytes of it."""

_STRUCTURES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputsParams(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the output must be, exactly one of: a text that satisfies a JSON schema (`json`, an object or its text), any JSON
    object (`json_object`), a text that a regular expression or an EBNF grammar matches, one of the texts in `choice`, or what
    a structural tag of xgrammar describes. Wrong ones raise RequestError; what a grammar means is checked when it is compiled.

    `disable_any_whitespace` writes JSON on one line; otherwise the model may put a little white space where JSON allows it.
    `after` is a text up to which the output is free, the end of a model's reasoning; it has to come.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    after: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _STRUCTURES if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise _wrong("structured_outputs", given, f"exactly one of {', '.join(_STRUCTURES)}")
        try:
            size = len(msgspec.json.encode(self))
            msgspec.msgpack.encode(self)  # as it travels to the engine, with integers of at most 64 bits
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise _wrong(
                f"structured_outputs.{given[0]}", str(error), "JSON values, integers of 64 bits, not nested too deeply"
            ) from None
        if size > MAX_GRAMMAR_BYTES:
            raise _wrong(f"structured_outputs.{given[0]}", f"{size} bytes", f"at most {MAX_GRAMMAR_BYTES} bytes")
        if self.choice is not None and not (self.choice and all(isinstance(text, str) and text for text in self.choice)):
            raise _wrong("structured_outputs.choice", self.choice, "texts that are not empty, at least one")
        if any(getattr(self, name) == "" for name in ("regex", "grammar")):
            raise _wrong(f"structured_outputs.{given[0]}", "", "a text that is not empty")


class SamplingParams(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How tokens are chosen and when to stop. Values are checked on construction; wrong ones raise RequestError.

    `top_k` 0 or -1 and `top_p` 1 turn the filter off; `temperature` 0 is greedy, as is less than 0.00001. `logprobs` K returns
    the K most likely tokens beside the chosen one. `seed` makes a request repeatable: its random numbers depend on the seed
    and the position alone. `min_tokens` suppresses stop tokens until as many were generated. `stop` strings are not part of
    the output unless `include_stop_str_in_output`. `structured_outputs` lets only tokens through that a grammar
    allows; what would forbid those again (`min_tokens`, `bad_words`) cannot be combined with it.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    bad_words_token_ids: list[list[int]] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._check_kinds()
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("repetition_penalty", self.repetition_penalty, SMALLEST_REPETITION_PENALTY, 100.0)
        _integer("n", self.n, 1, MAX_N)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _optional_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _optional_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _optional_integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _optional_integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _wrong("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.structured_outputs is not None:
            self._check_structured()
        if any(not isinstance(word, str) or not word for word in self.stop_strings):
            raise _wrong("stop", self.stop, "non-empty strings")
        if any(not isinstance(word, str) or not word for word in self.bad_words or ()):
            raise _wrong("bad_words", self.bad_words, "non-empty strings")
        for name, values, limit in (
            ("stop_token_ids", self.stop_token_ids, batch.MAX_STOP - 8),
            ("logit_bias", self.logit_bias, batch.MAX_BIAS),
            ("stop", self.stop_strings, 64),
            ("bad_words", self.bad_words, 128),
        ):
            if values is not None and len(values) > limit:
                raise _wrong(name, f"{len(values)} entries", f"at most {limit} entries")
        for token, bias in (self.logit_bias or {}).items():
            _in_range(f"logit_bias[{token}]", bias, -100.0, 100.0)

    def _check_kinds(self) -> None:
        """A text in place of a list would be taken for a list of its characters."""
        for name in ("stop_token_ids", "bad_words", "bad_words_token_ids"):
            _a_list(name, getattr(self, name))
        for ids in self.bad_words_token_ids or ():
            _a_list("bad_words_token_ids", ids)
        if not isinstance(self.stop, str):
            _a_list("stop", self.stop)
        if self.logit_bias is not None and not isinstance(self.logit_bias, dict):
            raise _wrong("logit_bias", self.logit_bias, "a dict of token ids and biases")

    def _check_structured(self) -> None:
        if not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise _wrong("structured_outputs", self.structured_outputs, "StructuredOutputsParams")
        # Each can forbid the one token that the grammar allows.
        for name in ("min_tokens", "bad_words", "bad_words_token_ids"):
            if getattr(self, name):
                raise _wrong(name, getattr(self, name), "nothing beside structured_outputs")

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < SMALLEST_TEMPERATURE

    def features(self) -> int:
        """The request's bits `vllm_core.api.batch.F_*`."""
        bits = 0
        if not self.is_greedy:
            bits |= batch.F_RANDOM
            if self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0:
                bits |= batch.F_FILTER
        if self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0:
            bits |= batch.F_PENALTIES
        if self.logit_bias:
            bits |= batch.F_BIAS
        if self.min_tokens:
            bits |= batch.F_MIN_LEN
        if self.bad_words or self.bad_words_token_ids:
            bits |= batch.F_BAD_WORDS
        if self.logprobs is not None:
            bits |= batch.F_LOGPROBS
        if self.prompt_logprobs is not None:
            bits |= batch.F_PROMPT_LOGPROBS
        if self.structured_outputs is not None:
            bits |= batch.F_MASK
        return bits

    def replace(self, **changes: Any) -> SamplingParams:
        """Return a copy with some values changed; checked like a new one."""
        return msgspec.structs.replace(self, **changes)


class PoolingParams(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a prompt becomes one vector. `dimensions` keeps the first values (Matryoshka) and normalises again."""

    dimensions: int | None = None

    def __post_init__(self) -> None:
        _optional_integer("dimensions", self.dimensions, 1, 2**20)


def _wrong(name: str, found: object, expected: str) -> RequestError:
    return RequestError(
        "Sampling value cannot be used",
        on=name,
        found=f"{found!r:.{MAX_SHOWN}}",
        expected=expected,
        fix=f"change {name}, or leave it out",
    )


def _in_range(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    expected = f"a number in {'(' if low_open else '['}{low:g}, {high:g}]"
    # NaN is in no range; an integer is compared as it is, since one may be too large for a float.
    inside = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not inside or (low_open and value == low):
        raise _wrong(name, value, expected)


def _a_list(name: str, value: object) -> None:
    if value is not None and not isinstance(value, (list, tuple)):
        raise _wrong(name, value, "a list")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _wrong(name, value, f"an integer in [{low}, {high}]")


def _optional_integer(name: str, value: object, low: int, high: int) -> None:
    if value is not None:
        _integer(name, value, low, high)
