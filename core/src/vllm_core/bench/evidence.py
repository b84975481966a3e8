"""The evidence of a result file: tokens at fixed seeds, and what two files need to be judged by.

Each request is greedy or sampled with a seed of its own, and has the likeliest tokens at each position, so that where two
engines part it can be told a near-tie from an error.
"""

from __future__ import annotations

import hashlib
import json
import random
from typing import TYPE_CHECKING, Any

from vllm_core.bench.results import Evidence, Longest, Sample, ToolCall
from vllm_core.bench.workloads import VOCABULARY
from vllm_core.errors import VLLMCoreError
from vllm_core.outputs import Logprob, RequestOutput
from vllm_core.sampling_params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from vllm_core.llm import LLM

SAMPLES = 8
SAMPLED = 2
"""So many of them are sampled, the others greedy."""
TEMPERATURE = 0.8
PROMPT_TOKENS = (16, 64)
OUTPUT_TOKENS = 16
TOP = 5
DIGITS = 5
"""Of log-probabilities."""
LONGEST_OUTPUT = 4
LONGEST_SEED = 1000

TOOL_NAME = "get_weather"
CITIES = ("Oslo", "Lima", "Quito")
_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(CITIES)}, "days": {"type": "integer", "enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": TOOL_NAME, "description": "Weather in a city.", "parameters": _PARAMETERS},
}
CALL = {
    "type": "object",
    "properties": {"name": {"const": TOOL_NAME}, "arguments": _PARAMETERS},
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
"""JSON schema of a call."""


def gather(llm: LLM) -> Evidence:
    """Generate all of it. Raises VLLMCoreError."""
    vocabulary = min(VOCABULARY, llm._engine.blueprint.spec.vocab_size)
    most = max(1, llm.max_model_len - OUTPUT_TOKENS)
    drawn = [_drawn(seed, vocabulary, most) for seed in range(SAMPLES)]
    asked = [(prompt, _params(seed)) for seed, prompt in enumerate(drawn)]
    alone = [_sample(_one(llm, prompt, params), params) for prompt, params in asked]
    outputs = llm.generate([{"prompt_token_ids": p} for p in drawn], [params for _, params in asked], use_tqdm=False)
    together = [_sample(output, params) for output, (_, params) in zip(outputs, asked, strict=True)]
    longest = _longest(llm, vocabulary)
    found = Evidence(alone=alone, together=together, longest=longest, tool_call=_tool_call(llm), digest="")
    return Evidence(
        **{name: getattr(found, name) for name in found.__struct_fields__ if name != "digest"}, digest=digest(found)
    )


def digest(found: Evidence) -> str:
    """SHA-256 over all tokens, in order."""
    tokens: list[Any] = [[one.tokens for one in found.alone], [one.tokens for one in found.together], found.longest.tokens]
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def _drawn(seed: int, vocabulary: int, most: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(vocabulary) for _ in range(min(source.randint(*PROMPT_TOKENS), most))]


def _params(seed: int) -> SamplingParams:
    temperature = 0.0 if seed < SAMPLES - SAMPLED else TEMPERATURE
    return SamplingParams(
        temperature=temperature,
        seed=seed,
        ignore_eos=True,
        max_tokens=OUTPUT_TOKENS,
        logprobs=TOP,
        prompt_logprobs=0,
        detokenize=False,
    )


def _one(llm: LLM, prompt: list[int], params: SamplingParams) -> RequestOutput:
    return llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]


def _sample(output: RequestOutput, params: SamplingParams) -> Sample:
    made = output.outputs[0]
    # Of a prompt position only the prompt's own token is asked for.
    known = [round(next(iter(one.values())).logprob, DIGITS) for one in output.prompt_logprobs or () if one]
    return Sample(
        prompt=list(output.prompt_token_ids),
        temperature=params.temperature,
        seed=params.seed or 0,
        tokens=list(made.token_ids),
        logprobs=_chosen(output),
        top=[_top(one) for one in made.logprobs or ()],
        prompt_logprobs=known,
    )


def _chosen(output: RequestOutput) -> list[float]:
    made = output.outputs[0]
    return [round(one[token].logprob, DIGITS) for one, token in zip(made.logprobs or (), made.token_ids, strict=True)]


def _top(found: dict[int, Logprob]) -> list[tuple[int, float]]:
    """The likeliest, without the chosen one where it is not among them."""
    ordered = sorted(found.items(), key=lambda item: item[1].rank)
    return [(token, round(value.logprob, DIGITS)) for token, value in ordered[:TOP]]


def _longest(llm: LLM, vocabulary: int) -> Longest:
    length = max(1, llm.max_model_len - LONGEST_OUTPUT)
    source = random.Random(LONGEST_SEED)
    prompt = [source.randrange(vocabulary) for _ in range(length)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=LONGEST_OUTPUT, logprobs=0, detokenize=False)
    output = _one(llm, prompt, params)
    made = output.outputs[0]
    return Longest(
        seed=LONGEST_SEED,
        prompt_tokens=length,
        tokens=list(made.token_ids),
        logprobs=_chosen(output),
        finish_reason=made.finish_reason or "",
    )


def _tool_call(llm: LLM) -> ToolCall:
    """Ask for a call and let only one through. A model without a chat template, or an engine without grammars, makes none."""
    structure = StructuredOutputsParams(json=CALL, disable_any_whitespace=True)
    params = SamplingParams(temperature=0.0, max_tokens=min(128, llm.max_model_len // 2), structured_outputs=structure)
    question: list[dict[str, Any]] = [{"role": "user", "content": f"Weather in Lima for two days? Call {TOOL_NAME}, as JSON."}]
    try:
        output = llm.chat(question, params, use_tqdm=False, tools=[TOOL])[0]
    except VLLMCoreError as error:
        return ToolCall(missing=f"{error.what}: {error.found}")
    return ToolCall(text=output.outputs[0].text) if output.error is None else ToolCall(missing=output.error)
