"""What operators ask a server: is it alive, is it ready, how is it doing, what was chosen; and what they tell it to do."""

from __future__ import annotations

import asyncio
from typing import Protocol, runtime_checkable

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Struct, UnsetType

from vllm_core.engine.messages import EngineStats
from vllm_core.errors import EngineError, UnsupportedError
from vllm_core.serve.context import Context
from vllm_core.serve.errors import RETRY_AFTER_S, HTTPRequestError, json_response
from vllm_core.serve.schema import short
from vllm_core.version import __version__

STATS_WAIT_S = 2.0
"""How long metrics wait for the engine, which answers between two steps: whoever scrapes them gives up after some seconds."""


class Status(Struct, frozen=True):
    """Whether requests are served now."""

    status: str
    cause: str | UnsetType = UNSET


@runtime_checkable
class SleepingEngine(Protocol):
    """An engine whose device memory can be given back while its process stays."""

    async def sleep(self, level: int = 1) -> None: ...
    async def wake_up(self, tags: list[str] | None = None) -> None: ...
    async def is_sleeping(self) -> bool: ...


def router(context: Context) -> APIRouter:
    """The endpoints."""
    api = APIRouter()
    _add_health(api, context)
    _add_facts(api, context)
    _add_actions(api, context)
    return api


def _add_health(api: APIRouter, context: Context) -> None:
    @api.get("/health/live")
    async def live() -> Response:
        """200 while this process need not be replaced: also while its engine starts again."""
        error = context.engine.error
        return json_response(Status("ok")) if error is None else json_response(Status("failed", str(error)), 503)

    @api.get("/ping")
    @api.get("/health")
    async def health() -> Response:
        """200 while the engine runs, asleep or awake."""
        return _health(context)

    @api.get("/health/ready")
    async def ready() -> Response:
        """200 while requests are served. Asleep they would wait until somebody wakes the engine."""
        if context.engine.is_alive and await _is_sleeping(context):
            return json_response(Status("asleep", "POST /wake_up ends it"), 503)
        return _health(context)


def _health(context: Context) -> Response:
    if context.engine.is_alive:
        return json_response(Status("ok"))
    error = context.engine.error
    answer = json_response(Status("unavailable", "the engine is being started" if error is None else str(error)), 503)
    answer.headers["retry-after"] = RETRY_AFTER_S
    return answer


def _add_facts(api: APIRouter, context: Context) -> None:
    @api.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @api.get("/metrics")
    async def metrics(request: Request) -> Response:
        stats: EngineStats | None
        try:
            stats = await asyncio.wait_for(context.engine.stats(), STATS_WAIT_S)
        except asyncio.TimeoutError:  # it is in a long step: what it said last still holds
            stats = context.metrics.stats
        except EngineError:  # what the server itself has seen is shown all the same; /health has the cause
            stats = None
        page, content_type = context.metrics.render(stats, context.admission, request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    @api.get("/plan")
    async def plan() -> Response:
        """The Plan that the engine runs: what was chosen, and every rejected candidate with its reason."""
        return Response(context.engine.plan_json, media_type="application/json")


def _add_actions(api: APIRouter, context: Context) -> None:
    @api.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> Response:
        """Forget cached prefixes; a conflict while requests hold some."""
        _refuse_pages(context, request)
        if await context.engine.reset_prefix_cache():
            return json_response({"success": True})
        raise HTTPRequestError(
            "Prefix cache is in use",
            on="reset_prefix_cache",
            found="requests that run",
            expected="none",
            fix="send it again when they have ended",
            status=409,
        )

    @api.post("/sleep")
    async def sleep(request: Request) -> Response:
        """Give back device memory: weights to the host (level 1) or dropped (level 2), KV dropped."""
        _refuse_pages(context, request)
        level = request.query_params.get("level", "1")
        if level not in ("1", "2"):
            raise HTTPRequestError(
                "Level does not exist", on="level", found=repr(level[:32]), expected="1 or 2", fix="send ?level=1"
            )
        await _sleeping(context).sleep(int(level))
        return json_response({"success": True})

    @api.post("/wake_up")
    async def wake_up(request: Request) -> Response:
        """Take the memory again."""
        _refuse_pages(context, request)
        await _sleeping(context).wake_up(request.query_params.getlist("tags") or None)
        return json_response({"success": True})

    @api.get("/is_sleeping")
    async def is_sleeping() -> Response:
        return json_response({"is_sleeping": await _is_sleeping(context)})


def _refuse_pages(context: Context, request: Request) -> None:
    """An action has no body, so a page of any origin could send it without asking first. Raises HTTPRequestError (403)."""
    origin, allowed = request.headers.get("origin"), context.options.allowed_origins
    if origin is None or origin in allowed or "*" in allowed or origin.partition("://")[2] == request.headers.get("host"):
        return
    raise HTTPRequestError(
        "Page of another origin tells the server what to do",
        on="origin",
        found=short(origin),
        expected="this server's own page, one of --allowed-origins, or no browser",
        fix="send it from elsewhere, or name the origin with --allowed-origins",
        status=403,
    )


async def _is_sleeping(context: Context) -> bool:
    engine = context.engine
    return isinstance(engine, SleepingEngine) and await engine.is_sleeping()


def _sleeping(context: Context) -> SleepingEngine:
    """The engine, if its platform claims `sleep`. Raises UnsupportedError."""
    engine = context.engine
    if isinstance(engine, SleepingEngine):
        return engine
    raise UnsupportedError(
        "Engine cannot sleep",
        on="sleep",
        found="an engine that keeps its memory while its process runs",
        expected="a platform that claims `sleep`",
        fix="stop the server instead, or serve on a platform that claims it: `vllm-core platforms list`",
    )
