"""What an operator sets of a server: address, keys, limits, what is shown. The command line is `cli/serve.py`."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field

from vllm_core.pulse import STEP_TIMEOUT_S
from vllm_core.serve.features import Features

MAX_BODY_BYTES = 32 * 2**20
MAX_HEADER_BYTES = 32 * 2**10
MAX_HEADERS = 128
MAX_QUEUED_REQUESTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class AppOptions:
    """What requests pass. Sizes in bytes, times in seconds; None is no limit.

    `max_queued_requests` counts sequences beyond those that the engine runs at once. `request_timeout_s` is the longest that
    a request may take from its arrival to its end; a client can ask for less. `fair_share` lets the key go first that has
    been served least. Without `allowed_origins` no page of another origin may read an answer.
    """

    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES
    max_headers: int = MAX_HEADERS
    max_header_bytes: int = MAX_HEADER_BYTES
    max_queued_requests: int | None = MAX_QUEUED_REQUESTS
    request_timeout_s: float | None = None
    fair_share: bool = False
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    root_path: str = ""
    access_log: bool = True
    log_requests: bool = False
    max_log_len: int | None = None
    web_page: bool = True
    otlp_traces_endpoint: str | None = None
    features: Features = field(default_factory=Features)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions(AppOptions):
    """Where and how to serve. Port 0 takes a free one; `drain_s` is how long running requests may take at the end.

    `header_timeout_s` and `body_timeout_s` are how long a client may take to send a request's headers and then its body,
    `write_timeout_s` how long it may leave an answer unread while the connection's buffers are full. `step_timeout_s` is how
    long one step of the engine may take before its process is taken to hang.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = int(ssl.CERT_NONE)
    ssl_ciphers: str | None = None
    header_timeout_s: float = 30.0
    body_timeout_s: float = 60.0
    write_timeout_s: float = 300.0
    keep_alive_s: int = 5
    uvicorn_log_level: str = "warning"
    drain_s: int = 30
    step_timeout_s: float = STEP_TIMEOUT_S
