"""/v1/embeddings: forms of the input, encodings, errors."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Any

import pytest

from vllm_core.errors import RequestError
from vllm_core.sampling_params import PoolingParams

pytestmark = pytest.mark.anyio

PATH = "/v1/embeddings"


@pytest.fixture
def client(pooling_engine: Any, make_client: Any) -> Any:
    return make_client(pooling_engine)


async def test_answer_has_vectors_and_usage(client: Any) -> None:
    answer = (await client.post(PATH, {"model": "fake", "input": ["ab", "c"]})).json()
    assert answer.pop("id").startswith("embd-")
    assert answer.pop("created") > 0
    assert answer == {
        "object": "list",
        "model": "fake",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [0.5, -0.25, 2.0]},
            {"object": "embedding", "index": 1, "embedding": [0.5, -0.25, 1.0]},
        ],
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }


@pytest.mark.parametrize(
    ("value", "expected"), [("ab", ["ab"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])]
)
async def test_four_forms_of_the_input(client: Any, pooling_engine: Any, value: Any, expected: list[Any]) -> None:
    assert (await client.post(PATH, {"input": value})).status_code == 200
    assert [call[0] for call in pooling_engine.calls] == expected


async def test_base64_is_little_endian_float32(client: Any) -> None:
    answer = (await client.post(PATH, {"input": "ab", "encoding_format": "base64"})).json()
    assert struct.unpack("<3f", base64.b64decode(answer["data"][0]["embedding"])) == (0.5, -0.25, 2.0)


async def test_dimensions_reach_the_engine(client: Any, pooling_engine: Any) -> None:
    await client.post(PATH, {"input": "ab", "dimensions": 2})
    assert pooling_engine.calls[0][1] == PoolingParams(dimensions=2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": "2"}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimension": 2}, "dimension"),
        ({"input": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        ({}, "input"),
    ],
)
async def test_wrong_fields_are_named(client: Any, pooling_engine: Any, fields: dict[str, Any], param: str) -> None:
    answer = await client.post(PATH, fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert pooling_engine.calls == []


async def test_an_error_of_one_input_ends_the_others(client: Any, pooling_engine: Any) -> None:
    pooling_engine.gate = asyncio.Event()
    pooling_engine.errors["b"] = RequestError("Prompt is empty", on="prompt", found="none", expected="one", fix="send one")
    answer = await client.post(PATH, {"input": ["a", "b", "c"]})
    assert answer.status_code == 400
    assert len(pooling_engine.closed) == 3


async def test_a_request_that_the_engine_gave_up_is_a_500(client: Any, pooling_engine: Any) -> None:
    pooling_engine.failure = "op failed"
    assert (await client.post(PATH, {"input": "a"})).status_code == 500


async def test_a_client_that_goes_ends_its_request(client: Any, pooling_engine: Any, leaver: Any) -> None:
    pooling_engine.gate, leave = asyncio.Event(), asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, leave.set)
    await leaver(client.app, PATH, {"input": ["a", "b"]}, leave)
    assert len(pooling_engine.closed) == 2
