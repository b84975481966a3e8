"""`vllm-core generate`: one prompt in, text out as it comes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_core.cli.options import (
    add_engine_options,
    add_model,
    add_sampling_options,
    engine_options,
    sampling_options,
    take_model,
)
from vllm_core.errors import ConfigError
from vllm_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm_core.outputs import RequestOutput


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("generate", help="generate text for one prompt", description="Generate text for one prompt.")
    add_model(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt (default: standard input)")
    prompt.add_argument("--prompt-file", metavar="FILE", help="file that holds the prompt, UTF-8")
    prompt.add_argument("--prompt-token-ids", metavar="IDS", help="the prompt as token ids: 1,2,3")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, instead of the text")
    add_sampling_options(parser, max_tokens=128)
    add_engine_options(parser, leave_out={"model"})
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Generate and print; the speed goes to standard error."""
    take_model(args, command="vllm-core generate")
    prompt = _prompt(args)
    from vllm_core import collector
    from vllm_core.llm import LLM

    SamplingParams(**sampling_options(args))  # wrong values are refused before the model is loaded
    with collector.starting() as ready, LLM(**engine_options(args)) as llm:
        ready()
        params = llm.get_default_sampling_params().replace(**sampling_options(args))
        started, first_s, shown = time.perf_counter(), 0.0, 0
        final: RequestOutput | None = None
        for final in llm.stream(prompt, params):
            first_s = first_s or time.perf_counter() - started
            if not args.json:
                text = final.outputs[0].text
                print(text[shown:], end="", flush=True)
                shown = len(text)
        seconds = time.perf_counter() - started
        assert final is not None, "a stream has at least its end"
        _report(final, first_s, seconds, as_json=args.json)
        if final.error is not None:
            print(f"error: the request failed: {final.error}", file=sys.stderr)
            return 1
    return 0


def _report(final: RequestOutput, first_s: float, seconds: float, *, as_json: bool) -> None:
    out = final.outputs[0]
    speed = len(out.token_ids) / seconds if seconds else 0.0
    if as_json:
        row = {
            "prompt": final.prompt,
            "text": out.text,
            "token_ids": out.token_ids,
            "finish_reason": out.finish_reason,
            "stop_reason": out.stop_reason,
            "prompt_tokens": len(final.prompt_token_ids),
            "completion_tokens": len(out.token_ids),
            "first_token_s": round(first_s, 4),
            "seconds": round(seconds, 4),
            "tokens_per_s": round(speed, 2),
        }
        print(json.dumps(row, ensure_ascii=False))
        return
    print()
    counts = f"{len(final.prompt_token_ids)} tokens in, {len(out.token_ids)} out"
    print(f"{counts}, {seconds:.2f} s: {speed:.1f} tokens/s, the first after {first_s:.2f} s", file=sys.stderr)


def _prompt(args: argparse.Namespace) -> str | list[int]:
    if args.prompt is not None:
        return str(args.prompt)
    if args.prompt_token_ids is not None:
        return _token_ids(args.prompt_token_ids)
    try:
        if args.prompt_file is not None:
            return Path(args.prompt_file).read_bytes().decode()
        if not sys.stdin.isatty():
            return sys.stdin.buffer.read().decode()
        found, on = "neither --prompt nor --prompt-file, and standard input is a terminal", "generate"
    except (OSError, UnicodeDecodeError) as error:
        found, on = str(error), args.prompt_file or "standard input"
    raise ConfigError(
        "There is no prompt", on=on, found=found, expected="a prompt in UTF-8", fix='--prompt "The capital of France is"'
    )


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise ConfigError(
            "Token ids cannot be read",
            on="--prompt-token-ids",
            found=str(error),
            expected="integers with commas between them",
            fix="--prompt-token-ids 1,2,3",
        ) from error
