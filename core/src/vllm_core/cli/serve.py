"""`vllm-core serve MODEL`."""

from __future__ import annotations

import argparse
import json
import os
import ssl
from typing import Any

from vllm_core.cli.argument_types import count, positive
from vllm_core.cli.features import add_features, features_of
from vllm_core.cli.options import add_engine_options, add_model, engine_options, take_model

_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("serve", help="serve a model over HTTP", description="Serve a model with OpenAI's API.")
    add_model(parser)
    _add_address(parser.add_argument_group("Where and to whom"))
    _add_limits(parser.add_argument_group("Limits"))
    add_features(parser.add_argument_group("Tools, reasoning, structured output"))
    _add_browsers(parser.add_argument_group("Browsers"))
    _add_logs(parser.add_argument_group("Logs and traces"))
    add_engine_options(parser, leave_out={"model"})
    parser.set_defaults(func=run, log_level="INFO")


def _add_address(section: argparse._ArgumentGroup) -> None:
    section.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    section.add_argument("--port", type=_port, default=8000, metavar="N", help="0 takes a free one (default: %(default)s)")
    section.add_argument("--uds", metavar="FILE", help="listen on a Unix socket instead")
    section.add_argument(
        "--api-key", action="append", metavar="KEY", help="a key that clients must send; repeatable (or VLLM_CORE_API_KEY)"
    )
    section.add_argument("--root-path", default="", metavar="PATH", help="path under which a proxy shows this server")
    section.add_argument("--ssl-keyfile", metavar="FILE", help="private key, PEM")
    section.add_argument("--ssl-certfile", metavar="FILE", help="certificate, PEM")
    section.add_argument("--ssl-ca-certs", metavar="FILE", help="certificates that clients' own are checked against, PEM")
    section.add_argument(
        "--ssl-cert-reqs",
        type=_cert_reqs,
        default=int(ssl.CERT_NONE),
        metavar="N",
        help="clients' certificates: 0 none, 1 optional, 2 required (default: %(default)s)",
    )
    section.add_argument("--ssl-ciphers", metavar="LIST", help="ciphers for TLS up to 1.2, as OpenSSL names them")


def _add_limits(section: argparse._ArgumentGroup) -> None:
    section.add_argument(
        "--max-queued-requests",
        type=count,
        default=4096,
        metavar="N",
        help="sequences that may wait beyond --max-num-seqs; more are answered 429 (default: %(default)s)",
    )
    section.add_argument(
        "--request-timeout-s", type=_seconds, metavar="N", help="longest time of a request, waiting included (default: none)"
    )
    section.add_argument(
        "--fair-share",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="the API key that was served least goes first, not the request that came first",
    )
    section.add_argument(
        "--max-body-bytes", type=positive, default=32 * 2**20, metavar="N", help="largest request (default: %(default)s)"
    )
    section.add_argument(
        "--h11-max-incomplete-event-size",
        type=positive,
        default=32 * 2**10,
        metavar="N",
        help="largest request line and headers, in bytes (default: %(default)s)",
    )
    section.add_argument(
        "--h11-max-header-count", type=positive, default=128, metavar="N", help="most headers (default: %(default)s)"
    )
    for name, default, text in (
        ("header", 30.0, "seconds for the headers of a request to arrive"),
        ("body", 60.0, "seconds for its body to arrive"),
        ("write", 300.0, "seconds that a client may leave an answer unread"),
        ("step", 300.0, "seconds that one step may take before the engine is taken to hang and started again"),
    ):
        section.add_argument(
            f"--{name}-timeout-s", type=_seconds, default=default, metavar="N", help=f"{text} (default: %(default)s)"
        )
    section.add_argument(
        "--drain-s",
        "--shutdown-timeout",
        type=positive,
        default=30,
        metavar="N",
        help="seconds that requests may take at the end (default: %(default)s)",
    )


def _add_browsers(section: argparse._ArgumentGroup) -> None:
    section.add_argument(
        "--allowed-origins",
        type=_names,
        default=(),
        metavar="JSON",
        help="origins whose pages may read answers (default: none)",
    )
    section.add_argument(
        "--allowed-methods", type=_names, default=("*",), metavar="JSON", help='methods they may use (default: ["*"])'
    )
    section.add_argument(
        "--allowed-headers", type=_names, default=("*",), metavar="JSON", help='headers they may send (default: ["*"])'
    )
    section.add_argument("--allow-credentials", action="store_true", help="let them send cookies and the like")
    section.add_argument("--web-page", action=argparse.BooleanOptionalAction, default=True, help="the page at / (default: on)")


def _add_logs(section: argparse._ArgumentGroup) -> None:
    section.add_argument(
        "--enable-log-requests",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="log prompts and parameters; otherwise no content is logged",
    )
    section.add_argument("--disable-log-requests", action="store_false", dest="enable_log_requests", help="the default")
    section.add_argument("--max-log-len", type=count, metavar="N", help="characters or tokens of a prompt that are logged")
    section.add_argument("--disable-uvicorn-access-log", action="store_true", help="no line for each HTTP request")
    section.add_argument(
        "--uvicorn-log-level", choices=_LOG_LEVELS, default="warning", help="of the HTTP library (default: %(default)s)"
    )
    section.add_argument("--otlp-traces-endpoint", metavar="URL", help="send OpenTelemetry traces there (extra `otel`)")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    from vllm_core.serve import server
    from vllm_core.serve.settings import ServerOptions

    take_model(args, command="vllm-core serve")
    environment_key = os.environ.get("VLLM_CORE_API_KEY")
    keys = args.api_key if args.api_key is not None else [environment_key] if environment_key is not None else []
    options = ServerOptions(
        host=args.host,
        port=args.port,
        uds=args.uds,
        api_keys=tuple(_checked(key) for key in keys),
        root_path=args.root_path.rstrip("/"),
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        ssl_ciphers=args.ssl_ciphers,
        max_queued_requests=args.max_queued_requests,
        request_timeout_s=args.request_timeout_s,
        fair_share=args.fair_share,
        max_body_bytes=args.max_body_bytes,
        max_header_bytes=args.h11_max_incomplete_event_size,
        max_headers=args.h11_max_header_count,
        header_timeout_s=args.header_timeout_s,
        body_timeout_s=args.body_timeout_s,
        write_timeout_s=args.write_timeout_s,
        step_timeout_s=args.step_timeout_s,
        drain_s=args.drain_s,
        allowed_origins=args.allowed_origins,
        allowed_methods=args.allowed_methods,
        allowed_headers=args.allowed_headers,
        allow_credentials=args.allow_credentials,
        web_page=args.web_page,
        access_log=not args.disable_uvicorn_access_log,
        log_requests=args.enable_log_requests,
        max_log_len=args.max_log_len,
        uvicorn_log_level=args.uvicorn_log_level,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        features=features_of(args),
    )
    return server.run(options, engine_options(args))


def _checked(key: str) -> str:
    from vllm_core.errors import ConfigError

    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            "API key cannot be used",
            on="--api-key or VLLM_CORE_API_KEY",
            found="an empty key, or one that no HTTP header can carry",
            expected="printable ASCII without spaces",
            fix="choose another key, or leave the option out to serve everyone",
        )
    return key


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) >= 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e7:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


def _cert_reqs(text: str) -> int:
    if text not in ("0", "1", "2"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of 0, 1 and 2")
    return int(text)


def _names(text: str) -> tuple[str, ...]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise argparse.ArgumentTypeError(f"""{text!r} is no JSON list of texts, such as '["https://example.org"]'""")
    return tuple(value)
