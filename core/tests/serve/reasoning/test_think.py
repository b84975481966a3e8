"""Reasoning and answer of Qwen3 and DeepSeek-R1, cut in every way."""

from __future__ import annotations

import pytest

from vllm_core.serve.conversation import texts
from vllm_core.serve.reasoning.registry import closes, reasoning_parser

PLAIN, OPEN, CLOSED = "<|im_start|>assistant\n", "<|Assistant|><think>\n", "assistant\n<think>\n\n</think>\n\n"

CASES = [
    ("qwen3", PLAIN, "<think>\nHm < 3.\n</think>\n\nFour.", "Hm < 3.", "Four."),
    ("qwen3", PLAIN, "Four.", "", "Four."),
    ("qwen3", PLAIN, "<think>\n\n</think>\n\nFour.", "", "Four."),
    ("qwen3", PLAIN, "<think>\nstill thinking", "still thinking", ""),
    ("qwen3", PLAIN, "<thi", "", "<thi"),
    ("qwen3", OPEN, "Hm.\n</think>\nFour.", "Hm.", "Four."),
    ("qwen3", CLOSED, "Four </think>", "", "Four </think>"),
    ("deepseek_r1", OPEN, "Hm.</think>Four.", "Hm.", "Four."),
    ("deepseek_r1", PLAIN, "Hm.\n</think>\n\nFour.", "Hm.", "Four."),
    ("deepseek_r1", PLAIN, "<think>Hm.</think>Four.", "Hm.", "Four."),
    ("deepseek_r1", PLAIN, "Hm </thin", "Hm </thin", ""),
    ("deepseek_r1", CLOSED, "Four.", "", "Four."),
]


@pytest.mark.parametrize(("name", "prompt", "text", "reasoning", "answer"), CASES)
def test_reasoning_is_told_apart_however_the_text_is_cut(
    name: str, prompt: str, text: str, reasoning: str, answer: str
) -> None:
    cuts = [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]
    for parts in cuts:
        stream = reasoning_parser(name).make(prompt)
        pieces = [piece for part in parts for piece in stream.push(part)] + stream.flush()
        assert texts(pieces) == (answer, reasoning), parts


def test_a_prompt_that_closes_the_reasoning_has_none() -> None:
    assert closes(CLOSED)
    assert not closes(OPEN)
    assert not closes(PLAIN)


def test_reasoning_is_streamed_and_counted_while_it_lasts() -> None:
    stream = reasoning_parser("deepseek_r1").make(OPEN)
    assert texts(stream.push("One two")) == ("", "One two")
    assert stream.is_inside
    assert texts(stream.push(" </think> Three")) == ("Three", "")
    assert not stream.is_inside
