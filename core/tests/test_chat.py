"""Sampling defaults of a model, and what chat needs of it."""

from __future__ import annotations

import pytest

from vllm_core.chat import default_sampling, render
from vllm_core.errors import RequestError


class Templated:
    chat_template = "default"

    def apply_chat_template(self, messages: list[dict[str, str]], *, chat_template: str | None, **options: object) -> str:
        return f"{chat_template or self.chat_template}:{len(messages)}:{sorted(options)}"


class Plain(Templated):
    chat_template = None


MESSAGES = [{"role": "user", "content": "hi"}]


def test_the_models_own_sampling_is_the_default() -> None:
    params = default_sampling({"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": 2})
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.6, 0.9, 20, 1.05)
    assert params.max_tokens == 16


def test_a_model_that_says_nothing_gets_ours() -> None:
    assert default_sampling({}).temperature == 1.0
    assert default_sampling({"temperature": None}).temperature == 1.0


def test_a_model_that_does_not_sample_is_greedy() -> None:
    assert default_sampling({"do_sample": False, "temperature": 0.7}).is_greedy


def test_the_models_length_is_the_default_length() -> None:
    assert default_sampling({"max_new_tokens": 99}).max_tokens == 99


def test_a_wrong_default_of_a_model_is_an_error_that_names_it() -> None:
    with pytest.raises(RequestError, match="top_p"):
        default_sampling({"top_p": 3.0})


def test_the_users_template_goes_before_the_models() -> None:
    assert render(Templated(), MESSAGES).startswith("default:1")
    assert render(Templated(), MESSAGES, chat_template="mine").startswith("mine:1")
    assert render(Plain(), MESSAGES, chat_template="mine").startswith("mine:1")


@pytest.mark.parametrize(("tokenizer", "found"), [(None, "no tokenizer"), (Plain(), "without a template")])
def test_a_model_that_cannot_chat_says_why(tokenizer: object, found: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(tokenizer, MESSAGES)
    assert found in caught.value.found


def test_a_conversation_needs_a_message() -> None:
    with pytest.raises(RequestError, match="empty"):
        render(Templated(), [])


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ("hi", "str"),
        ({"content": "hi"}, "role None"),
        ({"role": 1, "content": "hi"}, "role 1"),
        ({"role": "user"}, "no content"),
        ({"role": "user", "contents": "hi"}, "no content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "no content"),
    ],
)
def test_a_message_that_a_template_would_render_as_nothing_is_refused(message: object, found: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(Templated(), [*MESSAGES, message])
    assert (caught.value.on, caught.value.found) == ("messages[1]", found)


def test_a_message_may_call_tools_instead_of_speaking() -> None:
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    assert render(Templated(), [*MESSAGES, call]).startswith("default:2")
    assert render(Templated(), [{"role": "user", "content": ""}]).startswith("default:1")


def test_text_parts_of_a_message_are_one_text() -> None:
    """Templates of most models join content to text, and know no lists."""

    class Echo(Templated):
        def apply_chat_template(self, messages: list[dict[str, str]], *, chat_template: str | None, **options: object) -> str:
            return repr([message["content"] for message in messages])

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(Echo(), [{"role": "user", "content": parts}, *MESSAGES]) == "['a\\nb', 'hi']"
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[1\]") as caught:
        render(Echo(), [{"role": "user", "content": [parts[0], {"type": "image_url", "image_url": {"url": "x"}}]}])
    assert "image_url" in caught.value.found
