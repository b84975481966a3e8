"""`LLM`: the engine in this process, for offline batches."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from numbers import Integral
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from vllm_core.aside import begun
from vllm_core.chat import default_sampling, render
from vllm_core.engine.messages import EngineStats
from vllm_core.engine.postprocess import Postprocessor, cosine
from vllm_core.engine.preprocess import Limits, Prepared, Preprocessor
from vllm_core.errors import ConfigError, RequestError
from vllm_core.interrupts import Deferred
from vllm_core.models import labels
from vllm_core.models.labels import Labels, check_use, classified
from vllm_core.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from vllm_core.progress import Progress
from vllm_core.sampling_params import PoolingParams, SamplingParams

if TYPE_CHECKING:
    from vllm_core.config import EngineConfig
    from vllm_core.engine.core import EngineCore
    from vllm_core.engine.transfer import Form, Route, Side, Transfer
    from vllm_core.loader.source import ModelSource
    from vllm_core.loader.tokenizer import Tokenizer
    from vllm_core.registry.plan import Plan

Prompt = str | Sequence[int] | Mapping[str, Any]
Params = TypeVar("Params", SamplingParams, PoolingParams)
Value = TypeVar("Value")


class LLM:
    """An engine in this process.

    ``LLM("folder-or-name", max_model_len=2048)``: options are those of the command line, with ``_`` for ``-``; an unknown one
    raises UnknownOptionError with the nearest name. Construction plans, loads and warms up; it raises VLLMCoreError.
    One thread uses an LLM at a time.
    """

    def __init__(self, model: str, **options: Any) -> None:
        from vllm_core import launch

        tokenizers: list[Future[Tokenizer | None]] = []  # large vocabularies take seconds, and so do probes and weights
        design = launch.blueprint(
            {"model": model, **options},
            opened=lambda config, source: tokenizers.append(begun(partial(load_tokenizer, config, source), "tokenizer")),
        )
        self._engine = launch.assemble(design)
        self._tokenizer = tokenizers[0].result()
        self._core = self._engine.core
        self._limits = limits_of(design, self._engine.budget.max_model_len)
        self._pre = Preprocessor(self._limits, self._tokenizer)
        self._post = Postprocessor(self._tokenizer)
        self._ids = itertools.count()
        self._closed = False
        self._side: Side | None = None

    @property
    def plan(self) -> Plan:
        """What was chosen, why, and what was rejected."""
        return self._engine.blueprint.plan

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens, prompt and output."""
        return self._limits.max_model_len

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds by stage of the start."""
        return self._engine.timings

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ConfigError where the engine has none."""
        if self._tokenizer is None:
            raise ConfigError(
                "There is no tokenizer",
                on="LLM.get_tokenizer",
                found="skip_tokenizer_init, or a model without one",
                expected="a tokenizer",
                fix="name one with tokenizer=...",
            )
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation config asks for."""
        return default_sampling(self._engine.blueprint.source.generation_config)

    def get_metrics(self) -> EngineStats:
        """Counters since start and gauges now."""
        return self._core.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks."""
        self._check_open()
        return self._core.reset_prefix_cache()

    def send_kv(
        self,
        prompt: Prompt,
        to: LLM,
        *,
        cache_salt: str = "",
        form: Form | Literal["auto"] = "auto",
        route: Route | Literal["auto"] = "auto",
    ) -> Transfer:
        """Copy what this engine has cached of a prompt's beginning to another engine of the model, in this process.

        That one then continues the prompt without computing this part. Whole blocks of the prefix cache are copied: raw where
        both keep them in one form, else, or with ``form="canonical"``, whatever the other's block size, order and dtype are.
        They go from device to device; ``route="host"``, which is also the way where devices do not reach each other, takes
        them through pinned memory. Both engines are between two calls. Raises RequestError where one is not, UnsupportedError
        where they cannot exchange KV in this way, MemoryBudgetError where the other has too few free blocks.
        """
        from vllm_core.engine.transfer import send

        self._require("generate")
        to._require("generate")
        params = SamplingParams(temperature=0.0, max_tokens=1)
        request = self._pre.generate("kv", prompt, params, arrival_time=0.0, cache_salt=cache_salt)
        return send(
            self._kv_side(), to._kv_side(), request.prompt_token_ids, salt=request.children[0].salt, form=form, route=route
        )

    def _kv_side(self) -> Side:
        if self._side is None:
            from vllm_core.engine.memory import GroupMemory
            from vllm_core.engine.transfer import Side

            design, model = self._engine.blueprint, self._engine.blueprint.config.model
            drawn = (model.seed, model.dummy_bound) if model.load_format == "dummy" else None
            self._side = Side(
                name=f"{design.plan.platform}:{design.plan.device.id}",
                model=(str(design.source.path), model.revision, repr(sorted(model.hf_overrides.items())), drawn),
                core=self._core,
                ops=self._core.ops,
                device=self._engine.device,
                groups=[GroupMemory(group.spec, group.layout) for group in design.plan.kv_groups],
            )
        return self._side

    def sleep(self) -> None:
        """Weights to the host, KV cache dropped, until `wake_up`.

        Raises UnsupportedError where ``sleep`` is not claimed, RequestError while a stream is open: what the last steps
        made of it would have nowhere to go.
        """
        self._check_open()
        _check_free(self._post, on="sleep")
        self._core.sleep()

    def wake_up(self) -> None:
        """Take the device's memory again. Raises MemoryBudgetError where somebody else has it."""
        self._check_open()
        self._core.wake_up()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Generate for each prompt, in their order.

        A prompt is text, token ids, or a mapping with ``prompt`` or ``prompt_token_ids``. Raises RequestError for the first
        wrong one, before anything runs.
        """
        self._require("generate")
        items = _as_list(prompts)
        params = _match(sampling_params or self.get_default_sampling_params(), items, SamplingParams)
        priorities = self._priorities(priority, items)
        now = time.time()
        prepared = [
            self._pre.generate(self._next_id(), item, p, arrival_time=now, priority=rank, cache_salt=cache_salt)
            for item, p, rank in zip(items, params, priorities, strict=True)
        ]
        return cast("list[RequestOutput]", self._run(prepared, use_tqdm))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Sequence[Mapping[str, Any]]]", messages if several else [messages])
        ids = [
            self._chat_ids(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
            )
            for conversation in conversations
        ]
        return self.generate(cast("list[Prompt]", ids), sampling_params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Generate for one prompt and yield its output, cumulative, whenever tokens arrive. Closing the iterator aborts."""
        self._require("generate")
        params = _match(sampling_params or self.get_default_sampling_params(), [prompt], SamplingParams)[0]
        with self.open_batch([(prompt, params)], partial=True) as batch:
            while batch.has_work:
                with Deferred():
                    outputs = batch.advance()
                yield from cast("list[RequestOutput]", outputs)

    def open_batch(self, requests: Iterable[tuple[Prompt, SamplingParams]], *, partial: bool = False) -> Batch:
        """Submit requests and return the loop that `generate` runs, to be advanced step by step and closed.

        With ``partial`` outputs have their text while they grow; otherwise only their token ids.
        """
        self._require("generate")
        now = time.time()
        prepared = [self._pre.generate(self._next_id(), prompt, p, arrival_time=now) for prompt, p in requests]
        return Batch(self._core, self._post, prepared, partial=partial, enter=self._engine.device.make_current)

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """`stream` for a conversation."""
        return self.stream(self._chat_ids(messages), sampling_params)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """One vector per prompt, in their order."""
        self._require("pooling")
        check_use(self._labels, wants_classes=False)
        return self._pool(prompts, pooling_params, use_tqdm)

    def score(
        self, data_1: Prompt | Sequence[Prompt], data_2: Prompt | Sequence[Prompt], *, use_tqdm: bool = True
    ) -> list[ScoringRequestOutput]:
        """How alike each prompt of ``data_1`` and its one of ``data_2`` are; a single one is compared with each of them."""
        left, right = _as_list(data_1), _as_list(data_2)
        if len(left) != 1:
            _each(left, right, "data_1")
        found = self.embed([*left, *right], use_tqdm=use_tqdm)
        one, others = found[: len(left)], found[len(left) :]
        return [
            ScoringRequestOutput(
                second.request_id,
                first.prompt_token_ids + second.prompt_token_ids,
                ScoringOutput(cosine(first.outputs.embedding, second.outputs.embedding)),
                error=first.error or second.error,
            )
            for first, second in zip(one if len(one) > 1 else one * len(others), others, strict=True)
        ]

    def classify(self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True) -> list[ClassificationRequestOutput]:
        """The probabilities of the model's classes for each prompt, in their order."""
        self._require("pooling")
        found = self._labels
        check_use(found, wants_classes=True)
        assert found is not None, "it has been checked"
        return [classified(output, found) for output in self._pool(prompts, None, use_tqdm)]

    @property
    def _labels(self) -> Labels | None:
        design = self._engine.blueprint
        return labels.read(design.source.config) if design.spec.num_labels else None

    def _pool(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None,
        use_tqdm: bool,
    ) -> list[EmbeddingRequestOutput]:
        items = _as_list(prompts)
        params = _match(pooling_params or PoolingParams(), items, PoolingParams)
        now = time.time()
        prepared = [self._pre.pool(self._next_id(), item, p, arrival_time=now) for item, p in zip(items, params, strict=True)]
        return cast("list[EmbeddingRequestOutput]", self._run(prepared, use_tqdm))

    def _priorities(self, priority: Sequence[int] | None, items: Sequence[object]) -> list[int]:
        found = [0] * len(items) if priority is None else _each(priority, items, "priority")
        wrong = [rank for rank in found if type(rank) is not int]
        unused = [rank for rank in found if rank] if self._engine.blueprint.config.scheduler.scheduling_policy == "fcfs" else []
        if wrong or unused:
            raise RequestError(
                "Priority cannot be used",
                on="priority",
                found=f"{(wrong or unused)[0]!r:.40}" + (" with scheduling_policy='fcfs'" if unused and not wrong else ""),
                expected="integers" if wrong else "an engine that orders by priority",
                fix="the lowest goes first" if wrong else "LLM(..., scheduling_policy='priority'), or leave it out",
            )
        return found

    def _chat_ids(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        text = render(self._tokenizer, messages, **options)
        return self.get_tokenizer().encode(text, add_special_tokens=False, max_tokens=self.max_model_len)

    def _next_id(self) -> str:
        return str(next(self._ids))

    def _run(self, prepared: list[Prepared], use_tqdm: bool) -> list[RequestOutput | EmbeddingRequestOutput]:
        done: dict[str, RequestOutput | EmbeddingRequestOutput] = {}
        with (
            Batch(self._core, self._post, prepared, enter=self._engine.device.make_current) as batch,
            Progress(len(prepared), enabled=use_tqdm) as progress,
            Deferred() as interrupts,
        ):
            while batch.has_work:
                for output in batch.advance():
                    progress.update(output)
                    if output.finished:
                        done[output.request_id] = output
                interrupts.check()
        return [done[request.request_id] for request in prepared]

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError(
                "LLM is shut down",
                on="LLM",
                found="a call after shutdown()",
                expected="calls inside the with block, or before shutdown()",
                fix="make a new LLM",
            )

    def _require(self, runner: str) -> None:
        self._check_open()
        on = f"LLM.{'embed' if runner == 'pooling' else 'generate'}"
        if self._core.is_asleep:
            raise RequestError("LLM is asleep", on=on, found="no memory since sleep()", expected="memory", fix="call wake_up()")
        found = self._engine.blueprint.runner
        if found != runner:
            raise RequestError(
                "Model is used for something else",
                on=on,
                found=f"an engine with runner {found!r}",
                expected=f"runner {runner!r}",
                fix=f"start it with runner={runner!r}" if runner == "pooling" else "use embed()",
            )

    def shutdown(self) -> None:
        """Give the device's memory back; the LLM cannot be used after that."""
        if self._closed:
            return
        self._closed = True
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()


class Batch:
    """Requests of one call and the loop that runs them; closing ends those that are not finished."""

    def __init__(
        self,
        core: EngineCore,
        post: Postprocessor,
        prepared: list[Prepared],
        *,
        partial: bool = False,
        enter: Callable[[], None] = lambda: None,
    ) -> None:
        self._core = core
        self._enter = enter
        self._post = post
        _check_free(post, on="generate, embed or stream")
        self._prepared = prepared
        try:
            for request in prepared:
                post.add(request, partial=partial)
                for child in request.children:
                    core.add(child)
        except RequestError:
            self.close()
            raise

    @property
    def has_work(self) -> bool:
        """Whether a request is not finished."""
        return self._core.has_work

    def advance(self) -> list[RequestOutput | EmbeddingRequestOutput]:
        """Run one step and return the outputs that it touched."""
        self._enter()  # another LLM of this thread may have another device
        processed = self._post.process(self._core.step())
        if processed.abort:
            self._core.abort(processed.abort)
        return processed.outputs

    def close(self) -> None:
        """End what is left: an interrupt or a refused prompt must not leave requests for the next call."""
        left = [child for request in self._prepared for child in self._post.drop(request.request_id)]
        if left:
            self._core.abort(left)
            self._core.drain()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _check_free(post: Postprocessor, *, on: str) -> None:
    """Raise RequestError while requests of another call run: their outputs would come to this one, and be lost to it."""
    if len(post):
        raise RequestError(
            "LLM is in use",
            on=on,
            found=f"{len(post)} unfinished requests of another call",
            expected="one call at a time",
            fix="finish or close the other stream first; AsyncLLM serves several callers at once",
        )


def load_tokenizer(config: EngineConfig, source: ModelSource) -> Tokenizer | None:
    """The model's tokenizer, or None where it is skipped or absent."""
    return None if config.model.skip_tokenizer_init or not source.has_tokenizer else source.tokenizer()


def limits_of(design: Any, max_model_len: int) -> Limits:
    """What requests to this engine are checked against."""
    return Limits(max_model_len, design.spec.vocab_size, design.spec.hidden_size, design.stop_token_ids)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several? A list of integers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    items = list(prompts) if isinstance(prompts, Iterable) and not isinstance(prompts, bytes) else [prompts]
    if items and all(isinstance(item, Integral) for item in items) and isinstance(prompts, Iterable):
        return [[int(item) for item in cast("list[int]", items)]]
    for item in items:
        if isinstance(item, (str, Mapping)) or (isinstance(item, Iterable) and not isinstance(item, bytes)):
            continue
        raise RequestError(
            "Prompt has a wrong type",
            on="prompts",
            found=f"{type(item).__name__} {item!r:.40}",
            expected="text, token ids, or a mapping with prompt or prompt_token_ids",
            fix='generate(["text"]) or generate([[1, 2, 3]])',
        )
    return cast("list[Prompt]", items)


def _match(params: Params | Sequence[Params], items: Sequence[object], kind: type[Params]) -> list[Params]:
    if isinstance(params, kind):
        return [params] * len(items)
    name = "sampling_params" if kind is SamplingParams else "pooling_params"
    if not isinstance(params, Sequence) or not all(isinstance(one, kind) for one in params):
        raise RequestError(
            "Parameters have a wrong type",
            on=name,
            found=f"{type(params).__name__} {params!r:.40}",
            expected=f"{kind.__name__}, one or a list",
            fix="SamplingParams(temperature=0.7, max_tokens=32)" if kind is SamplingParams else "PoolingParams(dimensions=64)",
        )
    return _each(params, items, name)


def _each(values: Sequence[Value], items: Sequence[object], name: str) -> list[Value]:
    """One value for each prompt. Raises RequestError."""
    found = list(values)
    if len(found) != len(items):
        raise RequestError(
            "Prompts and values differ in number",
            on=name,
            found=f"{len(found)} for {len(items)} prompts",
            expected="one each",
            fix=f"give {len(items)}",
        )
    return found
