"""Health, the Plan, and what operators tell a server to do."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.anyio


async def test_a_server_whose_engine_starts_again_is_alive_and_not_ready(client: Any, engine: Any, engine_dead: Any) -> None:
    assert (await client.get("/health/ready")).status_code == 200
    engine.is_alive = False
    answer = await client.get("/health/ready")
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert "being started" in answer.json()["cause"]
    assert (await client.get("/health/live")).status_code == 200
    engine.error = engine_dead
    assert (await client.get("/health/live")).status_code == 503, "it has given up: start another"


async def test_requests_meanwhile_are_told_when_to_come_back(client: Any, engine: Any, engine_dead: Any) -> None:
    engine.errors["a"] = engine_dead
    answer = await client.post("/v1/completions", {"prompt": "a"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"]


async def test_the_plan_is_served_as_it_is(client: Any) -> None:
    assert (await client.get("/plan")).json() == {"platform": "fake"}


async def test_the_prefix_cache_is_reset_unless_requests_use_it(client: Any, engine: Any) -> None:
    assert (await client.send("POST", "/reset_prefix_cache")).json() == {"success": True}
    engine.cache_in_use = True
    assert (await client.send("POST", "/reset_prefix_cache")).status_code == 409


async def test_an_engine_that_cannot_sleep_says_so_in_four_parts(client: Any) -> None:
    for path in ("/sleep", "/sleep?level=2", "/wake_up"):
        answer = await client.send("POST", path)
        assert answer.status_code == 400
        assert all(part in answer.json()["error"]["message"] for part in ("Engine cannot sleep", "found", "expected", "fix"))
    assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}


async def test_an_engine_that_can_sleep_is_told_to(client: Any, engine: Any) -> None:
    said: list[Any] = []

    async def sleep(level: int = 1) -> None:
        said.append(level)

    async def wake_up(tags: list[str] | None = None) -> None:
        said.append(tags)

    async def is_sleeping() -> bool:
        return len(said) == 1

    engine.sleep, engine.wake_up, engine.is_sleeping = sleep, wake_up, is_sleeping
    assert (await client.send("POST", "/sleep?level=2")).json() == {"success": True}
    assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
    answer = await client.get("/health/ready")
    assert (answer.status_code, answer.json()["status"]) == (503, "asleep"), "a balancer sends its requests elsewhere"
    for path in ("/health", "/health/live", "/ping"):
        assert (await client.get(path)).status_code == 200, "nobody need start another"
    await client.send("POST", "/wake_up?tags=weights&tags=kv_cache")
    assert said == [2, ["weights", "kv_cache"]]
    assert (await client.get("/health/ready")).status_code == 200
    assert (await client.send("POST", "/sleep?level=x")).status_code == 400


async def test_fallbacks_restarts_and_refusals_are_counted(client: Any, engine: Any) -> None:
    engine.num_restarts = 3
    page = (await client.get("/metrics")).text
    for line in (
        'vllm:fallbacks_total{kind="reference",model_name="fake"} 5.0',
        'vllm:fallbacks_total{kind="host",model_name="fake"} 2.0',
        'vllm:fallbacks_total{kind="demotion",model_name="fake"} 1.0',
        'vllm:engine_restarts_total{model_name="fake"} 3.0',
        'vllm:requests_refused_total{model_name="fake"} 0.0',
    ):
        assert line in page


async def test_the_page_holds_nothing_from_elsewhere_and_forbids_it(client: Any, make_client: Any, engine: Any) -> None:
    for path in ("/", "/web/page.js", "/web/page.css", "/favicon.ico"):
        answer = await client.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        links = answer.text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in links
        assert "https://" not in links
        assert "<script>" not in links
        assert "style=" not in links
        assert "innerHTML" not in links
    assert (await make_client(engine, web_page=False).get("/")).status_code == 404


ACTIONS = ("/reset_prefix_cache", "/sleep", "/wake_up")


@pytest.mark.parametrize("path", ACTIONS)
@pytest.mark.parametrize("origin", ["http://elsewhere.example", "http://test.elsewhere.example", "null"])
async def test_a_page_of_another_origin_tells_the_server_nothing(client: Any, path: str, origin: str) -> None:
    """Without a body no browser asks before it sends; any page could put a local server to sleep."""
    answer = await client.send("POST", path, headers={"origin": origin})
    assert (answer.status_code, answer.json()["error"]["param"]) == (403, "origin")


async def test_the_servers_own_page_and_named_origins_tell_it_what_to_do(client: Any, make_client: Any, engine: Any) -> None:
    own = {"origin": "http://test"}
    assert (await client.send("POST", "/reset_prefix_cache", headers=own)).json() == {"success": True}
    named = make_client(engine, allowed_origins=("http://elsewhere.example",))
    other = {"origin": "http://elsewhere.example"}
    assert (await named.send("POST", "/reset_prefix_cache", headers=other)).json() == {"success": True}
