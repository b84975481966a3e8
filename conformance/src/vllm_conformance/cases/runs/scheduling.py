"""L3: chunks, prefix caching, preemption, cancellation, steps ahead, graphs: tokens stay right and all blocks come back."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from vllm_conformance.case import Evidence, Subject
from vllm_conformance.cases.runs.engines import LENGTHS, Engine, engine, options_of, prompt_of, request_of
from vllm_conformance.cases.runs.expect import first_dtype
from vllm_conformance.cases.runs.teacher import Marks
from vllm_conformance.cases.runs.tokens import marks_of
from vllm_core import launch

_PROMPTS = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]


def chunks(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Prompts in chunks of a given size, beside requests that decode."""
    size = params["size"]
    with engine(subject, params["model"], first_dtype(subject), max_num_batched_tokens=size, max_num_seqs=min(size, 8)) as made:
        outputs = made.generate(_PROMPTS, 12)
        return made.evidence(marks_of(made, _PROMPTS, outputs))


def block_size_of(made: Engine) -> int:
    """Tokens per block of the first KV group."""
    size: int = made.plan.kv_groups[0].layout.tokens_per_block
    return size


def prefixes(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """A prefix found in the cache gives the same tokens as a computed one, and is found as often as it must be."""
    with engine(subject, params["model"], first_dtype(subject)) as made:
        size, marks, problem = block_size_of(made), Marks(), ""
        base = prompt_of(2 * size + 5)
        turns = [
            ("first", base, "", 0),
            ("again", base, "", 2 * size),
            ("a block of it", [*base[: size + 1], 7, 7, 7], "", size),
            ("exactly two blocks", base[: 2 * size], "", size),
            ("another salt", base, "tenant", 0),
            ("another beginning", [9, *base], "", 0),
        ]
        for what, prompt, salt, expected in turns:
            (output,) = made.generate([prompt], 10, salt=salt)
            marks.add(made.name, made.dtype, prompt, output.tokens, what)
            if output.cached != expected:
                problem = problem or f"{what}: {output.cached} tokens were found in the cache, {expected} are there"
        if not made.core.reset_prefix_cache():
            problem = problem or "the cache could not be reset although nothing runs"
        (output,) = made.generate([base], 10)
        marks.add(made.name, made.dtype, base, output.tokens, "after a reset")
        if output.cached:
            problem = problem or f"{output.cached} tokens were found after a reset"
        made.core.reset_prefix_cache()
        both = [base, [*base[: 2 * size], 7, 7, 7]]
        outputs = made.generate(both, 10)
        for prompt, output in zip(both, outputs, strict=True):
            marks.add(made.name, made.dtype, prompt, output.tokens, "together")
        if outputs[1].cached != 2 * size:
            problem = problem or f"{outputs[1].cached} tokens were shared between prompts that came together, not {2 * size}"
        return made.evidence(marks, problem)


def _few_blocks(subject: Subject, name: str, dtype: str, spare: int, **options: Any) -> dict[str, Any]:
    """Options under which six requests at the end of a block fit, and not what they need next."""
    design = launch.blueprint(options_of(subject, name, dtype))
    size = design.plan.kv_groups[0].layout.tokens_per_block
    length = min(2 * size + 40, design.spec.max_position)
    return {
        "block_size": size,
        "num_gpu_blocks_override": 1 + max(6 + spare, -(-length // size)),
        "kv_cache_memory_bytes": None,
        "max_model_len": length,
        **options,
    }


def preemption(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Blocks run out while six requests grow: some wait and are computed again, with the same tokens."""
    name, dtype = params["model"], first_dtype(subject)
    with engine(subject, name, dtype, **_few_blocks(subject, name, dtype, spare=1)) as made:
        size = block_size_of(made)
        prompts = [prompt_of(max(1, size - 4 + n), n) for n in range(6)]
        outputs = made.generate(prompts, 24)
        times = made.core.stats().preemptions
        return made.evidence(marks_of(made, prompts, outputs), "" if times else "nothing was preempted")


def evictions(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Cached blocks are given to others and their contents must not be found again: many prompts, few blocks, twice."""
    name, dtype = params["model"], first_dtype(subject)
    with engine(subject, name, dtype, **_few_blocks(subject, name, dtype, spare=3)) as made:
        size = block_size_of(made)
        prompts = [[*prompt_of(size + n), 240 + n] for n in range(9)]
        marks = Marks()
        for order in (range(9), (8, 0, 7, 1, 6, 2, 5, 3, 4)):
            for prompt, output in zip([prompts[n] for n in order], made.generate([prompts[n] for n in order], 8), strict=True):
                marks.add(made.name, made.dtype, prompt, output.tokens)
        return made.evidence(marks, "" if made.core.stats().prefix_hits else "nothing was found in the cache")


def cancellation(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Requests are aborted at random steps, waiting, computing and decoding; the others do not notice."""
    rng = random.Random(params["seed"])
    marks = Marks()
    with engine(subject, "llama", first_dtype(subject), max_num_batched_tokens=32, max_num_seqs=4) as made:
        requests = [request_of(f"r{n}", prompt_of(rng.randint(1, 60), n % 5), rng.randint(2, 24)) for n in range(14)]
        victims = {rng.randint(0, 40): request.request_id for request in rng.sample(requests, 7)}

        def abort(step: int) -> None:
            if step in victims:
                made.core.abort([victims[step]])

        outputs = made.run(requests, abort)
        for request in requests:
            output = outputs[request.request_id]
            marks.add(made.name, made.dtype, request.prompt_token_ids, output.tokens, request.request_id)
            if output.reason is None and request.request_id not in victims.values():
                return Evidence("FAIL", f"{request.request_id} was not aborted and never ended")
        after = made.generate(_PROMPTS[:3], 8)
        for prompt, output in zip(_PROMPTS, after, strict=False):
            marks.add(made.name, made.dtype, prompt, output.tokens, "after the aborts")
        evidence = made.evidence(marks)
    evidence.seed = params["seed"]
    return evidence


def steps_ahead(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """The next step is scheduled while one runs: tokens are right, also where requests come and go meanwhile."""
    marks = Marks()
    with engine(subject, "llama", first_dtype(subject), async_scheduling=True, max_num_seqs=3) as made:
        requests = [request_of(f"r{n}", prompt_of(5 + 9 * n, n), 3 + 4 * n) for n in range(7)]
        for request, output in zip(requests, made.run(requests).values(), strict=True):
            marks.add(made.name, made.dtype, request.prompt_token_ids, output.tokens, request.request_id)
        return made.evidence(marks)


def captured_steps(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """With graphs and without: both right, and with them steps really are captured."""
    name, dtype = params["model"], params["dtype"]
    varied: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 3, "top_k": 40}, {"repetition_penalty": 1.2}]
    for eager in (False, True):
        with engine(subject, name, dtype, enforce_eager=eager) as made:
            outputs = made.generate(_PROMPTS, 20)
            marks = marks_of(made, _PROMPTS, outputs, "eager" if eager else "captured")
            requests = [request_of(f"v{n}", _PROMPTS[n], 8, **one) for n, one in enumerate(varied * 2)]
            made.run(requests)
            evidence = made.evidence(marks, "" if eager else _capture_problem(made))
        if evidence.outcome != "PASS":
            return evidence
    return evidence


def _capture_problem(made: Engine) -> str:
    if not made.plan.graphs:
        return "the Plan has no graphs although they are claimed"
    captured = getattr(made.core.program, "captured", None)
    if made.plan.program != "core":
        return ""
    if captured is None:
        return "the platform asks for no captured sizes although it claims graphs"
    return captured.failure or ("" if captured.count else "no step was captured")
