"""Models, health, version, the API key, request ids and the access log."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from vllm_core.elsewhere import instead
from vllm_core.version import __version__

pytestmark = pytest.mark.anyio


async def test_models_lists_every_served_name(client: Any) -> None:
    answer = (await client.get("/v1/models")).json()
    assert answer["object"] == "list"
    assert [model["id"] for model in answer["data"]] == ["fake", "alias"]
    model = answer["data"][0]
    assert model.pop("created") > 0
    assert model == {
        "id": "fake",
        "object": "model",
        "owned_by": "vllm-core",
        "root": "path/of/fake",
        "parent": None,
        "max_model_len": 64,
    }


async def test_one_model_by_name_also_with_slashes(client: Any, engine: Any) -> None:
    engine.model_names = ["org/name"]
    assert (await client.get("/v1/models/org/name")).json()["id"] == "org/name"
    answer = await client.get("/v1/models/other")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_health_follows_the_engine(client: Any, engine: Any, path: str, engine_dead: Any) -> None:
    assert (await client.get(path)).status_code == 200
    engine.is_alive = False
    assert (await client.get(path)).status_code == 503
    engine.error = engine_dead
    assert "exit status -9" in (await client.get(path)).json()["cause"]


async def test_version(client: Any) -> None:
    assert (await client.get("/version")).json() == {"version": __version__}


async def test_no_path_of_ours_is_said_to_be_elsewhere(client: Any) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert [path for path in paths if instead("paths", path)] == []


async def test_openapi_describes_the_bodies(client: Any) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    schema = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "temperature" in schema["properties"]


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer wrong", "Basic key-1", "key-1", "Bearer key-1x", "Bearer schlüssel", "Bearer key"],
)
async def test_without_a_known_key_everything_under_v1_is_closed(
    engine: Any, make_client: Any, authorization: str | None
) -> None:
    client = make_client(engine, api_keys=["key-1", "key-2"])
    headers = {} if authorization is None else {"authorization": authorization.encode("latin-1")}
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/v1/nothing")):
        answer = await client.send(method, path, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert engine.calls == []


@pytest.mark.parametrize("authorization", ["Bearer key-1", "bearer key-2", "Bearer  key-1 "])
async def test_each_key_opens(engine: Any, make_client: Any, authorization: str) -> None:
    client = make_client(engine, api_keys=["key-1", "key-2"])
    assert (await client.post("/v1/completions", {"prompt": "a"}, authorization=authorization)).status_code == 200


async def test_probes_and_metrics_need_no_key(engine: Any, make_client: Any) -> None:
    client = make_client(engine, api_keys=["key-1"])
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert (await client.get(path)).status_code == 200


async def test_a_request_id_comes_back(client: Any) -> None:
    answer = await client.get("/version", headers={"x-request-id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"


@pytest.mark.parametrize("sent", [None, "", "has space", "x" * 129, "tab\there"])
async def test_a_missing_or_unfit_request_id_is_replaced(client: Any, sent: str | None) -> None:
    answer = await client.get("/version", headers={} if sent is None else {"x-request-id": sent})
    assert len(answer.headers["x-request-id"]) == 32
    assert answer.headers["x-request-id"] != sent


async def test_errors_carry_the_request_id_too(client: Any) -> None:
    answer = await client.post("/v1/completions", b"{", **{"x-request-id": "abc-2"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (400, "abc-2")


async def test_access_log_has_no_contents(client: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="vllm_core.serve")
    await client.post("/v1/completions?token=hidden", {"prompt": "hidden"}, **{"x-request-id": "abc-3"})
    (record,) = [r for r in caplog.records if r.name == "vllm_core.serve"]
    assert record.getMessage().startswith("POST /v1/completions 200 ")
    assert record.getMessage().endswith("abc-3")
    assert "hidden" not in caplog.text
    assert "Hello" not in caplog.text


async def test_access_log_stays_one_line(client: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="vllm_core.serve")
    await client.get("/v1/models/a%0AINFO forged")
    assert all("\n" not in record.getMessage() for record in caplog.records if record.name == "vllm_core.serve")


async def test_a_path_of_any_length_is_answered_and_logged_in_short(client: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="vllm_core.serve")
    answer = await client.get("/" + "a" * 20_000)
    assert answer.status_code == 404
    assert "a" * 100 in answer.json()["error"]["message"]
    assert len(answer.text) < 2000
    assert all(len(record.getMessage()) < 2000 for record in caplog.records if record.name == "vllm_core.serve")


async def test_monitors_may_ask_with_head(client: Any, engine: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="vllm_core.serve")
    assert (await client.send("HEAD", "/health")).status_code == 200
    assert "HEAD /health 200" in caplog.text
    engine.is_alive = False
    assert (await client.send("HEAD", "/health")).status_code == 503
    assert (await client.send("HEAD", "/v1/completions")).status_code == 405
