"""The page at ``/``: chat, speed, memory, and the Plan. Three files, nothing from elsewhere, no inline code."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Response

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/web/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/web/page.css": ("page.css", "text/css; charset=utf-8"),
    "/favicon.ico": ("icon.svg", "image/svg+xml"),
}


def router() -> APIRouter:
    """The page and its files; read once."""
    api = APIRouter(include_in_schema=False)
    folder = files("vllm_core.serve") / "page"
    for path, (name, media_type) in _FILES.items():
        api.add_api_route(path, _serve((folder / name).read_bytes(), media_type), methods=["GET"])
    return api


def _serve(content: bytes, media_type: str) -> Any:
    async def file() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return file
