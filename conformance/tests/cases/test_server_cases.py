"""L4: answers that are wrong in one thing fail the case that is about it; a real server passes all."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from functools import cache
from types import MappingProxyType

import pytest

from vllm_conformance.cases import server as planning
from vllm_conformance.cases.runs import process
from vllm_conformance.cases.runs.teacher import teacher_of

one_at_a_time = threading.Lock()


@cache
def following(tokens):
    with one_at_a_time:
        return int(teacher_of("llama").logits(tokens)[-1].argmax())


def each(prompt, count):
    tokens = tuple(prompt)
    for _ in range(count):
        tokens += (following(tokens),)
        yield tokens[-1]


def greedy(prompt, count):
    return list(each(prompt, count))


class Canned(process.Server):
    """A server whose right answers come from the teacher, without a process; subclasses are wrong in one thing."""

    dtype = "float32"
    alive = True
    left = 0.0
    statuses = MappingProxyType({"another": 404})

    def __init__(self):
        code = f"import signal, sys; signal.signal(signal.SIGTERM, {self.on_signal}); print(flush=True); signal.pause()"
        self.process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        self.process.stdout.readline()
        self.streams = 0

    on_signal = "lambda *_: sys.exit(0)"

    def log(self):
        return "listening"

    def get(self, path):
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": process.NAME}]})
        return 200, ""

    def gauges(self):
        return {"running": self.left, "waiting": 0.0, "kv": self.left}

    def tokens(self, prompt, count, seed=None):
        return [seed, *range(count - 1)] if seed is not None else greedy(prompt, count)

    def choice(self, prompt, count, index=0, seed=None, **fields):
        prompt = list(prompt.encode()) if isinstance(prompt, str) else prompt
        ids = self.tokens(prompt, count, seed)
        logprobs = {"token_logprobs": [0.0] * len(ids)}
        text = " ".join(map(str, ids))
        return {"index": index, "token_ids": ids, "finish_reason": "length", "text": text, "logprobs": logprobs}

    def complete(self, prompt, max_tokens, n=1, **fields):
        prompts = prompt if isinstance(prompt[0], list) else [prompt]
        choices = [self.choice(one, max_tokens, at * n + i, **fields) for at, one in enumerate(prompts) for i in range(n)]
        return 200, {"choices": choices, "usage": {"prompt_tokens": len(prompt)}}

    def pieces(self, prompt, max_tokens, **fields):
        for at, token in enumerate(each(prompt, max_tokens)):
            last = at == max_tokens - 1
            text = f"{token}" if at == 0 else f" {token}"
            yield {"choices": [{"text": text, "token_ids": [token], "finish_reason": "length" if last else None}]}

    def post(self, path, body):
        try:
            asked = json.loads(body)
        except ValueError:
            asked = {}
        if (
            asked.get("max_tokens")
            and asked.get("temperature", 0) >= 0
            and asked["prompt"] != [10**6]
            and len(asked["prompt"]) < 99
        ):
            return self.complete(**{name: asked[name] for name in ("prompt", "max_tokens")})
        return self.statuses.get(asked.get("model"), 400), {"error": {"message": "no"}}


class WrongTokens(Canned):
    def tokens(self, prompt, count, seed=None):
        right = super().tokens(prompt, count, seed)
        return [*right[:-1], (right[-1] + 1) % 250]


class Short(Canned):
    def tokens(self, prompt, count, seed=None):
        return super().tokens(prompt, count, seed)[:-1] if count > 5 else super().tokens(prompt, count, seed)


class OneLump(Canned):
    def pieces(self, prompt, max_tokens, **fields):
        yield {"choices": [self.choice(prompt, max_tokens)]}


class Garbles(Canned):
    def pieces(self, prompt, max_tokens, **fields):
        for piece in super().pieces(prompt, max_tokens, **fields):
            yield {"choices": [{**piece["choices"][0], "text": "?"}]}


class SeedBlind(Canned):
    def choice(self, prompt, count, index=0, seed=None, **fields):
        return super().choice(prompt, count, index)


class TakesAll(Canned):
    def post(self, path, body):
        return 200, {"choices": []}


class WrongStatus(Canned):
    statuses = MappingProxyType({"another": 500})


class Silent(Canned):
    def post(self, path, body):
        status, answer = super().post(path, body)
        return status, answer if status == 200 else {}


class Leaks(Canned):
    left = 0.5


class Overwhelmed(Canned):
    def complete(self, **fields):
        self.streams += 1
        return (503, {"error": {"message": "busy"}}) if self.streams > 10 else super().complete(**fields)


class Ignores(Canned):
    on_signal = "signal.SIG_IGN"


class Fails(Canned):
    on_signal = "lambda *_: sys.exit(7)"


class Traces(Canned):
    def log(self):
        return "Traceback (most recent call last):"


WRONG = (
    (WrongTokens, "completions_are_right", "the reference says"),
    (Short, "completions_are_right", "9 tokens came"),
    (OneLump, "streams_are_the_same_text", "in one piece"),
    (Garbles, "streams_are_the_same_text", "streamed '?"),
    (WrongTokens, "several_choices_and_prompts", "the reference says"),
    (SeedBlind, "several_choices_and_prompts", "seeds 1, 1 and 2"),
    (TakesAll, "wrong_requests_are_refused_and_the_next_served", "no JSON is answered with 200"),
    (WrongStatus, "wrong_requests_are_refused_and_the_next_served", "an unknown model is answered with 500"),
    (Silent, "wrong_requests_are_refused_and_the_next_served", "without a message"),
    (Leaks, "an_abort_in_midstream_frees_blocks", "KV use is 0.500"),
    (Overwhelmed, "overload_is_answered", "is answered with 503"),
    (Leaks, "aborts_under_load_leave_nothing", "KV use is 0.500"),
    (Ignores, "a_signal_ends_it_in_order", "still runs"),
    (Fails, "a_signal_ends_it_in_order", "exit status 7"),
    (Traces, "a_signal_ends_it_in_order", "a traceback was printed"),
)


@pytest.fixture
def answered_by(cpu, run_case, monkeypatch):
    """Run a case against a canned server."""
    from vllm_conformance.cases.runs import server

    monkeypatch.setattr(server, "IDLE_S", 0.1)
    monkeypatch.setattr(server, "END_S", 2.0)
    made = []

    def go(kind, name):
        made.append(kind())
        monkeypatch.setitem(process._shared, "cpu", made[-1])
        return run_case(cpu, f"server:{name}")

    yield go
    for one in made:
        one.process.kill()
        one.process.communicate()


@pytest.mark.parametrize(("kind", "name", "says"), WRONG, ids=[f"{row[1]}-{row[0].__name__}" for row in WRONG])
def test_a_server_that_is_wrong_in_one_thing_fails(answered_by, kind, name, says):
    evidence = answered_by(kind, name)
    assert evidence.outcome == "FAIL"
    assert says in evidence.detail


@pytest.mark.parametrize("name", planning.NAMES)
def test_a_right_server_passes(answered_by, name):
    evidence = answered_by(Canned, name)
    assert evidence.outcome == "PASS", evidence.detail


def test_a_server_that_does_not_start_fails_with_what_it_said(cpu, run_case, monkeypatch):
    monkeypatch.setattr(process, "_shared", {})
    monkeypatch.setenv("VLLM_CORE_NO_SUCH_VARIABLE", "1")
    evidence = run_case(cpu, "server:completions_are_right")
    assert evidence.outcome == "FAIL"
    assert "VLLM_CORE_NO_SUCH_VARIABLE" in evidence.detail


def test_a_real_server_passes_every_case_and_ends_in_order(cpu, run_case, monkeypatch):
    monkeypatch.setattr(process, "_shared", {})
    for name in planning.NAMES:
        evidence = run_case(cpu, f"server:{name}")
        assert evidence.outcome == "PASS", (name, evidence.detail)
    assert not process._shared["cpu"].alive
