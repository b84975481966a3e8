"""`vllm-core chat`: a conversation in the terminal, or one line a turn from a pipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from vllm_core.cli.options import add_engine_options, add_sampling_options, engine_options, sampling_options
from vllm_core.errors import RequestError
from vllm_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm_core.llm import LLM

_HELP = "/clear forgets the conversation, /exit leaves, Ctrl-C ends an answer"


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("chat", help="talk to a model", description="Talk to a model in the terminal.")
    parser.add_argument("--model", required=True, metavar="MODEL", help="folder, GGUF file, repository name, or 'demo'")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    add_sampling_options(parser, max_tokens=512)
    add_engine_options(parser, leave_out={"model"})
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends."""
    from vllm_core.llm import LLM

    SamplingParams(**sampling_options(args))  # wrong values are refused before the model is loaded
    interactive = sys.stdin.isatty()
    with LLM(**engine_options(args)) as llm:
        params = llm.get_default_sampling_params().replace(**sampling_options(args))
        conversation = Conversation(llm, params, args.system)
        if interactive:
            print(_HELP, file=sys.stderr)
        for line in _terminal_lines() if interactive else sys.stdin:
            text = line.rstrip("\n")
            if interactive and text.strip() == "/exit":
                break
            if interactive and text.strip() == "/clear":
                conversation.clear()
            elif text.strip():
                _turn(conversation, text, interactive=interactive)
    return 0


class Conversation:
    """Messages so far; a turn that fails leaves no trace."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._first = [{"role": "system", "content": system}] if system is not None else []
        self.messages = list(self._first)

    def clear(self) -> None:
        """Forget all but the system message."""
        self.messages = list(self._first)

    def say(self, text: str) -> Iterator[str]:
        """Yield the answer in pieces; what came before an interrupt is kept. Raises RequestError."""
        messages = [*self.messages, {"role": "user", "content": text}]
        answer = ""
        try:
            with closing(self._llm.stream_chat(messages, self._params)) as outputs:  # type: ignore[type-var]
                for output in outputs:
                    piece, answer = output.outputs[0].text[len(answer) :], output.outputs[0].text
                    yield piece
        finally:
            if answer:
                self.messages = [*messages, {"role": "assistant", "content": answer}]


def _turn(conversation: Conversation, text: str, *, interactive: bool) -> None:
    try:
        with closing(conversation.say(text)) as pieces:  # type: ignore[type-var]
            for piece in pieces:
                print(piece, end="", flush=True)
    except RequestError as error:
        if not interactive:
            raise
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        if not interactive:
            raise
    print()


def _terminal_lines() -> Iterator[str]:
    import readline  # noqa: F401  input() has history and editing once it is there

    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
