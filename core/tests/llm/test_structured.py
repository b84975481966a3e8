"""Structured output end to end: whatever a model says, it satisfies what was asked, and comes to an end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from vllm_core import LLM, SamplingParams
from vllm_core.errors import RequestError
from vllm_core.sampling_params import StructuredOutputsParams

pytest.importorskip("xgrammar")

SCHEMAS: dict[str, Any] = json.loads((Path(__file__).parent / "schemas.json").read_text(encoding="utf-8"))
"""Kinds of schemas by name, all bounded in length."""

MOST = 250
"""Tokens that the longest of them may take, white space included; one token a byte."""


def params(seed: int | None = None, max_tokens: int = MOST, temperature: float = 1.0, **wanted: Any) -> SamplingParams:
    structure = StructuredOutputsParams(**wanted)
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, structured_outputs=structure)


def outputs(llm: LLM, prompts: Any, wanted: Any) -> list[tuple[str, str | None]]:
    found = [output.outputs[0] for output in llm.generate(prompts, wanted, use_tqdm=False)]
    return [(one.text, one.finish_reason) for one in found]


def check(name: str, text: str, reason: str | None) -> None:
    assert reason == "stop", f"{name}: {text!r} did not end"
    value = json.loads(text)
    assert jsonschema_rs.is_valid(SCHEMAS[name], value), f"{name}: {text!r}"


def test_there_are_sixty_kinds_of_schemas() -> None:
    assert len(SCHEMAS) >= 60


@pytest.mark.parametrize("depth", [False, True], ids=["one step in flight", "two"])
def test_a_random_model_satisfies_every_schema_and_ends(llama: Any, engines: Any, depth: bool) -> None:
    llm = engines(llama, async_scheduling=depth, max_model_len=512, kv_cache_memory_bytes=1 << 24)
    prompts = [[number % 200] * 5 for number in range(len(SCHEMAS))]
    wanted = [params(seed, 480, json=schema) for seed, schema in enumerate(SCHEMAS.values())]
    for name, found in zip(SCHEMAS, outputs(llm, prompts, wanted), strict=True):
        check(name, *found)


SOME = dict(list(SCHEMAS.items())[::6])


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kinds", [SOME, pytest.param(SCHEMAS, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_small_model_satisfies_every_schema_and_ends(model_file: Any, kinds: dict[str, Any]) -> None:
    path = model_file("SmolLM2-135M-Instruct.Q4_1.gguf")
    with LLM(str(path), dtype="float32", max_model_len=512, kv_cache_memory_bytes=1 << 29, max_num_seqs=64) as llm:
        messages = [[{"role": "user", "content": f"Write an example of: {name}. Answer in JSON."}] for name in kinds]
        wanted = [params(None, MOST, 0.0, json=schema) for schema in kinds.values()]
        found = llm.chat(messages, wanted, use_tqdm=False)
    for name, output in zip(kinds, found, strict=True):
        one = output.outputs[0]
        print(json.dumps({"kind": name, "ended": one.finish_reason, "tokens": len(one.token_ids), "text": one.text}))
        check(name, one.text, one.finish_reason)


def test_rows_without_grammar_are_as_without_the_others(llama: Any, engines: Any, run: Any) -> None:
    plain = SamplingParams(temperature=0.7, seed=3, max_tokens=24, logprobs=1)
    llm = engines(llama, async_scheduling=True)
    alone = run(llm, [[1, 2, 3]], plain)
    wanted = [plain, params(1, 40, regex="[a-z]{30}"), params(2, 40, choice=["some", "other"])]
    together = llm.generate([[1, 2, 3], [4, 5], [6]], wanted, use_tqdm=False)
    assert together[0].outputs[0].token_ids == alone[0]
    assert re.fullmatch("[a-z]{30}", together[1].outputs[0].text)
    assert together[2].outputs[0].text in ("some", "other")


def test_a_captured_forward_part_and_its_eager_tail_bring_what_eager_steps_do(llama: Any, engines: Any, run: Any) -> None:
    """On a device without graphs both are eager; ``--platform toy`` shows the difference."""
    wanted = [SamplingParams(temperature=0.7, seed=3, max_tokens=8, logprobs=1), params(1, 12, regex="[a-z]{6}")]
    prompts = [[1, 2, 3], [4, 5]]
    eager, captured = (run(engines(llama, max_num_seqs=4, enforce_eager=value), prompts, wanted) for value in (True, False))
    assert captured == eager


def test_log_probabilities_are_those_before_the_mask(llama: Any, engines: Any) -> None:
    llm = engines(llama)
    wanted = SamplingParams(
        temperature=0.0, max_tokens=4, logprobs=2, structured_outputs=StructuredOutputsParams(choice=["ab"])
    )
    free = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2)
    masked, unmasked = (llm.generate([[7, 8]], one, use_tqdm=False)[0].outputs[0] for one in (wanted, free))
    assert masked.logprobs is not None
    assert unmasked.logprobs is not None
    best = {token for token, value in unmasked.logprobs[0].items() if value.rank <= 2}
    assert best <= set(masked.logprobs[0])


def test_a_grammar_ends_a_sequence_that_ignores_the_end(llama: Any, engines: Any) -> None:
    llm = engines(llama)
    wanted = SamplingParams(
        temperature=0.0, max_tokens=20, ignore_eos=True, structured_outputs=StructuredOutputsParams(choice=["ab", "cd"])
    )
    (text, reason), *_ = outputs(llm, [[1]], wanted)
    assert text in ("ab", "cd")
    assert reason == "stop"


@pytest.mark.parametrize(
    ("wanted", "on"),
    [
        ({"min_tokens": 3}, "min_tokens"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_what_could_forbid_the_only_token_left_is_refused(wanted: dict[str, Any], on: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{"structured_outputs": StructuredOutputsParams(regex="a"), **wanted})
    assert caught.value.on == on


@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"regex": "a", "choice": ["a"]},
        {"choice": []},
        {"choice": [""]},
        {"regex": ""},
        {"grammar": "x" * 70_000},
        {"json": {"enum": ["x" * 70_000]}},
    ],
)
def test_one_form_of_bounded_size_is_asked_for(wanted: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        StructuredOutputsParams(**wanted)


def test_a_grammar_that_cannot_be_compiled_leaves_the_engine_usable(llama: Any, engines: Any) -> None:
    llm = engines(llama)
    with pytest.raises(RequestError, match="Structured output"):
        llm.generate([[1], [2]], [SamplingParams(max_tokens=2), params(regex="(")], use_tqdm=False)
    assert outputs(llm, [[1]], params(choice=["ok"]))[0][0] == "ok"


def test_without_xgrammar_the_request_says_what_to_install(llama: Any, engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from vllm_core.engine import preprocess

    llm = engines(llama)
    monkeypatch.setattr(preprocess, "find_spec", lambda name: None if name == "xgrammar" else importlib.util.find_spec(name))
    with pytest.raises(RequestError, match=r"pip install .*structured"):
        llm.generate([[1]], params(choice=["ok"]), use_tqdm=False)
