"""Requests as pydantic models. A field is used, or refused by name: none is ignored.

Fields that hold long lists (`prompt`, `input`, `messages`, `logit_bias`) are read by functions that stop at the first wrong
entry; pydantic would collect an error for each.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_core.api.batch import MAX_BIAS
from vllm_core.elsewhere import instead
from vllm_core.errors import RequestError, nearest
from vllm_core.sampling_params import MAX_LOGPROBS, SamplingParams

MAX_SEQUENCES = 2048
"""Most prompts times `n` in one request."""

NOTHING: tuple[Any, ...] = (None,)
"""The values of a field that this server does not have which ask for nothing; `null` always does."""

_OLD_TOOLS: dict[str, tuple[Any, ...]] = {"functions": (None, []), "function_call": (None, "none", "auto")}
_ACCOUNT: dict[str, tuple[Any, ...]] = {
    "store": (None, False),
    "metadata": (None, {}),
    "service_tier": (None, "auto", "default"),
}
_HOSTED: dict[str, tuple[Any, ...]] = {
    "moderation": NOTHING,
    "prompt_cache_options": NOTHING,
    "prompt_cache_retention": (None, "in_memory"),
}


class Body(BaseModel):
    """Base of all requests."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    without: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that other servers have and this one does not, with the values that are accepted because they ask nothing."""

    model: str | None = None
    user: str | None = None


Schema = TypeVar("Schema", bound=Body)


class StreamOptions(BaseModel):
    """How a stream ends."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: bool = False


def described(*types: str, **more: Any) -> Any:
    """A field that is read by hand, with what /openapi.json says of it."""
    return Field(json_schema_extra={"type": list(types), **more})


Stops = Annotated[list[str], Field(max_length=64, fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]


class Scheduled(Body):
    """What all requests share that the engine schedules as generations."""

    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, max_length=256)


class Generation(Scheduled):
    """What completions and chat share: `SamplingParams` under its own names, scheduling, and the stream."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Stops | None = None
    stop_token_ids: TokenIds | None = None
    bad_words: Stops | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, Any] | None = Field(None, max_length=MAX_BIAS)
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    @property
    def streamed_usage(self) -> Literal["none", "last", "every"]:
        """Which chunks of a stream tell usage: a last one of its own, or all. Raises RequestError where there is no stream."""
        if self.stream_options is None:
            return "none"
        if not self.stream:
            raise refused(
                "stream_options", "stream_options without stream", "stream: true", "send stream: true, or leave it out"
            )
        if not self.stream_options.include_usage:
            return "none"
        return "every" if self.stream_options.continuous_usage_stats else "last"

    def sampling(self, defaults: SamplingParams, **more: Any) -> SamplingParams:
        """``defaults`` with what was sent. Raises RequestError for a wrong value."""
        if self.stream and self.prompt_logprobs is not None:
            raise refused("prompt_logprobs", "prompt_logprobs with stream", "one of them", "leave stream out")
        sent = {name: getattr(self, name) for name in self.model_fields_set if name in SamplingParams.__struct_fields__}
        sent["structured_outputs"] = None
        changes = {name: value for name, value in {**sent, **more}.items() if value is not None}
        if "logit_bias" in changes:
            changes["logit_bias"] = {_token_key(key): bias for key, bias in changes["logit_bias"].items()}
        return defaults.replace(**changes)


class CompletionRequest(Generation):
    """``POST /v1/completions``."""

    without = {
        **_ACCOUNT,
        "suffix": (None, ""),
        "best_of": (None, 1),
        "prompt_embeds": NOTHING,
        "use_beam_search": (None, False),
    }

    prompt: Annotated[Any, described("string", "array", items={"type": ["string", "integer", "array"]})]
    logprobs: int | None = None
    echo: bool | None = None


class ChatRequest(Generation):
    """``POST /v1/chat/completions``."""

    without = {
        **_OLD_TOOLS,
        **_ACCOUNT,
        **_HOSTED,
        "audio": NOTHING,
        "modalities": (None, ["text"]),
        "prediction": NOTHING,
        "verbosity": (None, "medium"),
        "web_search_options": NOTHING,
        "best_of": (None, 1),
        "use_beam_search": (None, False),
        "echo": (None, False),
    }

    messages: Annotated[Any, described("array", items={"type": "object"})]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = Field(None, max_length=1 << 20)
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    include_reasoning: bool | None = None
    tools: Annotated[Any, described("array", "null", items={"type": "object"})] = None
    tool_choice: Annotated[Any, described("string", "object", "null")] = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @property
    def limit(self) -> int | None:
        """The newer name of `max_tokens`, or the older. Raises RequestError where they differ."""
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            found = f"max_tokens {self.max_tokens}, max_completion_tokens {self.max_completion_tokens}"
            raise refused("max_tokens", found, "one of them, or equal values", "send max_completion_tokens alone")
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class ResponsesRequest(Scheduled):
    """``POST /v1/responses``. Nothing is stored: what went before comes with each request."""

    without = {
        **_HOSTED,
        "background": (None, False),
        "context_management": (None, []),
        "conversation": NOTHING,
        "include": (None, []),
        "max_tool_calls": NOTHING,
        "previous_response_id": NOTHING,
        "prompt": NOTHING,
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "stream_options": (None, {}, {"include_obfuscation": False}),
        "top_logprobs": (None, 0),
        "truncation": (None, "disabled"),
    }

    input: Annotated[Any, described("string", "array", items={"type": "object"})]
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any] | None = None
    safety_identifier: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    text: dict[str, Any] | None = None
    tool_choice: Annotated[Any, described("string", "object", "null")] = None
    tools: Annotated[Any, described("array", "null", items={"type": "object"})] = None
    top_p: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesMetadata(BaseModel):
    """Who asks: what `user` is elsewhere, which clients of Anthropic's API send with every request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    user_id: str | None = None


class MessagesRequest(Scheduled):
    """``POST /v1/messages``, as Anthropic's API has it."""

    without = {
        "service_tier": (None, "auto", "standard_only"),
        "container": NOTHING,
        "mcp_servers": (None, []),
    }

    messages: Annotated[Any, described("array", items={"type": "object"})]
    max_tokens: int
    cache_control: dict[str, Any] | None = None
    metadata: MessagesMetadata | None = None
    stop_sequences: Stops | None = None
    stream: bool | None = None
    system: Annotated[Any, described("string", "array", "null")] = None
    temperature: float | None = None
    thinking: dict[str, Any] | None = None
    tool_choice: dict[str, Any] | None = None
    tools: Annotated[Any, described("array", "null", items={"type": "object"})] = None
    top_k: int | None = None
    top_p: float | None = None


class CountRequest(Body):
    """``POST /v1/messages/count_tokens``."""

    messages: Annotated[Any, described("array", items={"type": "object"})]
    system: Annotated[Any, described("string", "array", "null")] = None
    thinking: dict[str, Any] | None = None
    tool_choice: dict[str, Any] | None = None
    tools: Annotated[Any, described("array", "null", items={"type": "object"})] = None


class EmbeddingRequest(Body):
    """``POST /v1/embeddings``."""

    without = {"priority": (None, 0), "truncate_prompt_tokens": NOTHING, "input_type": NOTHING}

    input: Annotated[Any, described("string", "array", items={"type": ["string", "integer", "array"]})]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class PoolingRequest(EmbeddingRequest):
    """``POST /pooling``."""

    without = {**EmbeddingRequest.without, "task": (None, "embed"), "normalize": (None, True)}


class ScoreRequest(Body):
    """``POST /score``: pairs of texts, or one text with each of several."""

    without = {"priority": (None, 0), "truncate_prompt_tokens": NOTHING}

    text_1: Annotated[Any, described("string", "array")]
    text_2: Annotated[Any, described("string", "array")]


class RerankRequest(Body):
    """``POST /rerank``."""

    without = {"priority": (None, 0), "truncate_prompt_tokens": NOTHING, "return_documents": (None, True)}

    query: str
    documents: Annotated[Any, described("array", items={"type": ["string", "object"]})]
    top_n: int | None = Field(None, ge=0)


class ClassifyRequest(Body):
    """``POST /classify``."""

    without = {"priority": (None, 0), "truncate_prompt_tokens": NOTHING}

    input: Annotated[Any, described("string", "array", items={"type": ["string", "integer", "array"]})]


class TokenizeRequest(Body):
    """``POST /tokenize``: a prompt, or a chat as its template renders it."""

    prompt: str | None = None
    messages: Annotated[Any, described("array", "null", items={"type": "object"})] = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = Field(None, max_length=1 << 20)
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[Any, described("array", "null", items={"type": "object"})] = None


class DetokenizeRequest(Body):
    """``POST /detokenize``."""

    tokens: TokenIds = Field(max_length=1 << 20)


def openapi(schema: type[Body]) -> dict[str, Any]:
    """What /openapi.json says of an endpoint, whose body is read by hand to limit it and to name what is wrong."""
    document = schema.model_json_schema()
    body = _inlined(document, document.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}}


def _inlined(value: Any, definitions: Mapping[str, Any]) -> Any:
    """A schema without references: in an OpenAPI document they would be looked up elsewhere."""
    if isinstance(value, dict):
        if "$ref" in value:
            return _inlined(definitions[value["$ref"].rpartition("/")[2]], definitions)
        return {name: _inlined(inner, definitions) for name, inner in value.items()}
    return [_inlined(inner, definitions) for inner in value] if isinstance(value, list) else value


def refused(name: str, found: str, expected: str, fix: str) -> RequestError:
    """The error for a field's value."""
    return RequestError("Request cannot be served", on=name, found=found, expected=expected, fix=fix)


def parse(schema: type[Schema], data: object) -> Schema:
    """Check a decoded body. Raises RequestError for the first thing that is wrong with it."""
    if not isinstance(data, dict):
        raise refused("body", type(data).__name__, "a JSON object", "send an object")
    fields = dict(data)
    for name in data:
        if name in schema.without:
            if fields.pop(name) not in schema.without[name]:
                raise refused(name, short(data[name]), "a field that this server has", _without(name))
        elif name not in schema.model_fields:
            fix = _without(name) if instead("fields", name) else nearest(name[:64], schema.model_fields)
            raise RequestError("Unknown field", on=name[:64], found="no such field", expected="a known field", fix=fix)
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        # A field of several types has an error for each: the last one, a list's, says most.
        first = [one for one in errors if one["loc"][:1] == errors[0]["loc"][:1]][-1]
        name = str(first["loc"][0]) if first["loc"] else "body"
        if first["type"] == "missing":
            raise refused(name, "nothing", "a value", f"send {name}") from None
        raise refused(name, short(first["input"]), first["msg"].removeprefix("Input should be "), f"change {name}") from None


def _without(name: str) -> str:
    """How to do without a field that others have."""
    found = instead("fields", name)
    return f"leave {name!r} out" if found is None else f"leave {name!r} out; {found}"


def prompts(value: object, name: str) -> list[str | list[int]]:
    """Text, texts, token ids, or lists of token ids, as a list of prompts. Ids are checked by the engine."""
    expected = "a string, a list of strings, a list of token ids, or a list of such lists"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise refused(name, short(value), expected, f"send {name} in one of these forms")
    kind = type(value[0])
    if kind not in (str, int, list):
        raise refused(f"{name}[0]", short(value[0]), expected, f"send {name} in one of these forms")
    if len(set(map(type, value))) > 1:
        at = next(at for at, item in enumerate(value) if type(item) is not kind)
        raise refused(f"{name}[{at}]", short(value[at]), f"the type of {name}[0], {kind.__name__}", "send one type")
    if kind is int:
        return [value]
    if len(value) > MAX_SEQUENCES:
        raise refused(name, f"{len(value)} entries", f"at most {MAX_SEQUENCES}", "send several requests")
    return value


class _Short(reprlib.Repr):
    """reprlib's, which would sort all keys of an object to show the first."""

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """The first entries."""
        if level <= 0:
            return "{...}"
        shown = [f"{self.repr1(key, level - 1)}: {self.repr1(x[key], level - 1)}" for key in islice(x, self.maxdict)]
        return f"{{{', '.join(shown + ['...'] * (len(x) > self.maxdict))}}}"


_short = _Short()


def short(value: object) -> str:
    """A bounded repr of what a client sent."""
    return _short.repr(value)


def _token_key(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 12):
        raise refused("logit_bias", short(key), "token ids as keys", "send ids of this model's tokenizer")
    return int(key)
