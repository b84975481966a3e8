"""`bench serve`: load on a running server, and how long its answers take.

Requests arrive as a Poisson process, or as a Gamma process of another burstiness, at a rate; each is a stream. The result file
has the field names of vLLM's `bench serve`, so that tools which read one read the other. Times are those of the client.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_core.errors import ConfigError

if TYPE_CHECKING:
    import httpx

METRICS = ("ttft", "tpot", "itl", "e2el")
"""Time to the first token, per token after it, between two pieces of a stream, and of the whole request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to send. Lengths in tokens; the rate in requests per second; a burstiness of 1 is a Poisson process."""

    base_url: str
    endpoint: str = "/v1/completions"
    model: str | None = None
    api_key: str | None = None
    num_prompts: int = 100
    request_rate: float = float("inf")
    burstiness: float = 1.0
    max_concurrency: int | None = None
    input_len: int = 128
    output_len: int = 64
    range_ratio: float = 0.0
    prefix_len: int = 0
    vocabulary: int = 250
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0
    percentiles: tuple[float, ...] = (99.0,)
    goodput: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Answer:
    """One request as its client saw it, in seconds; `itl` are the times between its pieces."""

    prompt_len: int
    start: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)
    output_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def requests(load: Load) -> list[tuple[list[int], int]]:
    """Prompts of token ids below ``vocabulary`` and the tokens to ask for; the same for the same seed."""
    draw = random.Random(load.seed)
    prefix = [draw.randrange(load.vocabulary) for _ in range(load.prefix_len)]

    def length(mean: int) -> int:
        return draw.randint(max(1, round(mean * (1 - load.range_ratio))), max(1, round(mean * (1 + load.range_ratio))))

    return [
        (prefix + [draw.randrange(load.vocabulary) for _ in range(length(load.input_len))], length(load.output_len))
        for _ in range(load.num_prompts)
    ]


async def arrivals(load: Load) -> AsyncIterator[int]:
    """Yield the number of each request when it is due; one that is late does not delay those behind it."""
    draw, due = random.Random(load.seed + 1), time.perf_counter()
    for index in range(load.num_prompts):
        if load.request_rate != float("inf"):
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            due += draw.gammavariate(load.burstiness, 1 / (load.request_rate * load.burstiness))
        yield index


async def run(load: Load, watch: Any = None) -> dict[str, Any]:
    """Send the load and return the result; ``watch(answers)`` is called as answers come. Raises ConfigError."""
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    gate = nullcontext() if load.max_concurrency is None else asyncio.Semaphore(load.max_concurrency)
    todo = requests(load)
    answers: list[Answer] = []
    async with httpx.AsyncClient(
        base_url=load.base_url, limits=limits, timeout=None, headers=headers, trust_env=False
    ) as client:
        model = load.model or await _model(client, load)
        started = time.perf_counter()

        async def one(index: int) -> None:
            async with gate:
                prompt, count = todo[index]
                answers.append(await ask(client, load, model, prompt, count))
                if watch is not None:
                    watch(answers)

        tasks = [asyncio.create_task(one(index)) async for index in arrivals(load)]
        await asyncio.gather(*tasks)
        duration = time.perf_counter() - started
    return result(load, model, answers, duration)


async def _model(client: httpx.AsyncClient, load: Load) -> str:
    import httpx

    try:
        answer = await client.get("/v1/models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError) as error:
        raise ConfigError(
            "Server does not answer",
            on=load.base_url,
            found=str(error),
            expected="a server with OpenAI's API",
            fix="start one with `vllm-core serve`, or name another with --base-url",
        ) from error


async def ask(client: httpx.AsyncClient, load: Load, model: str, prompt: list[int], count: int) -> Answer:
    """Send one request and read its stream. What fails is noted in the answer."""
    import httpx

    body: dict[str, Any] = {
        "model": model,
        "max_tokens": count,
        "temperature": load.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": load.ignore_eos,
    }
    if "chat" in load.endpoint:
        body["messages"] = [{"role": "user", "content": " ".join(map(str, prompt))}]
    else:
        body["prompt"] = prompt
    answer = Answer(len(prompt), time.perf_counter())
    try:
        async with client.stream("POST", load.endpoint, json=body) as response:
            if response.status_code != 200:
                answer.error = f"HTTP {response.status_code}: {(await response.aread())[:300].decode(errors='replace')}"
            else:
                await _read(response, answer)
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def _read(response: httpx.Response, answer: Answer) -> None:
    rest, last, pieces, ended = b"", answer.start, 0, False
    async for data in response.aiter_bytes():
        now = time.perf_counter()
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            line = event.removeprefix(b"data: ")
            if line == b"[DONE]":
                ended = True
                continue
            chunk = json.loads(line)
            if "error" in chunk:
                answer.error = str(chunk["error"].get("message", ""))
                return
            text = _text(chunk)
            if text is not None:
                answer.text += text
                pieces += 1
                if pieces == 1:
                    answer.ttft = now - answer.start
                else:
                    answer.itl.append(now - last)
                last = now
            if chunk.get("usage"):
                answer.output_tokens = chunk["usage"]["completion_tokens"]
                answer.prompt_len = chunk["usage"]["prompt_tokens"]
    answer.latency = last - answer.start
    if not ended or not pieces:
        answer.error = "the stream ended early" if pieces else "no token came"


def _text(chunk: Mapping[str, Any]) -> str | None:
    """The text of a piece; None for one that brings no token, such as the role of a chat."""
    for choice in chunk.get("choices") or ():
        if "delta" in choice:
            content = choice["delta"].get("content")
            return content or ("" if choice.get("finish_reason") else None)
        return str(choice.get("text", ""))
    return None


def result(load: Load, model: str, answers: Sequence[Answer], duration: float) -> dict[str, Any]:
    """The figures, under vLLM's names; times in milliseconds where the name says so."""
    good = [one for one in answers if not one.error]
    failed = [one for one in answers if one.error]
    inputs, outputs = sum(one.prompt_len for one in good), sum(one.output_tokens for one in good)
    found: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": "openai",
        "endpoint_type": "openai-chat" if "chat" in load.endpoint else "openai",
        "label": None,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": load.num_prompts,
        "request_rate": "inf" if load.request_rate == float("inf") else load.request_rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        "duration": duration,
        "completed": len(good),
        "failed": len(failed),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / duration,
        "request_goodput": sum(_is_good(load, one) for one in good) / duration if load.goodput else None,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
        "max_concurrent_requests": _most_at_once(answers),
    }
    times = {
        "ttft": [one.ttft for one in good],
        "tpot": [one.tpot for one in good if one.tpot is not None],
        "itl": [gap for one in good for gap in one.itl],
        "e2el": [one.latency for one in good],
    }
    for name in METRICS:
        found.update(summary(name, times[name], load.percentiles))
    first = min((one.start for one in answers), default=0.0)
    found["details"] = {
        "input_lens": [one.prompt_len for one in answers],
        "output_lens": [one.output_tokens for one in answers],
        "ttfts": [one.ttft for one in answers],
        "itls": [one.itl for one in answers],
        "start_times": [one.start - first for one in answers],
        "generated_texts": [one.text for one in answers],
        "errors": [one.error for one in answers],
    }
    return found


def summary(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, deviation and percentiles in milliseconds; 0 where nothing was measured, as in vLLM's files."""
    ms = sorted(1000 * value for value in seconds)
    found = {
        f"mean_{name}_ms": statistics.fmean(ms) if ms else 0.0,
        f"median_{name}_ms": statistics.median(ms) if ms else 0.0,
        f"std_{name}_ms": statistics.pstdev(ms) if ms else 0.0,
    }
    for share in percentiles:
        found[f"p{share:g}_{name}_ms"] = percentile(ms, share)
    return found


def percentile(ordered: Sequence[float], share: float) -> float:
    """Between the two nearest values, in proportion, as numpy's default."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _is_good(load: Load, answer: Answer) -> bool:
    seen = {"ttft": answer.ttft, "tpot": answer.tpot or 0.0, "e2el": answer.latency}
    return all(1000 * seen[name] <= limit for name, limit in load.goodput.items())


def _most_at_once(answers: Sequence[Answer]) -> int:
    changes = sorted([(one.start, 1) for one in answers] + [(one.start + one.latency, -1) for one in answers])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def save(found: Mapping[str, Any], path: Path, *, detailed: bool) -> None:
    """Write the result as JSON; the single requests only where they are asked for. Raises OSError."""
    details = dict(found["details"]) if detailed else {"errors": found["details"]["errors"]}
    whole = {**{name: value for name, value in found.items() if name != "details"}, **details}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
