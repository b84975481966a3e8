"""Texts as models of each family write them, cut in every way: always the same calls and the same text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_core.serve.conversation import AnswerReader, calls, texts
from vllm_core.serve.tools.json_calls import ListedCalls, NamedCall
from vllm_core.serve.tools.pieces import Call, Piece
from vllm_core.serve.tools.registry import tool_parser

NAMES = ("get_weather", "add", "search")
PARIS = {"city": "Paris", "unit": "celsius"}

HERMES = [
    ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}\n</tool_call>', "", [PARIS]),
    (
        'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}\n</tool_call>',
        "Let me look.",
        [PARIS],
    ),
    (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}</tool_call>"}]}}\n</tool_call>\n'
        '<tool_call>\n{"name": "search", "arguments": {"q": "a \\"quoted\\" {brace"}}\n</tool_call>',
        "",
        [{"a": 1, "b": [2, {"c": "}</tool_call>"}]}, {"q": 'a "quoted" {brace'}],
    ),
    ('<tool_call>{"arguments": {"city": "Paris", "unit": "celsius"}, "name": "get_weather"}</tool_call>', "", [PARIS]),
    ('<tool_call>{"name": "search", "arguments": {}}</tool_call>', "", [{}]),
    ('<tool_call>{"name": "search"}</tool_call>', "", [{}]),
    ('<tool_call>{"name": "search", "arguments": "{\\"q\\": \\"x\\"}"}</tool_call>', "", [{"q": "x"}]),
    ('<tool_call>{"name": "search", "arguments": {"q": "ü😀\\n"}}</tool_call> Done.', " Done.", [{"q": "ü😀\n"}]),
    ('<tool_call>{"name": "search", "arguments": {"q": 1}}<tool_call>{"name": "add", "arguments": {}}', "", [{"q": 1}, {}]),
    ("No call at all: a < b, <tool", "No call at all: a < b, <tool", []),
    ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
    ('<tool_call>{"name": 3, "arguments": {}}', '<tool_call>{"name": 3, "arguments": {}}', []),
    ("Two words  ", "Two words  ", []),
]
LLAMA3 = [
    ('{"name": "get_weather", "parameters": {"city": "Paris", "unit": "celsius"}}', "", [PARIS]),
    ('<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", "unit": "celsius"}}', "", [PARIS]),
    ('{"name": "add", "parameters": {"a": 1}}; {"name": "search", "parameters": {"q": "x"}}', "", [{"a": 1}, {"q": "x"}]),
    ('{"type": "function", "name": "add", "parameters": {"a": 1, "b": null}}', "", [{"a": 1, "b": None}]),
    ('[{"name": "add", "arguments": {"a": 1}}]', "", [{"a": 1}]),
    ("The answer is 4.", "The answer is 4.", []),
    ('{"name": "Bob", "parameters": {"age": 3}}', '{"name": "Bob", "parameters": {"age": 3}}', []),
    ('{"answer": 4}', '{"answer": 4}', []),
    ("[1, 2]", "[1, 2]", []),
    ("<|python", "<|python", []),
    ("{", "{", []),
]
MISTRAL = [
    ('[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}]', "", [PARIS]),
    (
        'Sure.[TOOL_CALLS][{"name": "add", "arguments": {"a": [1, "]"]}}, {"name": "search", "arguments": {"q": "x"}}]',
        "Sure.",
        [{"a": [1, "]"]}, {"q": "x"}],
    ),
    ('[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "unit": "celsius"}', "", [PARIS]),
    ('[TOOL_CALLS]add{"a": {"b": "}"}}[TOOL_CALLS]search{"q": "x"}', "", [{"a": {"b": "}"}}, {"q": "x"}]),
    ("Nothing [to] call [TOOL", "Nothing [to] call [TOOL", []),
    ("[TOOL_CALLS] sorry", "[TOOL_CALLS] sorry", []),
]
CASES = [(name, *case) for name, cases in (("hermes", HERMES), ("llama3_json", LLAMA3), ("mistral", MISTRAL)) for case in cases]


def read(stream: Any, parts: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Text, and names and arguments of the calls."""
    pieces: list[Piece] = [piece for part in parts for piece in stream.push(part)] + stream.flush()
    found = calls(pieces)
    indices = [piece.index for piece in pieces if isinstance(piece, Call)]
    assert indices == list(range(len(found)))
    assert len({call.id for call, _ in found}) == len(found)
    return texts(pieces)[0], [(call.name, arguments) for call, arguments in found]


@pytest.mark.parametrize(("name", "text", "shown", "arguments"), CASES)
def test_calls_and_text_are_told_apart(name: str, text: str, shown: str, arguments: list[Any]) -> None:
    found = read(tool_parser(name).make(NAMES), [text])
    assert found[0] == shown
    assert [json.loads(one) for _, one in found[1]] == arguments
    assert all(called in NAMES for called, _ in found[1])


@pytest.mark.parametrize(("name", "text", "shown", "arguments"), CASES)
def test_however_a_text_is_cut_the_same_comes_out(name: str, text: str, shown: str, arguments: list[Any]) -> None:
    make = tool_parser(name).make
    whole = read(make(NAMES), [text])
    assert read(make(NAMES), list(text)) == whole, "character by character"
    for at in range(1, len(text)):
        assert read(make(NAMES), [text[:at], text[at:]]) == whole, f"cut at {at}"
    for size in (2, 3, 5, 7):
        assert read(make(NAMES), [text[i : i + size] for i in range(0, len(text), size)]) == whole, f"parts of {size}"


def test_arguments_are_streamed_as_they_are_written() -> None:
    stream = tool_parser("hermes").make(NAMES)
    assert stream.push('<tool_call>{"name": "search", "argu') == []
    begin = stream.push('ments": {"q": "long')
    assert [type(piece).__name__ for piece in begin] == ["Call", "Arguments"]
    assert [piece.text for piece in stream.push("er")] == ["er"]


def test_a_required_call_is_read_from_a_list_and_a_named_one_is_its_arguments() -> None:
    text = '[{"name": "add", "parameters": {"a": 1}},\n{"name": "search", "parameters": {"q": "x"}}]'
    for parts in ([text], list(text)):
        assert read(ListedCalls(None), parts) == ("", [("add", '{"a": 1}'), ("search", '{"q": "x"}')])
        assert read(NamedCall("add"), ['{"a"', ": 1}"]) == ("", [("add", '{"a": 1}')])


def test_without_parallel_calls_the_first_is_all() -> None:
    text = HERMES[2][0]
    reader = AnswerReader(None, tool_parser("hermes").make(NAMES), parallel=False)
    assert [call.name for call, _ in calls(reader.push(text, last=True))] == ["add"]
    assert reader.calls == 1


def test_a_call_that_was_cut_off_keeps_what_there_is() -> None:
    found = read(tool_parser("hermes").make(NAMES), ['<tool_call>{"name": "search", "arguments": {"q": "x'])
    assert found == ("", [("search", '{"q": "x')])


def test_deeply_nested_arguments_end_as_text_and_not_in_recursion() -> None:
    text = '<tool_call>{"name": "search", "arguments": ' + '{"a": ' * 5000
    shown, made = read(tool_parser("hermes").make(NAMES), [text])
    assert [name for name, _ in made] == ["search"]
    assert shown.startswith('{"a": ')


def test_half_of_a_surrogate_pair_is_no_name_of_a_call() -> None:
    """JSON can write it, an answer could not."""
    text = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'
    shown, made = read(tool_parser("hermes").make(NAMES), [text])
    assert made == []
    assert shown.encode()
