"""The FastAPI application around an engine."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI, Request, Response
from msgspec import UNSET, Struct, UnsetType
from starlette.exceptions import HTTPException

from vllm_core.errors import EngineError, VLLMCoreError
from vllm_core.serve import chat, completions, embeddings
from vllm_core.serve.context import Context, Engine
from vllm_core.serve.errors import ClientGoneError, ErrorAnswer, ErrorBody, error_response, json_response
from vllm_core.serve.gate import Gate
from vllm_core.serve.metrics import Metrics
from vllm_core.version import __version__

MAX_BODY_BYTES = 32 * 2**20


class Model(Struct, frozen=True):
    """A served name."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "vllm-core"
    parent: str | None = None


class Models(Struct, frozen=True):
    """All served names."""

    data: list[Model]
    object: str = "list"


class Status(Struct, frozen=True):
    """Whether requests are served now."""

    status: str
    cause: str | UnsetType = UNSET


def create_app(engine: Engine, *, api_keys: Sequence[str] = (), max_body_bytes: int = MAX_BODY_BYTES) -> FastAPI:
    """The application for an engine that has started. It neither starts nor stops the engine."""
    context = Context(engine, Metrics(engine.model_names[0], engine.platform_info), max_body_bytes)
    app = FastAPI(title="vllm-core", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(Gate, api_keys=api_keys)
    for module in (completions, chat, embeddings):
        app.include_router(module.router(context))
    _add_models(app, context)
    _add_operations(app, context)
    _add_error_handlers(app)
    return app


def _add_models(app: FastAPI, context: Context) -> None:
    def described(name: str) -> Model:
        root = str(context.engine.config.model.model)
        return Model(name, context.created, root, context.engine.max_model_len)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response(Models([described(name) for name in context.engine.model_names]))

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        context.check_model(name)
        return json_response(described(name))


def _add_operations(app: FastAPI, context: Context) -> None:
    @app.get("/ping")
    @app.get("/health")
    async def health() -> Response:
        if context.engine.is_alive:
            return json_response(Status("ok"))
        error = context.engine.error
        return json_response(Status("unavailable", UNSET if error is None else str(error)), 503)

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        try:
            stats = await context.engine.stats()
        except EngineError:  # what the server itself has seen is shown all the same; /health has the cause
            stats = None
        page, content_type = context.metrics.render(stats, request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(VLLMCoreError)
    async def on_error(request: Request, error: VLLMCoreError) -> Response:
        return error_response(error)

    @app.exception_handler(ClientGoneError)
    async def on_client_gone(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=499)  # nginx's number for it; only the access log sees it

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        body = ErrorAnswer(ErrorBody(f"{error.detail}: {request.method} {request.url.path}", "invalid_request_error"))
        answer = json_response(body, error.status_code)
        answer.headers.update(error.headers or {})
        return answer
