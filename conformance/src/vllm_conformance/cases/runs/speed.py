"""L5: numbers on a model of 9 million random weights: they tell that something is slow, not how fast real models are."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from vllm_conformance.case import Evidence, Subject
from vllm_conformance.cases.runs import models
from vllm_conformance.cases.runs.engines import Engine, assembled, prompt_of, request_of
from vllm_core import launch
from vllm_core.api import is_available

DECODED = 32
PROMPT = 512
STREAMS = 8


def engine_speed(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Start-up, one stream, eight streams, a long prompt, and what a step costs the host."""
    options = _options(subject)
    begin = time.perf_counter()
    with assembled(launch.blueprint(options), "speed", options["dtype"]) as made:
        measured = {"start_s": time.perf_counter() - begin}
        measured |= {f"start_{name}": seconds for name, seconds in made.engine.timings.items()}
        for measure in (_single_stream, _batch, _prefill, _host):
            measured |= measure(made)
        calls = dict(made.core.stats().calls_by_kind)
    return Evidence(calls=calls, measured={name: float(f"{value:.4g}") for name, value in measured.items()})


def _options(subject: Subject) -> dict[str, Any]:
    return {
        "model": str(models.folder_of("speed")),
        "dtype": next(one for one in ("bfloat16", "float16", "float32") if is_available(subject.claims[f"dtype.{one}"])),
        "platform": subject.platform,
        "device_ids": [subject.facts.id],
        "max_model_len": 1024,
        "max_num_seqs": STREAMS,
        "kv_cache_memory_bytes": 128 << 20,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
    }


def _single_stream(made: Engine) -> dict[str, float]:
    """Tokens per second of one request that decodes; the first run captures or compiles."""
    made.generate([prompt_of(16)], 4)
    seconds = _time(made, 1, 16, DECODED)
    return {"single_stream_tokens_per_s": DECODED / seconds}


def _batch(made: Engine) -> dict[str, float]:
    """Tokens per second of eight requests that decode together."""
    made.generate([prompt_of(16)] * STREAMS, 4)
    return {"batch_tokens_per_s": STREAMS * DECODED / _time(made, STREAMS, 16, DECODED)}


def _prefill(made: Engine) -> dict[str, float]:
    """Prompt tokens per second, and seconds to the first token, of a prompt of 512."""
    seconds = min(_time(made, 1, PROMPT, 1) for _ in range(2))
    return {"prefill_tokens_per_s": PROMPT / seconds, "first_token_s": seconds}


def _host(made: Engine) -> dict[str, float]:
    """Seconds per decode step of eight requests, and those in which this process was busy."""
    core, device = made.core, made.engine.device
    for number in range(STREAMS):
        core.add(request_of(f"h{number}", prompt_of(16, number), DECODED))
    for _ in range(4):
        core.step()
    device.synchronize()
    steps, begin, cpu = 0, time.perf_counter(), time.process_time()
    while core.has_work:
        core.step()
        steps += 1
    device.synchronize()
    wall, busy = time.perf_counter() - begin, time.process_time() - cpu
    return {"step_s": wall / steps, "host_busy_s_per_step": busy / steps}


def _time(made: Engine, streams: int, length: int, count: int) -> float:
    requests = [request_of(f"t{number}", prompt_of(length, number), count) for number in range(streams)]
    begin = time.perf_counter()
    made.run(requests)
    return time.perf_counter() - begin
