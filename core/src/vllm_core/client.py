"""A small client of a running server, for the command line: metrics, models, and chat as a stream."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from vllm_core.errors import ConfigError, EngineError

if TYPE_CHECKING:
    import httpx

CONNECT_TIMEOUT_S = 5.0


class Server:
    """One server by its address. Raises ConfigError for an address that nobody answers at."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        import httpx

        key = api_key or os.environ.get("VLLM_CORE_API_KEY")
        unix = url.removeprefix("unix:") if url.startswith("unix:") else None
        self.url = url
        self._http = httpx.Client(
            base_url="http://server" if unix else url.rstrip("/").removesuffix("/v1"),
            transport=httpx.HTTPTransport(uds=unix) if unix else None,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(60.0, connect=CONNECT_TIMEOUT_S, read=None),
            trust_env=False,
        )

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def state(self) -> str:
        """Whether it serves requests now: ``ready``, ``asleep`` or ``not ready``."""
        answer = self._get("/health/ready", accept=(200, 503))
        if answer.status_code == 200:
            return "ready"
        return "asleep" if answer.json().get("status") == "asleep" else "not ready"

    def models(self) -> list[str]:
        """Names that it serves."""
        return [str(one["id"]) for one in self._get("/v1/models").json()["data"]]

    def metrics(self) -> str:
        """Its metrics in Prometheus' text form."""
        return self._get("/metrics").text

    def stream_chat(self, messages: Sequence[Mapping[str, str]], params: Mapping[str, Any]) -> Iterator[str]:
        """Yield the answer in pieces; closing the iterator ends the request. Raises EngineError for what the server refuses."""
        body = {"messages": list(messages), "stream": True, **params}
        request = self._http.build_request("POST", "/v1/chat/completions", json=body)
        with closing(self._asked(lambda: self._http.send(request, stream=True))) as answer:
            if answer.status_code != 200:
                answer.read()
                raise _refused(self.url, answer)
            lines = answer.iter_lines()
            while (line := self._asked(lambda: next(lines, None))) is not None:
                data = line.removeprefix("data: ")
                if data in (line, "[DONE]"):
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise _failed(self.url, chunk["error"].get("message", data))
                piece = chunk["choices"][0]["delta"].get("content") if chunk["choices"] else None
                if piece:
                    yield piece

    def _get(self, path: str, accept: tuple[int, ...] = (200,)) -> httpx.Response:
        answer: httpx.Response = self._asked(lambda: self._http.get(path))
        if answer.status_code not in accept:
            raise _refused(self.url, answer)
        return answer

    def _asked(self, send: Any) -> Any:
        import httpx

        try:
            return send()
        except (httpx.TransportError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ConfigError(
                "Server does not answer",
                on=self.url,
                found=f"{type(error).__name__}: {error}",
                expected="a running server, such as http://127.0.0.1:8000",
                fix="start one with `vllm-core serve`; `vllm-core ps` lists those of this machine",
            ) from error


def _refused(url: str, answer: httpx.Response) -> EngineError | ConfigError:
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = answer.text[:500]
    if answer.status_code == 401:
        return ConfigError(
            "Server asks for a key", on=url, found="none, or a wrong one", expected="its API key", fix="give --api-key"
        )
    return _failed(url, f"HTTP {answer.status_code}: {message}")


def _failed(url: str, found: str) -> EngineError:
    return EngineError("Server refused the request", on=url, found=found, expected="an answer", fix="see what it found")
