"""L3: tokens, log-probabilities and vectors of tiny models against the references, judged by teacher forcing."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm_conformance.case import Evidence, Subject
from vllm_conformance.cases.runs import models
from vllm_conformance.cases.runs.engines import (
    LENGTHS,
    Engine,
    Output,
    engine,
    pooling_request,
    prompt_of,
    request_of,
)
from vllm_conformance.cases.runs.expect import first_dtype
from vllm_conformance.cases.runs.refusal import unusable_after
from vllm_conformance.cases.runs.teacher import Marks, logits_after, teacher_of
from vllm_core.errors import PlanError

LOGPROB = {"float32": 2e-3, "float16": 0.03, "bfloat16": 0.2, "int8": 0.3, "fp8": 0.8}
"""Largest difference of a log-probability, by the engine's dtype or, if that is coarser, its KV cache's."""
VECTOR = {"float32": 1e-4, "float16": 3e-3, "bfloat16": 2e-2}
"""Largest difference of an element of a vector of length 1."""


def tokens(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Prompts of 1 to 90 tokens, together and then one alone, with log-probabilities beside the tokens.

    A platform need not serve every architecture: what no capability promises may be refused while planning.
    """
    name, dtype = params["model"], params["dtype"]
    try:
        return _tokens(subject, name, dtype, params)
    except PlanError as error:
        if name not in models.OPTIONAL:
            raise
        unusable = unusable_after(subject.device)
        return Evidence("BAD_REFUSAL" if unusable else "REFUSED", unusable or " ".join(error.found.split())[:300])


def _tokens(subject: Subject, name: str, dtype: str, params: Mapping[str, Any]) -> Evidence:
    with engine(subject, name, dtype, **params.get("options", {})) as made:
        prompts = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]
        outputs = made.generate(prompts, logprobs=3)
        outputs += made.generate([prompts[3]])
        prompts.append(prompts[3])
        return made.evidence(marks_of(made, prompts, outputs), logprob_problem(made, prompts, outputs))


def marks_of(made: Engine, prompts: Sequence[Sequence[int]], outputs: Sequence[Output], what: str = "") -> Marks:
    """Judge all outputs."""
    marks = Marks()
    for prompt, output in zip(prompts, outputs, strict=True):
        if output.reason != "length":
            marks.wrong = marks.wrong or f"{what or made.name}: a request ended by {output.reason!r}"
        marks.add(made.name, made.dtype, prompt, output.tokens, what)
    return marks


def logprob_problem(made: Engine, prompts: Sequence[Sequence[int]], outputs: Sequence[Output]) -> str:
    """Where a log-probability or rank is not the reference's."""
    limit = LOGPROB[made.dtype]
    for prompt, output in zip(prompts, outputs, strict=True):
        if not output.logprobs:
            continue
        rows = logits_after(made.name, prompt, output.tokens).log_softmax(1)
        for at, (entry, row) in enumerate(zip(output.logprobs, rows, strict=True)):
            pairs = [(entry.token, entry.logprob), *zip(entry.top_ids, entry.top, strict=True)]
            for token, value in pairs:
                if not abs(float(row[token]) - value) <= limit:
                    return (
                        f"log-probability of token {token} at {at} is {value:.4f}, the reference says {float(row[token]):.4f}"
                    )
            if entry.top != sorted(entry.top, reverse=True):
                return f"the most likely tokens at {at} are not in order"
    return ""


def prompt_logprobs(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Log-probabilities of the prompt's own tokens, in one chunk and in several."""
    dtype, prompt = first_dtype(subject), prompt_of(60, 2)
    rows = teacher_of("llama").logits(prompt)[:-1].log_softmax(1)
    for chunk in (64, 16):
        with engine(subject, "llama", dtype, max_num_batched_tokens=chunk) as made:
            found: list[Any] = []
            made.core.add(request_of("0", prompt, 2, prompt_logprobs=2))
            while made.core.has_work:
                for update in made.core.step():
                    found = update.prompt_logprobs or found
            if len(found) != len(prompt) or found[0] is not None:
                return Evidence("FAIL", f"{len(found)} entries for a prompt of {len(prompt)} tokens, chunks of {chunk}")
            for at, (entry, row) in enumerate(zip(found[1:], rows, strict=True), 1):
                if entry.token != prompt[at] or not abs(entry.logprob - float(row[prompt[at]])) <= LOGPROB[dtype]:
                    return Evidence(
                        "FAIL", f"entry {at} is {entry}, the reference says {float(row[prompt[at]]):.4f}, chunks of {chunk}"
                    )
            evidence = made.evidence(Marks())
    return evidence


def vectors(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Embeddings of an encoder: every element, for prompts of all lengths together."""
    dtype = params["dtype"]
    prompts = [prompt_of(length, seed) for seed, length in enumerate((*LENGTHS, 130))]
    with engine(subject, "bert", dtype) as made:
        outputs = made.run([pooling_request(str(n), prompt) for n, prompt in enumerate(prompts)])
        worst = 0.0
        for prompt, output in zip(prompts, outputs.values(), strict=True):
            if output.vector is None:
                return Evidence("FAIL", f"a prompt of {len(prompt)} tokens has no vector, it ended by {output.reason!r}")
            difference = float((torch.tensor(output.vector) - teacher_of("bert").vector(prompt)).abs().max())
            worst = max(worst, difference)
        problem = f"an element differs by {worst:.3g}, at most {VECTOR[dtype]:g}" if not worst <= VECTOR[dtype] else ""
        return made.evidence(Marks(), problem)


def seeds_repeat(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Random requests repeat by their seed and not otherwise, whatever their place in the batch."""
    with engine(subject, "llama", first_dtype(subject)) as made:
        prompt = prompt_of(20)
        requests = [
            request_of(f"{n}", prompt, 16, temperature=1.3, top_p=0.95, top_k=60, seed=seed)
            for n, seed in enumerate((5, 6, 5, 7))
        ]
        outputs = [output.tokens for output in made.run(requests).values()]
        again = [output.tokens for output in made.run(requests[::-1]).values()][::-1]
        problem = ""
        if outputs != again:
            problem = "the same requests in another order gave other tokens"
        elif outputs[0] != outputs[2]:
            problem = "one seed gave two series of tokens"
        elif len({tuple(one) for one in outputs}) != 3:
            problem = "two seeds gave one series of tokens"
        return made.evidence(Marks(), problem)


def parameters_are_obeyed(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Bias, bad words, stop tokens and their minimum, penalties: requests whose answer is known, in one batch."""
    with engine(subject, "llama", first_dtype(subject)) as made:
        prompt = prompt_of(20)
        (plain,) = (output.tokens for output in made.generate([prompt], 8))
        stop = plain[2]
        first = plain.index(stop) + 1
        requests = {
            "bias": request_of("bias", prompt, 6, logit_bias={9: 100.0}),
            "banned": request_of("banned", prompt, 8, bad_words_token_ids=[[plain[0]]]),
            "stop": request_of("stop", prompt, 8, stop_token_ids=[stop]),
            "minimum": request_of("minimum", prompt, 8, stop_token_ids=[stop], min_tokens=first + 1),
            "penalty": request_of(
                "penalty", prompt, 8, presence_penalty=2.0, frequency_penalty=2.0, logit_bias={9: 30.0, 11: 29.0}
            ),
            "plain": request_of("plain", prompt, 8),
        }
        found = {name: output.tokens for name, output in made.run(list(requests.values())).items()}
        wrong = {
            "bias": found["bias"] != [9] * 6,
            "banned": plain[0] in found["banned"],
            "stop": found["stop"] != plain[:first],
            "minimum": len(found["minimum"]) <= first or stop in found["minimum"][: first + 1],
            "penalty": found["penalty"][:2] != [9, 11],
            "plain": found["plain"] != plain,
        }
        names = [name for name, is_wrong in wrong.items() if is_wrong]
        return made.evidence(Marks(), f"{names[0]}: {found[names[0]]}, alone {plain}" if names else "")


def batch_invariant(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """A request's tokens and log-probabilities are the same bits alone and among others; prompts in one chunk."""
    from vllm_core.api import Partial

    dtype, claim = params["dtype"], subject.claims["batch_invariant"]
    if isinstance(claim, Partial) and not any(dtype in case for case in claim.cases):
        return Evidence("REFUSED", f"batch_invariant is claimed for {', '.join(claim.cases)} only: {claim.reason}")
    rng = random.Random(3)
    with engine(subject, "llama", dtype, enable_prefix_caching=False) as made:
        prompt = prompt_of(33, 4)
        alone = made.run([request_of("it", prompt, logprobs=3)])["it"]
        for mix in range(4):
            others = [request_of(f"{mix}.{n}", prompt_of(rng.randint(1, 60), n), rng.randint(1, 30)) for n in range(7)]
            together = made.run([*others[:mix], request_of("it", prompt, logprobs=3), *others[mix:]])["it"]
            if (together.tokens, together.logprobs) != (alone.tokens, alone.logprobs):
                return Evidence("FAIL", f"among 7 others (mix {mix}) its tokens or log-probabilities are other bits than alone")
        return made.evidence(marks_of(made, [prompt], [alone]))
