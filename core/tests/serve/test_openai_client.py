"""The official `openai` and `anthropic` clients, and the examples of the docs, against a real server with a real model."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, Field

pytestmark = pytest.mark.model

KEY = "test-key"
PROMPT = "The capital of France is"
GREEDY: dict[str, Any] = {"model": "smol", "temperature": 0, "max_tokens": 12}
HI: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


DOCS = Path(__file__).parents[3] / "docs" / "serving.md"
EXAMPLES = re.findall(r"```bash\n(curl .*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
OF_TEXT = [one for one in EXAMPLES if ":8000/" in one]
SHORT: dict[str, Any] = {**GREEDY, "max_tokens": 60}
JOHN: list[Any] = [{"role": "user", "content": "John is thirty."}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "description": "now", "parameters": CITY}}]


class Person(BaseModel):
    """What is asked for."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=120)
    mood: Literal["good", "bad"]


@pytest.fixture
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def metric(server: str, name: str) -> float:
    for family in text_string_to_metric_families(httpx.get(f"{server}/metrics").text):
        for sample in family.samples:
            if sample.name == name:
                return sample.value
    raise AssertionError(f"no metric {name}")


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smol", "demo"]
    assert client.models.retrieve("smol").id == "smol"


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt=PROMPT, **GREEDY)
    assert "Paris" in answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


def test_streamed_completion_is_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPT, **GREEDY)
    asked: dict[str, Any] = {"prompt": PROMPT, "stream": True, "stream_options": {"include_usage": True}, **GREEDY}
    # What is there when a chunk is sent goes with it: few come where the server had to wait for a core.
    streams = [list(client.completions.create(**asked)) for _ in range(5)]
    assert max(map(len, streams)) > 3, "text comes as it is made"
    assert whole.usage is not None
    for chunks in streams:
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_token_ids_give_the_text_of_their_prompt(client: openai.OpenAI) -> None:
    texts = client.completions.create(prompt=[PROMPT, "2 + 2 ="], echo=True, **GREEDY)
    assert [choice.text.startswith(p) for choice, p in zip(texts.choices, [PROMPT, "2 + 2 ="], strict=True)] == [True, True]
    ids = client.completions.create(prompt=[[504, 3575, 282], [504]], echo=True, **GREEDY)
    assert len(ids.choices) == 2
    assert all(choice.text for choice in ids.choices)


def test_n_with_a_seed_repeats(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {**GREEDY, "temperature": 1.0, "seed": 7, "n": 3}
    one, two = (client.completions.create(prompt=PROMPT, **options) for _ in range(2))
    texts = [choice.text for choice in one.choices]
    assert [choice.index for choice in one.choices] == [0, 1, 2]
    assert texts == [choice.text for choice in two.choices]
    assert len(set(texts)) == 3, "each sequence has its own random numbers"


def test_stop_is_not_part_of_the_text(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
    stop = whole.split()[2]
    for stream in (False, True):
        answer = client.completions.create(prompt=PROMPT, stop=stop, stream=stream, **GREEDY)
        choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
        assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
        assert choices[-1].finish_reason == "stop"


def test_logprobs_of_greedy_tokens_are_the_best(client: openai.OpenAI) -> None:
    logprobs = client.completions.create(prompt=PROMPT, logprobs=3, **GREEDY).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.token_logprobs) == 12
    for value, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert value == max(top.values())
        assert value <= 0


def test_chat_and_its_stream_agree(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=HI, **GREEDY)
    assert whole.choices[0].message.role == "assistant"
    assert "Paris" in (whole.choices[0].message.content or "")
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(messages=HI, stream=True, **GREEDY)]
    assert chunks[0].delta.role == "assistant"
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].finish_reason == whole.choices[0].finish_reason


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(messages=HI, logprobs=True, top_logprobs=2, **GREEDY)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content
    assert all(entry.top_logprobs[0].token == entry.token and len(entry.top_logprobs) == 2 for entry in content)


def test_a_chat_may_use_the_rest_of_the_context(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "word " * 440}]
    answer = client.chat.completions.create(model="smol", messages=long, temperature=0, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.prompt_tokens < 512
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.anyio
async def test_async_requests_at_once_get_their_own_answers(server: str, client: openai.OpenAI) -> None:
    prompts = [f"{number} and {number + 1} and" for number in range(8)]
    alone = [client.completions.create(prompt=prompt, **GREEDY).choices[0].text for prompt in prompts]
    async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key=KEY, max_retries=0) as many:

        async def streamed(prompt: str) -> str:
            stream = await many.completions.create(prompt=prompt, stream=True, **GREEDY)
            return "".join([choice.text async for chunk in stream for choice in chunk.choices])

        together = await asyncio.gather(*(streamed(prompt) for prompt in prompts))
    assert together == alone


def test_a_stream_that_is_closed_ends_in_the_engine(server: str, client: openai.OpenAI) -> None:
    options: dict[str, Any] = {**GREEDY, "max_tokens": 500, "extra_body": {"ignore_eos": True}}
    with client.completions.create(prompt=PROMPT, stream=True, **options) as stream:
        next(iter(stream))
    limit = time.monotonic() + 60
    while metric(server, "vllm:num_requests_running") and time.monotonic() < limit:
        time.sleep(0.05)
    assert metric(server, "vllm:num_requests_running") == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a " * 600}, "prompt"),
        ({"prompt": "a" * 10_000_000}, "prompt"),
        ({"prompt": [1, 10**6]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "extra_body": {"stop_token_ids": [10**6]}}, "stop_token_ids"),
        ({"prompt": "a", "logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
    ],
)
def test_bad_requests_are_bad_request_errors(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{**GREEDY, **fields})
    assert caught.value.param == param
    assert "Paris" in client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text, "nothing else is disturbed"


def test_a_lone_surrogate_is_a_400(server: str) -> None:
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    answer = httpx.post(f"{server}/v1/completions", content=b'{"prompt": "\\ud800"}', headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "body")


def test_keys_and_names_are_checked(server: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(prompt=PROMPT, **{**GREEDY, "model": "other"})
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_a_generating_model_refuses_to_embed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="runner"):
        client.embeddings.create(model="smol", input="a")


def test_metrics_count_what_was_done(server: str, client: openai.OpenAI) -> None:
    before = metric(server, "vllm:generation_tokens_total")
    client.completions.create(prompt=PROMPT, **GREEDY)
    assert metric(server, "vllm:generation_tokens_total") == before + 12
    assert metric(server, "vllm:time_to_first_token_seconds_count") >= 1
    assert metric(server, "vllm:platform_info") == 1


def test_parse_brings_an_object_of_the_schema_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.parse(messages=JOHN, response_format=Person, **SHORT)
    assert isinstance(whole.choices[0].message.parsed, Person)
    with client.chat.completions.stream(messages=JOHN, response_format=Person, **SHORT) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == whole.choices[0].message.parsed


def test_a_required_tool_is_called_with_arguments_of_its_schema(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"messages": JOHN, "tools": TOOLS, "parallel_tool_calls": False, **SHORT}
    choice = client.chat.completions.create(tool_choice="required", **options).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, list(json.loads(call.function.arguments))) == ("get_weather", ["city"])


def test_a_named_tool_is_streamed(client: openai.OpenAI) -> None:
    chosen: Any = {"type": "function", "function": {"name": "get_weather"}}
    chunks = client.chat.completions.create(messages=JOHN, tools=TOOLS, tool_choice=chosen, stream=True, **SHORT)
    calls = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]
    assert calls[0].function is not None
    assert (calls[0].function.name, calls[0].index) == ("get_weather", 0)
    assert len({call.id for call in calls if call.id}) == 1
    arguments = "".join(call.function.arguments or "" for call in calls if call.function is not None)
    assert list(json.loads(arguments)) == ["city"]
    assert len(calls) > 2, "arguments come as they are made"


def test_calls_and_their_results_go_back_into_the_conversation(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    talk: list[Any] = [
        *JOHN,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = client.chat.completions.create(messages=talk, tools=TOOLS, **GREEDY)
    assert answer.choices[0].message.content


def test_responses_whole_and_streamed_agree(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "smol", "input": "Hi there", "max_output_tokens": 12, "temperature": 0}
    whole = client.responses.create(**options)
    assert whole.output_text
    assert whole.usage is not None
    assert whole.usage.output_tokens > 0
    with client.responses.stream(**options) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == whole.output_text
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds.count("response.output_text.delta") > 2
    assert kinds[-1] in ("response.completed", "response.incomplete")


def test_responses_parse_and_call_tools(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "smol", "input": "John is thirty.", "max_output_tokens": 60, "temperature": 0}
    assert isinstance(client.responses.parse(text_format=Person, **options).output_parsed, Person)
    tool: Any = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": False}
    chosen: Any = {"type": "function", "name": "get_weather"}
    (item,) = client.responses.create(tools=[tool], tool_choice=chosen, **options).output
    assert item.type == "function_call"
    assert list(json.loads(item.arguments)) == ["city"]


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"choice": ["Paris", "London"]}, "Paris|London"),
        ({"grammar": 'root ::= "a" [b-d] "e"'}, "a[b-d]e"),
    ],
)
def test_structured_text(client: openai.OpenAI, wanted: dict[str, Any], pattern: str) -> None:
    answer = client.completions.create(prompt=PROMPT, extra_body={"structured_outputs": wanted}, **GREEDY)
    assert re.fullmatch(pattern, answer.choices[0].text)


@pytest.mark.parametrize(
    "wanted",
    [{"regex": "("}, {"grammar": "root ::="}, {"json": {"type": "x"}}, {"grammar": 'root ::= "ab" [^\\x00-\\U0010ffff]'}],
)
def test_a_wrong_grammar_is_a_bad_request(client: openai.OpenAI, wanted: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(prompt=PROMPT, extra_body={"structured_outputs": wanted}, **GREEDY)
    assert caught.value.param == "structured_outputs"


def test_echo_brings_log_probabilities_of_the_prompt(client: openai.OpenAI) -> None:
    choice = client.completions.create(prompt=PROMPT, echo=True, logprobs=1, **GREEDY).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.token_logprobs is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in choice.logprobs.token_logprobs[1:])


COLD = {"temperature": 0}
"""Not every version of the client knows the field; the API does."""


@pytest.fixture
def claude(server: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server, auth_token=KEY, max_retries=0) as client:
        yield client


def test_anthropic_messages_whole_and_streamed_agree(claude: anthropic.Anthropic) -> None:
    options: dict[str, Any] = {"model": "smol", "max_tokens": 12, "messages": HI, "extra_body": COLD}
    whole = claude.messages.create(system="Be brief.", **options)
    assert whole.content[0].type == "text"
    assert whole.content[0].text
    assert whole.usage.output_tokens > 0
    with claude.messages.stream(system="Be brief.", **options) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().stop_reason == whole.stop_reason


def test_anthropic_tools_counts_and_errors(claude: anthropic.Anthropic) -> None:
    tool: Any = {"name": "get_weather", "description": "now", "input_schema": CITY}
    options: dict[str, Any] = {"model": "smol", "messages": JOHN}
    chosen: Any = {"type": "tool", "name": "get_weather"}
    with claude.messages.stream(max_tokens=60, tools=[tool], tool_choice=chosen, extra_body=COLD, **options) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    assert message.content[0].type == "tool_use"
    assert list(message.content[0].input) == ["city"]
    assert claude.messages.count_tokens(**options).input_tokens > 5
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.messages.create(max_tokens=0, **options)
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(max_tokens=1, **{**options, "model": "other"})


def test_tokens_and_back(server: str) -> None:
    options: dict[str, Any] = {"headers": {"authorization": f"Bearer {KEY}"}, "timeout": 60}
    tokens = httpx.post(f"{server}/tokenize", json={"prompt": PROMPT, "return_token_strs": True}, **options).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert "".join(tokens["token_strs"]) == PROMPT
    assert httpx.post(f"{server}/detokenize", json={"tokens": tokens["tokens"]}, **options).json() == {"prompt": PROMPT}


def run_example(address: str, example: str) -> None:
    key = f"curl -sS -f -H 'authorization: Bearer {KEY}' "
    command = re.sub(r"http://127.0.0.1:800[01]", address, example).replace("curl ", key)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, (example, done.stdout, done.stderr)
    assert done.stdout.strip()


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="the examples are curl commands")


@needs_curl
@pytest.mark.parametrize("example", OF_TEXT, ids=[re.findall(r":8000(\S+)", one)[0] for one in OF_TEXT])
def test_every_example_of_the_docs_runs(server: str, example: str) -> None:
    run_example(server, example)


async def embedded(address: str, text: str) -> list[float]:
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
        return (await client.embeddings.create(model="mini", input=text)).data[0].embedding


def test_embeddings_of_an_encoder(model_file: Callable[[str], Path], tmp_path: Path, serve_model: Any) -> None:
    with (
        serve_model(model_file("all-minilm-l6-v2"), tmp_path / "log", "--served-model-name", "mini") as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client,
    ):
        texts = ["A cat sits on the mat.", "A kitten is on the rug.", "Stocks fell on Monday."]
        answer = client.embeddings.create(model="mini", input=texts)
        cat, kitten, stocks = (item.embedding for item in answer.data)
        assert len(cat) == 384
        assert sum(a * b for a, b in zip(cat, kitten, strict=True)) > sum(a * b for a, b in zip(cat, stocks, strict=True)) + 0.2
        floats = client.embeddings.create(model="mini", input=texts[0], encoding_format="float").data[0].embedding
        assert floats == pytest.approx(cat, abs=1e-5)
        assert len(client.embeddings.create(model="mini", input=texts[0], dimensions=64).data[0].embedding) == 64
        assert asyncio.run(embedded(address, texts[0])) == pytest.approx(cat, abs=1e-5)
        options: dict[str, Any] = {"headers": {"authorization": f"Bearer {KEY}"}, "timeout": 60}
        ranked = httpx.post(
            f"{address}/v1/rerank", json={"query": texts[0], "documents": texts[1:], "top_n": 1}, **options
        ).json()
        assert [one["document"]["text"] for one in ranked["results"]] == [texts[1]]
        scores = httpx.post(f"{address}/score", json={"text_1": texts[0], "text_2": texts[1:]}, **options).json()
        assert scores["data"][0]["score"] == pytest.approx(ranked["results"][0]["relevance_score"])
        assert scores["data"][0]["score"] > scores["data"][1]["score"]
        pooled = httpx.post(f"{address}/pooling", json={"input": texts[0]}, **options).json()
        assert pooled["data"][0]["data"] == pytest.approx(cat, abs=1e-5)
        refused = httpx.post(f"{address}/classify", json={"input": texts[0]}, **options)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        examples = [one for one in EXAMPLES if ":8001/" in one]
        assert len(examples) == 2
        for example in examples if shutil.which("curl") else ():
            run_example(address, example)
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="mini", input="word " * 1000)
        assert caught.value.param == "prompt"
        with pytest.raises(openai.BadRequestError, match="runner"):
            client.completions.create(model="mini", prompt="a")
