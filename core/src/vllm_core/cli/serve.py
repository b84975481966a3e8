"""`vllm-core serve MODEL`."""

from __future__ import annotations

import argparse
import os
from typing import Any

from vllm_core.cli.options import add_engine_options, engine_options


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("serve", help="serve a model over HTTP", description="Serve a model with OpenAI's API.")
    parser.add_argument("model", metavar="MODEL", help="folder, GGUF file, repository name, or 'demo'")
    section = parser.add_argument_group("Where and to whom")
    section.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    section.add_argument("--port", type=_port, default=8000, metavar="N", help="0 takes a free one (default: %(default)s)")
    section.add_argument(
        "--api-key", action="append", metavar="KEY", help="a key that clients must send; repeatable (or VLLM_CORE_API_KEY)"
    )
    section.add_argument("--ssl-keyfile", metavar="FILE", help="private key, PEM")
    section.add_argument("--ssl-certfile", metavar="FILE", help="certificate, PEM")
    section.add_argument(
        "--max-body-bytes", type=_positive, default=32 * 2**20, metavar="N", help="largest request (default: %(default)s)"
    )
    section.add_argument(
        "--drain-s",
        type=_positive,
        default=30,
        metavar="N",
        help="seconds that requests may take at the end (default: %(default)s)",
    )
    add_engine_options(parser, leave_out={"model"})
    parser.set_defaults(func=run, log_level="INFO")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    from vllm_core.serve import server

    environment_key = os.environ.get("VLLM_CORE_API_KEY")
    keys = args.api_key if args.api_key is not None else [environment_key] if environment_key is not None else []
    options = server.ServerOptions(
        host=args.host,
        port=args.port,
        api_keys=tuple(_checked(key) for key in keys),
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        max_body_bytes=args.max_body_bytes,
        drain_s=args.drain_s,
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


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer of at least 1")
    return int(text)
