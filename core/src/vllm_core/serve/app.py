"""The FastAPI application around an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from msgspec import Struct
from starlette.exceptions import HTTPException

from vllm_core.elsewhere import instead
from vllm_core.errors import ConfigError, VLLMCoreError, nearest
from vllm_core.serve import anthropic_api, chat, classify, completions, embeddings, operations, responses_api, tokens, web
from vllm_core.serve.admission import Admission
from vllm_core.serve.context import Context, Engine
from vllm_core.serve.errors import ClientGoneError, ErrorAnswer, ErrorBody, error_response, json_response
from vllm_core.serve.gate import Gate
from vllm_core.serve.metrics import Metrics
from vllm_core.serve.settings import AppOptions
from vllm_core.serve.tracing import Tracing, make_tracing
from vllm_core.version import __version__

_MAX_SHOWN = 200
"""Characters of a path that an answer repeats."""


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


def create_app(engine: Engine, options: AppOptions | None = None, *, tracing: Tracing | None = None, **changes: Any) -> FastAPI:
    """The application for an engine that has started. It neither starts nor stops the engine.

    ``changes`` are fields of `AppOptions` that replace those of ``options``. Raises ConfigError for options that contradict
    each other.
    """
    options = replace(options or AppOptions(), **changes)
    check(options)
    tracing = tracing or make_tracing(options.otlp_traces_endpoint)
    admission = Admission(engine.config.scheduler.max_num_seqs, options.max_queued_requests, fair=options.fair_share)
    context = Context(engine, Metrics(engine), options, admission, tracing)
    app = FastAPI(title="vllm-core", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(Gate, options=options, tracing=tracing)
    _add_cors(app, options)
    for module in (completions, chat, responses_api, anthropic_api, embeddings, classify, tokens, operations):
        app.include_router(module.router(context))
    if options.web_page:
        app.include_router(web.router())
    _add_models(app, context)
    _add_error_handlers(app)
    return app


def check(options: AppOptions) -> None:
    """Raises ConfigError where an option asks for what the others make impossible."""
    if options.fair_share and len(options.api_keys) < 2:
        raise ConfigError(
            "Shares cannot be fair",
            on="--fair-share",
            found=f"{len(options.api_keys)} API keys",
            expected="at least two, between which to share",
            fix="give --api-key for each user, or leave --fair-share out",
        )
    if options.allow_credentials and "*" in options.allowed_origins:
        raise ConfigError(
            "Credentials would go to every page",
            on="--allow-credentials",
            found='--allowed-origins ["*"]',
            expected="named origins",
            fix="name the origins, or leave --allow-credentials out",
        )


def _add_cors(app: FastAPI, options: AppOptions) -> None:
    """Outside the gate: a browser's preflight has no key, and refusals must be readable too."""
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
            expose_headers=("x-request-id", "retry-after"),
        )


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


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(VLLMCoreError)
    async def on_error(request: Request, error: VLLMCoreError) -> Response:
        return error_response(error)

    @app.exception_handler(ClientGoneError)
    async def on_client_gone(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=499)  # nginx's number for it; only the access log sees it

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        body = ErrorAnswer(ErrorBody(_explained(app, request, error), "invalid_request_error"))
        answer = json_response(body, error.status_code)
        answer.headers.update(error.headers or {})
        return answer


def _explained(app: FastAPI, request: Request, error: HTTPException) -> str:
    """What was asked, and what could be: the methods of a path, what there is instead of one, or the nearest."""
    path = request.url.path
    path = path if len(path) <= _MAX_SHOWN else f"{path[:_MAX_SHOWN]}..."
    asked = f"{error.detail}: {request.method} {path}"
    if error.status_code == 405:
        return f"{asked}; {path} answers {(error.headers or {}).get('Allow', 'another method')}"
    if error.status_code != 404:
        return asked
    return f"{asked}; {instead('paths', path) or nearest(path, app.openapi()['paths'])}"
