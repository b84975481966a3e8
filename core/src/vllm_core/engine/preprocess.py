"""From what a user gives to what the engine core takes: prompts to token ids, defaults resolved, limits checked.

Every check raises RequestError before the request reaches the engine, so that nothing else is disturbed.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from vllm_core.api import batch
from vllm_core.engine.messages import EngineRequest
from vllm_core.errors import ContextLengthError, RequestError, nearest
from vllm_core.sampling_params import PoolingParams, SamplingParams

if TYPE_CHECKING:
    from vllm_core.loader.tokenizer import Tokenizer


PROMPT_KEYS = ("prompt", "prompt_token_ids")


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests are checked against."""

    max_model_len: int
    vocab_size: int
    hidden_size: int
    stop_token_ids: tuple[int, ...]


@dataclass(slots=True)
class Prepared:
    """One user's request: its prompt and the sequences it is split into."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams | PoolingParams
    children: list[EngineRequest]


def child_id(request_id: str, index: int) -> str:
    """Id of the ``index``-th sequence of a request."""
    return f"{request_id}#{index}"


class Preprocessor:
    """Turns prompts into engine requests. Holds no state between requests."""

    def __init__(self, limits: Limits, tokenizer: Tokenizer | None) -> None:
        self._limits = limits
        self._tokenizer = tokenizer

    def generate(
        self,
        request_id: str,
        prompt: str | Sequence[int] | Mapping[str, Any],
        params: SamplingParams,
        *,
        arrival_time: float,
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
    ) -> Prepared:
        """Prepare a generation. Raises RequestError."""
        text, ids = self._prompt(prompt, add_special_tokens)
        room = self._limits.max_model_len - len(ids)
        if room < 1:
            raise self._too_long(len(ids))
        # An upper bound holds where there is less room; a lower one does not.
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.min_tokens > room:
            raise self._no_room(params.min_tokens, room)
        stop = dict.fromkeys(params.stop_token_ids or ())
        if params.structured_outputs is not None:
            self._check_structured()
        # A grammar's end is an end, and is said with one of these tokens.
        if not params.ignore_eos or params.structured_outputs is not None:
            stop.update(dict.fromkeys(self._limits.stop_token_ids))
        self._check_tokens("stop_token_ids", list(stop))
        self._check_tokens("logit_bias", list(params.logit_bias or ()))
        self._check_stops(params)
        bad_words = self._bad_words(params)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        single = params if params.n == 1 else params.replace(n=1)
        children = [
            EngineRequest(
                request_id=child_id(request_id, index),
                prompt_token_ids=ids,
                arrival_time=arrival_time,
                params=single,
                priority=priority,
                salt=cache_salt,
                seed=(seed + index) % 2**64,
                max_tokens=max_tokens,
                stop_token_ids=list(stop),
                bad_words=bad_words,
            )
            for index in range(params.n)
        ]
        return Prepared(request_id, text, ids, params, children)

    def pool(
        self,
        request_id: str,
        prompt: str | Sequence[int] | Mapping[str, Any],
        params: PoolingParams,
        *,
        arrival_time: float,
    ) -> Prepared:
        """Prepare an embedding. Raises RequestError."""
        text, ids = self._prompt(prompt, True)
        if len(ids) > self._limits.max_model_len:
            raise self._too_long(len(ids), "at most")
        if params.dimensions is not None and params.dimensions > self._limits.hidden_size:
            raise RequestError(
                "Embedding is shorter than asked for",
                on="dimensions",
                found=str(params.dimensions),
                expected=f"at most {self._limits.hidden_size}",
                fix="ask for fewer dimensions",
            )
        child = EngineRequest(
            request_id=child_id(request_id, 0), prompt_token_ids=ids, arrival_time=arrival_time, pooling=params
        )
        return Prepared(request_id, text, ids, params, [child])

    def _prompt(self, prompt: str | Sequence[int] | Mapping[str, Any], special: bool) -> tuple[str | None, list[int]]:
        value: Any = prompt
        if isinstance(prompt, Mapping):
            self._check_keys(prompt)
            value = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt.get("prompt", "")
        if isinstance(value, str):
            ids = self._need_tokenizer("a prompt given as text").encode(
                value, add_special_tokens=special, max_tokens=self._limits.max_model_len
            )
            text: str | None = value
        else:
            ids, text = list(value), None
            self._check_tokens("prompt", ids)
        # Text without a character is empty although a tokenizer may add tokens of its own.
        if not ids or text == "":
            raise RequestError(
                "Prompt is empty", on="prompt", found="no tokens", expected="at least one token", fix="send a prompt"
            )
        return text, ids

    def _check_structured(self) -> None:
        self._need_tokenizer("structured_outputs")
        if find_spec("xgrammar") is None:
            raise RequestError(
                "Structured output needs xgrammar",
                on="structured_outputs",
                found="a Python without xgrammar",
                expected="the extra structured of vllm-core",
                fix="where the engine runs: pip install './core[structured]' in a checkout, or xgrammar alone",
            )

    def _check_stops(self, params: SamplingParams) -> None:
        """Stop strings are looked for in text, so there must be some."""
        if not params.stop_strings:
            return
        self._need_tokenizer("stop")
        if not params.detokenize:
            raise RequestError(
                "Stop strings need text",
                on="stop",
                found="detokenize=False",
                expected="detokenize=True, or no stop strings",
                fix="leave detokenize out, or use stop_token_ids",
            )

    @staticmethod
    def _check_keys(prompt: Mapping[str, Any]) -> None:
        for key in prompt:
            if key not in PROMPT_KEYS:
                raise RequestError(
                    "Prompt has an unknown key",
                    on="prompt",
                    found=repr(key),
                    expected=" or ".join(PROMPT_KEYS),
                    fix=nearest(str(key), PROMPT_KEYS),
                )

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        words = [list(ids) for ids in params.bad_words_token_ids or ()]
        for word in params.bad_words or ():
            tokenizer = self._need_tokenizer("bad_words")
            # A word can start a text or follow a space, and its tokens differ.
            for text in dict.fromkeys((word, " " + word.lstrip())):
                ids = tokenizer.encode(text, add_special_tokens=False)
                if ids and ids not in words:
                    words.append(ids)
        for ids in words:
            self._check_tokens("bad_words", ids)
        size = sum(len(ids) + 1 for ids in words)
        if size > batch.MAX_BAD_WORDS or any(not ids for ids in words):
            raise RequestError(
                "Bad words do not fit",
                on="bad_words",
                found=f"{size} entries" if size > batch.MAX_BAD_WORDS else "an empty word",
                expected=f"non-empty words of at most {batch.MAX_BAD_WORDS} entries in all (tokens, and one a word)",
                fix="send fewer or shorter bad words",
            )
        return words

    def _check_tokens(self, name: str, ids: Sequence[Any]) -> None:
        size = self._limits.vocab_size
        # A prompt may be long: three passes of C tell that all are well, and only then nobody has to look at each.
        if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < size):
            return
        for value in ids:
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
                raise RequestError(
                    "Token id is outside the vocabulary",
                    on=name,
                    found=f"{value!r:.80}",
                    expected=f"integers in [0, {size})",
                    fix="send ids of this model's tokenizer",
                )

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(
                "There is no tokenizer",
                on=what,
                found="an engine without a tokenizer (skip_tokenizer_init, or the model brings none)",
                expected="token ids",
                fix="send token ids, or name a tokenizer with --tokenizer",
            )
        return self._tokenizer

    def _no_room(self, found: int, room: int) -> RequestError:
        return RequestError(
            "Context has too little room",
            on="min_tokens",
            found=str(found),
            expected=f"at most {room}, what {self._limits.max_model_len} tokens of context leave beside the prompt",
            fix="ask for fewer tokens, or shorten the prompt",
        )

    def _too_long(self, found: int, than: str = "fewer than") -> RequestError:
        return ContextLengthError(
            "Prompt is longer than the context",
            on="prompt",
            found=f"{found} tokens",
            expected=f"{than} {self._limits.max_model_len} tokens",
            fix="shorten the prompt, or raise --max-model-len if the model allows more",
        )
