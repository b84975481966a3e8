"""`vllm-core run-batch`: answers a file of requests in OpenAI's batch format."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from vllm_core.cli.features import add_features, features_of
from vllm_core.cli.options import add_engine_options, engine_options


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "run-batch",
        help="answer a file of requests",
        description="Answer each line of a file in OpenAI's batch format; answers are written as they come.",
    )
    parser.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="one JSON request a line; - reads standard input"
    )
    parser.add_argument(
        "-o", "--output-file", required=True, metavar="FILE", help="one JSON answer a line; - is standard output"
    )
    add_features(parser.add_argument_group("Tools, reasoning, structured output"))
    add_engine_options(parser)
    parser.set_defaults(func=run, log_level="WARNING")


def run(args: argparse.Namespace) -> int:
    """Answer all requests; the exit status is 1 where one of them failed."""
    import asyncio

    from vllm_core.serve import batch_file

    answered, failed = asyncio.run(
        batch_file.run(args.input_file, args.output_file, features=features_of(args), engine_options=engine_options(args))
    )
    print(f"{answered} answered, {failed} failed{', each with its error in the answers' if failed else ''}", file=sys.stderr)
    return 1 if failed else 0
