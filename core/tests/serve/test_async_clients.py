"""The asynchronous `openai` and `anthropic` clients against a real server: what the others do, streamed and side by side."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, Field

pytestmark = [pytest.mark.model, pytest.mark.anyio]

KEY = "test-key"
SHORT: dict[str, Any] = {"model": "smol", "temperature": 0, "max_tokens": 60}
JOHN: list[Any] = [{"role": "user", "content": "John is thirty."}]


class Person(BaseModel):
    """What is asked for."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=120)
    mood: Literal["good", "bad"]


class Weather(BaseModel):
    """Arguments of a tool."""

    city: str = Field(max_length=8)


@pytest.fixture
async def client(server: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(server: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=server, auth_token=KEY, max_retries=0) as client:
        yield client


async def test_parse_brings_an_object_of_the_schema_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.parse(messages=JOHN, response_format=Person, **SHORT)
    assert isinstance(whole.choices[0].message.parsed, Person)
    async with client.chat.completions.stream(messages=JOHN, response_format=Person, **SHORT) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed


async def test_a_tool_made_of_a_class_is_called_with_its_arguments(client: openai.AsyncOpenAI) -> None:
    tool = openai.pydantic_function_tool(Weather, name="get_weather")
    options: dict[str, Any] = {"messages": JOHN, "tools": [tool], **SHORT}
    chosen: Any = {"type": "function", "function": {"name": "get_weather"}}
    whole = await client.chat.completions.parse(tool_choice=chosen, **options)
    (call,) = whole.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)
    pieces = [chunk async for chunk in await client.chat.completions.create(tool_choice=chosen, stream=True, **options)]
    calls = [call for chunk in pieces for choice in chunk.choices for call in choice.delta.tool_calls or []]
    arguments = "".join(one.function.arguments or "" for one in calls if one.function is not None)
    assert json.loads(arguments) == json.loads(call.function.arguments)
    assert pieces[-1].choices[0].finish_reason == "stop", "who names the function learns how the answer ended"


async def test_a_model_that_may_call_answers_or_calls(client: openai.AsyncOpenAI) -> None:
    tool = openai.pydantic_function_tool(Weather, name="get_weather")
    answer = await client.chat.completions.create(messages=JOHN, tools=[tool], tool_choice="auto", **SHORT)
    message = answer.choices[0].message
    assert bool(message.content) or bool(message.tool_calls)


async def test_responses_whole_streamed_and_parsed(client: openai.AsyncOpenAI) -> None:
    options: dict[str, Any] = {"model": "smol", "input": "John is thirty.", "max_output_tokens": 60, "temperature": 0}
    whole = await client.responses.create(**options)
    async with client.responses.stream(**options) as stream:
        kinds = [event.type async for event in stream]
        assert (await stream.get_final_response()).output_text == whole.output_text
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert isinstance((await client.responses.parse(text_format=Person, **options)).output_parsed, Person)
    tool: Any = {"type": "function", "name": "get_weather", "parameters": Weather.model_json_schema(), "strict": False}
    (item,) = (await client.responses.create(tools=[tool], tool_choice="required", parallel_tool_calls=False, **options)).output
    assert item.type == "function_call"
    assert set(json.loads(item.arguments)) == {"city"}


async def test_different_requests_at_once_do_not_mix(client: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic) -> None:
    parsed, text, message = await asyncio.gather(
        client.chat.completions.parse(messages=JOHN, response_format=Person, **SHORT),
        client.completions.create(prompt="The capital of France is", **{**SHORT, "max_tokens": 8}),
        claude.messages.create(model="smol", max_tokens=8, messages=JOHN, extra_body={"temperature": 0}),
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)
    assert "Paris" in text.choices[0].text
    assert message.content[0].type == "text"


async def test_anthropic_messages_streamed_and_tools(claude: anthropic.AsyncAnthropic) -> None:
    options: dict[str, Any] = {"model": "smol", "messages": JOHN, "extra_body": {"temperature": 0}}
    whole = await claude.messages.create(max_tokens=12, **options)
    async with claude.messages.stream(max_tokens=12, **options) as stream:
        text = "".join([piece async for piece in stream.text_stream])
    assert whole.content[0].type == "text"
    assert text == whole.content[0].text
    tool: Any = {"name": "get_weather", "description": "now", "input_schema": Weather.model_json_schema()}
    message = await claude.messages.create(max_tokens=60, tools=[tool], tool_choice={"type": "any"}, **options)
    assert message.stop_reason == "tool_use"
    assert message.content[0].type == "tool_use"
    assert set(message.content[0].input) == {"city"}
    assert (await claude.messages.count_tokens(model="smol", messages=JOHN)).input_tokens > 5
