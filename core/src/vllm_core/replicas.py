"""`Replicas`: several engines of one model behind one server, each with devices of its own (data parallelism).

A request goes where the longest part of its prompt went before, so that its prefix is in that engine's cache, unless that
engine has much more to do than the least busy one. An engine process that dies fails its own requests alone; while it starts
again, the others serve.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_core.async_llm import AsyncLLM
from vllm_core.engine.messages import EngineStats
from vllm_core.pulse import STEP_TIMEOUT_S

if TYPE_CHECKING:
    from vllm_core.loader.tokenizer import Tokenizer
    from vllm_core.models.labels import Labels
    from vllm_core.outputs import ClassificationRequestOutput, EmbeddingRequestOutput, RequestOutput
    from vllm_core.sampling_params import PoolingParams, SamplingParams

PIECE = 256
"""Tokens, or four times as many characters, of a piece of a prompt: prefixes are compared in whole pieces."""

MAX_PIECES = 1 << 16
"""Pieces remembered over all prompts; the oldest go first."""

MOST_OF_ONE = 64
"""Pieces of one prompt that are looked at: what follows hardly decides."""

SLACK = 4
"""Requests by which the engine with the prefix may be busier than the least busy one, and half of what that one has."""


class Routes:
    """Which engine a prompt goes to. Counts what each has to do."""

    def __init__(self, count: int) -> None:
        self.running = [0] * count
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    def choose(self, prompt: str | Sequence[int], salt: str, usable: Sequence[int]) -> int:
        """The index of an engine among ``usable``, which is not empty; remembers that the prompt goes there."""
        least = min(usable, key=lambda index: self.running[index])
        chosen, pieces = least, list(_pieces(prompt, salt))
        for piece in reversed(pieces):
            found = self._seen.get(piece)
            if found in usable:
                assert found is not None, "None is no engine"
                if self.running[found] <= self.running[least] * 3 // 2 + SLACK:
                    chosen = found
                break
        for piece in pieces:
            self._seen[piece] = chosen
            self._seen.move_to_end(piece)
        while len(self._seen) > MAX_PIECES:
            self._seen.popitem(last=False)
        return chosen

    @contextmanager
    def counted(self, index: int) -> Iterator[None]:
        """A request that the engine has while the block runs."""
        self.running[index] += 1
        try:
            yield
        finally:
            self.running[index] -= 1


def _pieces(prompt: str | Sequence[int], salt: str) -> Iterator[bytes]:
    """A digest of each prefix of whole pieces, the shortest first."""
    step = 4 * PIECE if isinstance(prompt, str) else PIECE
    digest = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16)
    for begin in range(0, min(len(prompt), MOST_OF_ONE * step) - step + 1, step):
        piece = prompt[begin : begin + step]
        digest.update(piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else repr(list(piece)).encode())
        yield digest.digest()


class Replicas:
    """`data_parallel_size` engines that serve as one. All methods belong to one event loop."""

    def __init__(self, *, step_timeout_s: float = STEP_TIMEOUT_S, **options: Any) -> None:
        self._options = options
        self._step_timeout_s = step_timeout_s
        self._engines: list[AsyncLLM] = []
        self._routes = Routes(0)

    async def start(self) -> None:
        """Choose devices and start all engines at once. Raises VLLMCoreError, and stops those that had started."""
        from vllm_core.replica_devices import replica_options

        parts = await asyncio.to_thread(replica_options, self._options)
        self._engines = [AsyncLLM(step_timeout_s=self._step_timeout_s, **part) for part in parts]
        self._routes = Routes(len(self._engines))
        results = await asyncio.gather(*(engine.start() for engine in self._engines), return_exceptions=True)
        failed = [result for result in results if isinstance(result, BaseException)]
        if failed:
            self.shutdown()
            raise failed[0]

    def shutdown(self) -> None:
        """Stop all engines."""
        for engine in self._engines:
            engine.shutdown()

    @property
    def engines(self) -> tuple[AsyncLLM, ...]:
        """The engines, in the order of their devices."""
        return tuple(self._engines)

    # -- facts: those of the first engine, which all share, or sums

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer."""
        return self._engines[0].tokenizer

    @property
    def max_model_len(self) -> int:
        """The longest sequence that every engine takes."""
        return min(engine.max_model_len for engine in self._engines)

    @property
    def error(self) -> Exception | None:
        """Why no engine is left; None while one is."""
        errors = [engine.error for engine in self._engines]
        return errors[0] if all(errors) else None

    @property
    def config(self) -> Any:
        """The configuration of the first engine; the others differ in their devices."""
        return self._engines[0].config

    @property
    def runner(self) -> str:
        """``generate`` or ``pooling``."""
        return self._engines[0].runner

    @property
    def labels(self) -> Labels | None:
        """The classes of a model that classifies."""
        return self._engines[0].labels

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The model's own sampling defaults."""
        return self._engines[0].generation_config

    @property
    def model_names(self) -> list[str]:
        """Names that the model answers to."""
        return self._engines[0].model_names

    @property
    def platform_info(self) -> dict[str, str]:
        """Labels of the metric ``vllm:platform_info``."""
        return {**self._engines[0].platform_info, "replicas": str(len(self._engines))}

    @property
    def plan_text(self) -> str:
        """The Plan of the first engine, for a person."""
        return self._engines[0].plan_text

    @property
    def plan_json(self) -> bytes:
        """The Plan of the first engine as JSON."""
        return self._engines[0].plan_json

    @property
    def num_restarts(self) -> int:
        """Times that an engine process was started again."""
        return sum(engine.num_restarts for engine in self._engines)

    @property
    def num_demotions(self) -> int:
        """Providers that failed, and that another one replaced."""
        return sum(engine.num_demotions for engine in self._engines)

    @property
    def is_alive(self) -> bool:
        """Whether an engine can serve now."""
        return any(engine.is_alive for engine in self._engines)

    # -- requests

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams, request_id: str, *, cache_salt: str = "", **details: Any
    ) -> AsyncIterator[RequestOutput]:
        """As `AsyncLLM.generate`, by the engine that suits the prompt."""
        index = self._choose(prompt, cache_salt)
        with self._routes.counted(index):
            stream = self._engines[index].generate(prompt, params, request_id, cache_salt=cache_salt, **details)
            try:
                async for output in stream:
                    yield output
            finally:
                await stream.aclose()  # type: ignore[attr-defined]  # it is a generator, declared as an iterator

    async def embed(
        self, prompt: str | Sequence[int], params: PoolingParams, request_id: str, **details: Any
    ) -> EmbeddingRequestOutput:
        """As `AsyncLLM.embed`."""
        index = self._choose(prompt, "")
        with self._routes.counted(index):
            return await self._engines[index].embed(prompt, params, request_id, **details)

    async def classify(self, prompt: str | Sequence[int], request_id: str, **details: Any) -> ClassificationRequestOutput:
        """As `AsyncLLM.classify`."""
        index = self._choose(prompt, "")
        with self._routes.counted(index):
            return await self._engines[index].classify(prompt, request_id, **details)

    async def stats(self) -> EngineStats:
        """Sums over the engines that serve; `kv_usage` is their mean. Raises EngineDeadError where none does."""
        asked = [engine for engine in self._engines if engine.is_alive] or self._engines[:1]
        results = await asyncio.gather(*(engine.stats() for engine in asked), return_exceptions=True)
        found = [result for result in results if isinstance(result, EngineStats)]
        if not found:
            raise next(result for result in results if isinstance(result, BaseException))
        return add_stats(found)

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False while some are in use."""
        return all(await asyncio.gather(*(engine.reset_prefix_cache() for engine in self._engines if engine.is_alive)))

    async def sleep(self, level: int = 1) -> None:
        """As `AsyncLLM.sleep`, on every engine."""
        await asyncio.gather(*(engine.sleep(level) for engine in self._engines))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """As `AsyncLLM.wake_up`, on every engine."""
        await asyncio.gather(*(engine.wake_up(tags) for engine in self._engines))

    async def is_sleeping(self) -> bool:
        """Whether any engine is asleep."""
        return any(await asyncio.gather(*(engine.is_sleeping() for engine in self._engines)))

    def _choose(self, prompt: str | Sequence[int], salt: str) -> int:
        usable = [index for index, engine in enumerate(self._engines) if engine.is_alive]
        if not usable:
            # The first engine's own refusal says best why.
            usable = [0]
        return self._routes.choose(prompt, salt, usable)


def add_stats(parts: Sequence[EngineStats]) -> EngineStats:
    """Sums of counters and gauges; the mean of what is a fraction."""
    total: dict[str, Any] = {}
    for name in EngineStats.__struct_fields__:
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], dict):
            keys = {key for value in values for key in value}
            total[name] = {key: sum(value.get(key, 0) for value in values) for key in sorted(keys)}
        else:
            total[name] = sum(values)
    total["kv_usage"] /= len(parts)
    return EngineStats(**total)
