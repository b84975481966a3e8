"""L4: requests as clients send them. Tokens are judged like those of an engine."""

from __future__ import annotations

import itertools
import json
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_conformance.case import Evidence, Subject
from vllm_conformance.cases.runs.engines import prompt_of
from vllm_conformance.cases.runs.expect import expect
from vllm_conformance.cases.runs.process import MAX_LEN, NAME, SLOTS, Server, completion, server_of
from vllm_conformance.cases.runs.teacher import Marks

IDLE_S = 15.0
END_S = 40.0
TRIES = 20


def completions_are_right(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Health, the list of models, and completions of prompts in tokens and in text."""
    server, marks = server_of(subject), Marks()
    expect(server.get("/health")[0] == 200, "/health is not 200")
    status, text = server.get("/v1/models")
    names = [model["id"] for model in json.loads(text)["data"]]
    expect(status == 200 and names == [NAME], f"/v1/models answers {status} with {names}")
    for length in (1, 16, 50):
        prompt = prompt_of(length, 3)
        _judge(marks, server, prompt, 10, server.complete(prompt=prompt, max_tokens=10))
    status, answer = server.complete(prompt="a text", max_tokens=5, logprobs=2)
    expect(status == 200, f"a prompt in text is answered with {status}: {answer}")
    choice = answer["choices"][0]
    expect(len(choice["logprobs"]["token_logprobs"]) == 5, "5 tokens were asked for, with log-probabilities")
    expect(answer["usage"]["prompt_tokens"] == len("a text"), f"usage is {answer['usage']}")
    return _evidence(server, marks)


def streams_are_the_same_text(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Pieces, put together, are the text and tokens that come in one."""
    server, marks = server_of(subject), Marks()
    for length in (5, 33):
        prompt = prompt_of(length, 4)
        choice = _judge(marks, server, prompt, 20, server.complete(prompt=prompt, max_tokens=20))
        pieces = [piece["choices"][0] for piece in server.pieces(prompt=prompt, max_tokens=20) if piece["choices"]]
        text = "".join(piece["text"] for piece in pieces)
        ids = [token for piece in pieces for token in piece["token_ids"]]
        expect(text == choice["text"], f"streamed {text!r}, in one {choice['text']!r}")
        expect(ids == choice["token_ids"], f"streamed tokens {ids}, in one {choice['token_ids']}")
        ends = [piece["finish_reason"] for piece in pieces if piece["finish_reason"]]
        expect(ends == ["length"], f"the stream's ends are {ends}")
    # Tokens that are there when a piece is sent go with it: a server that has to wait for a core may send all in one.
    streams = (server.pieces(prompt=prompt_of(33, 4), max_tokens=200) for _ in range(TRIES))
    expect(any(len(list(stream)) > 1 for stream in streams), f"200 tokens came in one piece, {TRIES} times")
    return _evidence(server, marks)


def several_choices_and_prompts(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Two prompts with two sequences each, in their order; equal seeds repeat."""
    server, marks = server_of(subject), Marks()
    prompts = [prompt_of(9, 1), prompt_of(21, 2)]
    status, answer = server.complete(prompt=prompts, n=2, max_tokens=6)
    expect(status == 200, f"answered with {status}: {answer}")
    indexes = [choice["index"] for choice in answer["choices"]]
    expect(sorted(indexes) == [0, 1, 2, 3], f"choices have the indexes {indexes}")
    for choice in answer["choices"]:
        marks.add("llama", server.dtype, prompts[choice["index"] // 2], choice["token_ids"])
    drawn = [server.complete(prompt=prompts[0], temperature=1.2, seed=seed, max_tokens=12)[1] for seed in (1, 1, 2)]
    ids = [one["choices"][0]["token_ids"] for one in drawn]
    expect(ids[0] == ids[1] != ids[2], f"seeds 1, 1 and 2 gave {ids}")
    return _evidence(server, marks)


def wrong_requests_are_refused_and_the_next_served(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Each with its status and a message, and none disturbs the engine."""
    server, marks = server_of(subject), Marks()
    wrong: Sequence[tuple[str, bytes, int]] = (
        ("no JSON", b'{"model": ', 400),
        ("no prompt", json.dumps({"model": NAME}).encode(), 400),
        ("an unknown field", completion(prompt="a", no_such_field=1), 400),
        ("a negative temperature", completion(prompt="a", temperature=-1), 400),
        ("a token that does not exist", completion(prompt=[10**6], max_tokens=1), 400),
        ("a prompt longer than the context", completion(prompt=prompt_of(MAX_LEN + 1), max_tokens=1), 400),
        ("an unknown model", json.dumps({"model": "another", "prompt": "a"}).encode(), 404),
    )
    for what, body, expected in wrong:
        status, answer = server.post("/v1/completions", body)
        expect(status == expected, f"{what} is answered with {status}, not {expected}: {str(answer)[:200]}")
        expect(bool(answer.get("error", {}).get("message")), f"{what} is answered without a message: {str(answer)[:200]}")
        prompt = prompt_of(7, 5)
        _judge(marks, server, prompt, 4, server.complete(prompt=prompt, max_tokens=4))
    return _evidence(server, marks)


def an_abort_in_midstream_frees_blocks(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """A client goes away after a few tokens: its request ends, and its blocks come back."""
    server, marks = server_of(subject), Marks()
    in_midstream = 0
    for _ in range(TRIES):
        stream = server.pieces(prompt=prompt_of(40, 6), max_tokens=MAX_LEN - 50)
        *_, last = itertools.islice(stream, 3)
        stream.close()
        left = server.idle_within(IDLE_S)
        expect(not left, f"a client went away, and {left}")
        in_midstream += last["choices"][0]["finish_reason"] is None
        if in_midstream == 3:
            break
    expect(in_midstream == 3, f"of {TRIES} streams {in_midstream} had more than their first pieces")
    prompt = prompt_of(11, 7)
    _judge(marks, server, prompt, 6, server.complete(prompt=prompt, max_tokens=6))
    return _evidence(server, marks)


def overload_is_answered(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Six times as many requests at once as there are slots: all are answered, rightly."""
    server, marks = server_of(subject), Marks()
    prompts = [prompt_of(3 + 2 * n, n) for n in range(6 * SLOTS)]
    answers = _together([lambda prompt=prompt: server.complete(prompt=prompt, max_tokens=12) for prompt in prompts])  # type: ignore[misc]
    for prompt, answer in zip(prompts, answers, strict=True):
        _judge(marks, server, prompt, 12, answer)
    return _evidence(server, marks)


def aborts_under_load_leave_nothing(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Clients come and go at random; those that stay get what they would get alone."""
    server, marks, rng = server_of(subject), Marks(), random.Random(8)
    jobs = [(prompt_of(rng.randint(1, 60), n), rng.random() < 0.5, rng.randint(0, 4)) for n in range(20)]

    def one(prompt: list[int], leaves: bool, after: int) -> list[int]:
        tokens: list[int] = []
        stream = server.pieces(prompt=prompt, max_tokens=16)
        for number, piece in enumerate(stream):
            tokens += piece["choices"][0]["token_ids"] if piece["choices"] else []
            if leaves and number >= after:
                stream.close()
                break
        return tokens

    found = _together([lambda job=job: one(*job) for job in jobs])  # type: ignore[misc]
    for (prompt, leaves, _), tokens in zip(jobs, found, strict=True):
        expect(leaves or len(tokens) == 16, f"a client that stayed got {len(tokens)} of 16 tokens")
        marks.add("llama", server.dtype, prompt, tokens)
    left = server.idle_within(IDLE_S)
    expect(not left, left)
    return _evidence(server, marks)


def a_signal_ends_it_in_order(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """SIGTERM: what runs is finished, nothing new is taken, the exit status is 0."""
    server, marks = server_of(subject), Marks()
    prompt = prompt_of(12, 9)
    stream = server.pieces(prompt=prompt, max_tokens=40)
    tokens = list(next(stream)["choices"][0]["token_ids"])
    server.process.send_signal(signal.SIGTERM)
    for piece in stream:
        tokens += piece["choices"][0]["token_ids"] if piece["choices"] else []
    try:
        status = server.process.wait(END_S)
    except subprocess.TimeoutExpired:
        server.kill()
        return Evidence("FAIL", f"it still runs {END_S:g} s after SIGTERM")
    expect(status == 0, f"exit status {status} after SIGTERM: {server.log()[-500:]}")
    expect(len(tokens) == 40, f"a running request got {len(tokens)} of 40 tokens when the signal came")
    expect("Traceback" not in server.log(), f"a traceback was printed: {server.log()[-800:]}")
    marks.add("llama", server.dtype, prompt, tokens)
    return _evidence(server, marks)


def _judge(marks: Marks, server: Server, prompt: Sequence[int], count: int, answered: tuple[int, Any]) -> Any:
    """Judge the first choice of a completion of ``count`` tokens, and return it."""
    status, answer = answered
    expect(status == 200, f"a request is answered with {status}: {str(answer)[:300]}")
    choice = answer["choices"][0]
    expect(len(choice["token_ids"]) == count, f"{len(choice['token_ids'])} tokens came, {count} were asked for")
    expect(choice["finish_reason"] == "length", f"the finish reason is {choice['finish_reason']!r}")
    marks.add("llama", server.dtype, prompt, choice["token_ids"])
    return choice


def _together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run all at once, each in a thread; raises the first error."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:  # noqa: BLE001 - raised below, in the case's own thread
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def _evidence(server: Server, marks: Marks) -> Evidence:
    problem = marks.problem(server.dtype)
    return Evidence("FAIL" if problem else "PASS", problem or f"{marks.tokens} tokens, {marks.ties} near-ties")
