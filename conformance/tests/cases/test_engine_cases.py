"""L3: the installed cpu platform passes, and with one wrong kernel beside its own each case fails and says what it saw."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_conformance.cases import engine as planning
from vllm_conformance.cases.runs import models
from vllm_conformance.cases.runs.teacher import MOST_TIES, TIE, Marks, logits_after, teacher_of
from vllm_core.api import CAPABILITIES, Full, Unsupported

# Sees neither what is cached nor what earlier chunks wrote, only the tokens of its own step.
FORGETFUL = """
import torch
from vllm_core.ops.layouts import kv_layout
from vllm_core.ops.attention import kv_bind, kv_write, kv_copy, kv_export, kv_import
from vllm_core.ops import attention

def paged_attention(out, q, kv, query_start, seq_lens, table, most, longest, scale, window, cap):
    counts = query_start.diff()
    attention.paged_attention(out, q, kv, query_start, seq_lens, table, most, longest, scale, window, cap)
    for row in range(len(counts)):
        begin, end = int(query_start[row]), int(query_start[row + 1])
        if end - begin < int(seq_lens[row]):
            out[begin:end] *= 0.25
"""
WITHOUT_SINKS = """
from vllm_core.ops.attention import kv_bind, kv_copy, kv_export, kv_import, kv_write
from vllm_core.ops import attention

def paged_attention(out, q, kv, query_start, seq_lens, table, most, longest, scale, window, cap, sinks=None):
    attention.paged_attention(out, q, kv, query_start, seq_lens, table, most, longest, scale, window, cap)
"""
KV = {name: name for name in ("kv_bind", "kv_write", "paged_attention", "kv_copy", "kv_export", "kv_import")}
NORM = """
from vllm_core.ops import norm
def rms_norm(out, x, weight, eps):
    norm.rms_norm(out, x, weight * 1.3, eps)
    out[..., 0] = 3.0
"""
LOGPROBS = """
from dataclasses import replace
from vllm_core.ops import sampling
def log_probabilities(logits, tokens, k):
    right = sampling.log_probabilities(logits, tokens, k)
    return replace(right, chosen=right.chosen - 0.1)
"""
ENCODER = """
from vllm_core.ops import attention
def encoder_attention(out, q, k, v, query_start, most, scale):
    attention.encoder_attention(out, q, k, v, query_start, most, scale * 0.5)
"""
SEEDLESS = """
import torch
def sample(tokens, nonfinite, logits, state, slots, lengths, features):
    nonfinite.fill_(False)
    chosen = torch.multinomial((logits / 1.3).softmax(1), 1) if features & 1 else logits.argmax(1, keepdim=True)
    tokens.copy_(chosen)
"""
DEAF = "def logit_adjust(logits, state, slots, lengths, features):\n    pass\n"
CONSTANT = """
def sample(tokens, nonfinite, logits, state, slots, lengths, features):
    nonfinite.fill_(False)
    tokens.fill_(7)
"""
SOCIABLE = """
from vllm_core.ops import norm
def rms_norm(out, x, weight, eps):
    norm.rms_norm(out, x, weight * (1 + 1e-6 * (len(x) > 1)), eps)
"""
WRONG = (
    ("tokens:tokens", {"model": "llama", "dtype": "float32"}, NORM, {"rms_norm": "rms_norm"}, "the reference says"),
    ("tokens:tokens", {"model": "qwen3", "dtype": "float32"}, LOGPROBS, {"log_probabilities": "log_probabilities"}, "log-prob"),
    ("tokens:prompt_logprobs", {}, LOGPROBS, {"log_probabilities": "log_probabilities"}, "the reference says"),
    ("tokens:vectors", {"dtype": "float32"}, ENCODER, {"encoder_attention": "encoder_attention"}, "an element differs"),
    ("tokens:seeds_repeat", {}, SEEDLESS, {"sample": "sample"}, "gave"),
    ("tokens:parameters_are_obeyed", {}, DEAF, {"logit_adjust": "logit_adjust"}, "bias: "),
    ("tokens:batch_invariant", {"dtype": "float32"}, SOCIABLE, {"rms_norm": "rms_norm"}, "other bits than alone"),
    ("tokens:tokens", {"model": "gpt_oss", "dtype": "float32"}, WITHOUT_SINKS, KV, "the reference says"),
    ("scheduling:chunks", {"model": "llama", "size": 16}, FORGETFUL, KV, "the reference says"),
    ("scheduling:prefixes", {"model": "llama"}, FORGETFUL, KV, "the reference says"),
    ("scheduling:preemption", {"model": "llama"}, FORGETFUL, KV, "the reference says"),
    ("scheduling:evictions", {"model": "llama"}, FORGETFUL, KV, "the reference says"),
    ("scheduling:cancellation", {"seed": 0}, FORGETFUL, KV, "the reference says"),
    ("scheduling:steps_ahead", {}, FORGETFUL, KV, "the reference says"),
)


@pytest.mark.parametrize(("case", "params", "body", "ops", "says"), WRONG, ids=[f"{row[0]}-{n}" for n, row in enumerate(WRONG)])
def test_a_wrong_kernel_fails_the_case_that_is_about_it(kernels, run_case, case, params, body, ops, says):
    evidence = run_case(
        kernels(body, ops, **({"features": frozenset({"sliding_window", "sinks"})} if ops is KV else {})), case, **params
    )
    assert evidence.outcome == "FAIL"
    assert says in evidence.detail


RIGHT = (
    ("tokens:tokens", {"model": "llama", "dtype": "bfloat16"}),
    ("tokens:tokens", {"model": "gemma3", "dtype": "float32"}),
    ("tokens:tokens", {"model": "capped", "dtype": "float32"}),
    ("tokens:tokens", {"model": "gpt_oss", "dtype": "float32"}),
    ("tokens:prompt_logprobs", {}),
    ("tokens:vectors", {"dtype": "float32"}),
    ("tokens:seeds_repeat", {}),
    ("tokens:parameters_are_obeyed", {}),
    ("tokens:batch_invariant", {"dtype": "float32"}),
    ("scheduling:chunks", {"model": "gemma3", "size": 17}),
    ("scheduling:prefixes", {"model": "gemma3"}),
    ("scheduling:preemption", {"model": "llama"}),
    ("scheduling:evictions", {"model": "gemma3"}),
    ("scheduling:cancellation", {"seed": 1}),
    ("scheduling:steps_ahead", {}),
    ("providers:every_provider_denied", {"model": "llama"}),
    ("providers:every_provider_failing", {"model": "llama"}),
    ("providers:strict_raises", {}),
    ("providers:generic_path", {"model": "llama"}),
    ("whole:memory_comes_back", {}),
)


@pytest.mark.parametrize(("case", "params"), RIGHT, ids=[f"{row[0]}-{n}" for n, row in enumerate(RIGHT)])
def test_the_cpu_platform_passes(cpu, run_case, case, params):
    evidence = run_case(cpu, case, **params)
    assert evidence.outcome == "PASS", evidence.detail


def test_a_partial_claim_is_refused_outside_of_its_cases(cpu, run_case):
    evidence = run_case(cpu, "tokens:batch_invariant", dtype="bfloat16")
    assert evidence.outcome == "REFUSED"
    assert "float32" in evidence.detail


@pytest.mark.parametrize("case", ["providers:every_provider_denied", "providers:every_provider_failing"])
def test_a_next_provider_that_is_wrong_fails(kernels, run_case, case):
    """It takes over from the plugin's native one, and nobody looks at it otherwise."""
    evidence = run_case(kernels(CONSTANT, {"sample": "sample"}, priority=5), case, model="llama")
    assert evidence.outcome == "FAIL"
    assert "the reference says" in evidence.detail


def test_a_device_that_keeps_counting_fails(cpu, run_case, monkeypatch):
    from vllm_cpu.device import CpuDevice

    monkeypatch.setattr(CpuDevice, "release", lambda self, pool: 0)
    evidence = run_case(cpu, "whole:memory_comes_back")
    assert evidence.outcome == "FAIL"
    assert "are counted after the engine's end" in evidence.detail


def captured(**changes):
    program = SimpleNamespace(captured=SimpleNamespace(failure=None, count=3))
    plan = SimpleNamespace(graphs=True, program="core")
    made = SimpleNamespace(plan=plan, core=SimpleNamespace(program=program))
    for path, value in changes.items():
        owner = {"graphs": plan, "program": plan, "captured": program}.get(path, program.captured)
        setattr(owner, path, value)
    return made


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ""),
        ({"program": "own", "captured": None}, ""),
        ({"graphs": False}, "the Plan has no graphs"),
        ({"captured": None}, "asks for no captured sizes"),
        ({"failure": "RuntimeError: capture"}, "RuntimeError: capture"),
        ({"count": 0}, "no step was captured"),
    ],
)
def test_steps_that_are_claimed_to_be_captured_really_are(changes, says):
    from vllm_conformance.cases.runs.scheduling import _capture_problem

    assert says in _capture_problem(captured(**changes))
    assert bool(says) == bool(_capture_problem(captured(**changes)))


# -- the teacher


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3", "mixtral", "qwen3_moe", "phi3"])
def test_the_teacher_is_transformers_own_model(name):
    import transformers

    tokens = [(11 * i * i + 2) % 250 for i in range(60)]
    architecture = models.CONFIGS[name]["architectures"][0]
    with torch.inference_mode():
        model = getattr(transformers, architecture).from_pretrained(
            models.folder_of(name), dtype=torch.float32, attn_implementation="eager"
        )
        expected = model(torch.tensor([tokens]), use_cache=False).logits[0].float()
    torch.testing.assert_close(teacher_of(name).logits(tokens), expected, atol=2e-4, rtol=2e-4)


def test_tokens_depend_on_all_of_the_context():
    """Else a model would not notice attention that is wrong."""
    for name in ("llama", "gemma3"):
        prompt = [(7 * i + 3) % 250 for i in range(20)]
        other = [9, *prompt[1:]]
        far = (teacher_of(name).logits(prompt)[-1] - teacher_of(name).logits(other)[-1]).abs().max()
        assert far > TIE["bfloat16"]


def greedy(name, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(teacher_of(name).logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_the_references_own_tokens_are_right():
    marks = Marks()
    marks.add("llama", "float32", [1, 2, 3], greedy("llama", [1, 2, 3], 6))
    assert (marks.tokens, marks.ties, marks.problem("float32")) == (6, 0, "")


def test_one_other_token_is_wrong_and_named():
    tokens = greedy("llama", [1, 2, 3], 6)
    tokens[4] = (tokens[4] + 1) % 250
    marks = Marks()
    marks.add("llama", "bfloat16", [1, 2, 3], tokens, "request r7")
    assert "request r7: token 4 of 6" in marks.problem("bfloat16")


def near_tie(limit):
    """A prompt after which the two most likely tokens are nearly as likely, and the second of them."""
    for seed in range(400):
        prompt = [(seed * 7 + 5 * i) % 250 for i in range(9)]
        best = teacher_of("llama").logits(prompt)[-1].topk(2)
        if 0 < float(best.values[0] - best.values[1]) < limit:
            return prompt, int(best.indices[1])
    raise AssertionError("no near-tie")


def test_near_ties_are_counted_and_capped():
    prompt, second = near_tie(TIE["bfloat16"] / 2)
    marks = Marks()
    marks.add("llama", "bfloat16", prompt, [second])
    assert (marks.ties, marks.problem("bfloat16")) == (1, "")
    marks.add("llama", "bfloat16", prompt, [second])
    assert "are near-ties, at most" in marks.problem("bfloat16")
    assert MOST_TIES["bfloat16"] < 0.5


def test_a_near_tie_of_a_narrow_dtype_is_wrong_in_float32():
    prompt, second = near_tie(TIE["bfloat16"] / 2)
    marks = Marks()
    behind = float((logits_after("llama", prompt, [second]).amax(1) - logits_after("llama", prompt, [second])[0, second]).max())
    marks.add("llama", "float32", prompt, [second])
    assert bool(marks.problem("float32")) == (behind > TIE["float32"])


# -- planning


def collected(**changes):
    claims = {**dict.fromkeys(CAPABILITIES, Full()), **changes}
    return {case.id: case for case in planning.collect(claims, (), None)}


@pytest.mark.parametrize(
    ("claim", "part"),
    [
        ("attention.sliding_window", ("gemma3", "gpt_oss")),
        ("attention.soft_cap", "capped"),
        ("attention.sinks", "gpt_oss"),
        ("attention.encoder", "vectors"),
        ("graphs", "captured_steps"),
        ("batch_invariant", "batch_invariant"),
        ("async_scheduling", "steps_ahead"),
        ("parallel.tensor", "two_workers"),
        ("kv_dtype.fp8", "kv_fp8"),
        ("dtype.float16", "float16"),
    ],
)
def test_cases_of_a_capability_are_there_where_it_is_claimed(claim, part):
    before, after = set(collected()), set(collected(**{claim: Unsupported("no")}))
    parts = (part,) if isinstance(part, str) else part
    assert after < before
    assert all(any(name in one for name in parts) for one in before - after)
    assert not any(name in one.split("/") for one in after for name in parts)


def test_the_fixed_subset_has_every_kind_of_case():
    ci = {id_.split("/")[1] for id_, case in collected().items() if case.params.get("ci")}
    assert ci == {id_.split("/")[1] for id_ in collected()}
