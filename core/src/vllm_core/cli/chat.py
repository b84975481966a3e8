"""`vllm-core chat`: a conversation in the terminal, or one line a turn from a pipe; with a model, or a running server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
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
from vllm_core.errors import ConfigError, EngineError, RequestError
from vllm_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm_core.llm import LLM

Messages = list[dict[str, str]]
Answer = Callable[[Messages], Iterator[str]]
"""Yields the answer to a conversation in pieces."""

_HELP = """\
/clear forgets the conversation, /undo its last turn; /retry answers again; /system TEXT changes what the model is told first
/exit leaves, Ctrl-C ends an answer; a line that ends with \\ goes on"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("chat", help="talk to a model", description="Talk to a model in the terminal.")
    add_model(parser)
    parser.add_argument("--url", metavar="URL", help="a running server to talk to, such as http://127.0.0.1:8000")
    parser.add_argument("--api-key", metavar="KEY", help="key of that server (or VLLM_CORE_API_KEY)")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    parser.add_argument("--history", type=Path, metavar="FILE", help="keep the lines that you type in this file")
    add_sampling_options(parser, max_tokens=512)
    add_engine_options(parser, leave_out={"model"})
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends."""
    take_model(args, command="vllm-core chat", required=False)
    SamplingParams(**sampling_options(args))  # wrong values are refused before the model is loaded
    if args.url is not None:
        return _run_remote(args)
    if args.model is None:
        raise ConfigError(
            "Nobody to talk to", on="chat", found="neither a model nor --url", expected="one of them", fix="vllm-core chat demo"
        )
    from vllm_core import collector
    from vllm_core.llm import LLM

    with collector.starting() as ready, LLM(**engine_options(args)) as llm:
        ready()
        params = llm.get_default_sampling_params().replace(**sampling_options(args))
        return _talk(Conversation(local(llm, params), args.system), args.history)


def _run_remote(args: argparse.Namespace) -> int:
    from vllm_core.client import Server

    engine = {name: value for name, value in engine_options(args).items() if name not in ("model", "seed")}
    if engine:
        raise ConfigError(
            "Option is the server's",
            on=f"--{min(engine).replace('_', '-')}",
            found="--url too",
            expected="options of the conversation alone",
            fix="give it to `vllm-core serve`",
        )
    params = {**sampling_options(args), **({} if args.model is None else {"model": args.model})}
    with closing(Server(args.url, args.api_key)) as server:
        if sys.stdin.isatty():
            print(f"{server.url}: {', '.join(server.models())}", file=sys.stderr)
        return _talk(Conversation(lambda messages: server.stream_chat(messages, params), args.system), args.history)


def local(llm: LLM, params: SamplingParams) -> Answer:
    """Answers of an engine in this process."""

    def answer(messages: Messages) -> Iterator[str]:
        shown = 0
        with closing(llm.stream_chat(messages, params)) as outputs:  # type: ignore[type-var]
            for output in outputs:
                text = output.outputs[0].text
                piece, shown = text[shown:], len(text)
                yield piece

    return answer


class Conversation:
    """Messages so far; a turn that fails leaves no trace."""

    def __init__(self, answer: Answer, system: str | None) -> None:
        self._answer = answer
        self.system = system
        self.turns: Messages = []

    @property
    def messages(self) -> Messages:
        """All of them, what the model is told first included."""
        return [*([] if self.system is None else [{"role": "system", "content": self.system}]), *self.turns]

    def clear(self) -> None:
        """Forget all but the system message."""
        self.turns = []

    def undo(self) -> str | None:
        """Forget the last turn; returns what was said in it."""
        asked = [index for index, message in enumerate(self.turns) if message["role"] == "user"]
        if not asked:
            return None
        text = self.turns[asked[-1]]["content"]
        self.turns = self.turns[: asked[-1]]
        return text

    def say(self, text: str) -> Iterator[str]:
        """Yield the answer in pieces; what came before an interrupt is kept. Raises RequestError, EngineError."""
        said = {"role": "user", "content": text}
        pieces: list[str] = []
        try:
            with closing(self._answer([*self.messages, said])) as answer:  # type: ignore[type-var]
                for piece in answer:
                    pieces.append(piece)
                    yield piece
        finally:
            if any(pieces):
                self.turns += [said, {"role": "assistant", "content": "".join(pieces)}]


def _talk(conversation: Conversation, history: Path | None) -> int:
    if not sys.stdin.isatty():
        for line in sys.stdin:
            if line.strip():
                _turn(conversation, line.rstrip("\n"), interactive=False)
        return 0
    print(_HELP, file=sys.stderr)
    for text in _terminal_lines(history):
        name, _, rest = text.strip().partition(" ")
        if name == "/exit":
            break
        if name in COMMANDS:
            again = COMMANDS[name](conversation, rest)
            if again is not None:
                _turn(conversation, again, interactive=True)
        elif text.strip():
            _turn(conversation, text, interactive=True)
    return 0


def _clear(conversation: Conversation, rest: str) -> None:
    conversation.clear()


def _undo(conversation: Conversation, rest: str) -> None:
    conversation.undo()


def _retry(conversation: Conversation, rest: str) -> str | None:
    return conversation.undo()


def _system(conversation: Conversation, rest: str) -> None:
    conversation.system = rest or None


def _show_help(conversation: Conversation, rest: str) -> None:
    print(_HELP, file=sys.stderr)


COMMANDS: Mapping[str, Callable[[Conversation, str], str | None]] = {
    "/clear": _clear,
    "/undo": _undo,
    "/retry": _retry,
    "/system": _system,
    "/help": _show_help,
}
"""What a line in the terminal can be besides something to say; what is returned is said."""


def _turn(conversation: Conversation, text: str, *, interactive: bool) -> None:
    try:
        with closing(conversation.say(text)) as pieces:  # type: ignore[type-var]
            for piece in pieces:
                print(piece, end="", flush=True)
    except (RequestError, EngineError) as error:
        if not interactive:
            raise
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        if not interactive:
            raise
    print()


def _terminal_lines(history: Path | None) -> Iterator[str]:
    """What is typed, with history and editing; a backslash at the end joins the next line."""
    import readline

    if history is not None:
        try:
            history.touch(mode=0o600)
            readline.read_history_file(history)
        except OSError as error:
            raise ConfigError(
                "History cannot be kept",
                on=f"--history {history}",
                found=str(error),
                expected="a file of your own that may be written",
                fix="name another, or leave --history out",
            ) from error
    try:
        while True:
            try:
                text = input("> ")
                while text.endswith("\\"):
                    text = f"{text[:-1]}\n{input('. ')}"
                yield text
            except EOFError:
                print()
                return
            except KeyboardInterrupt:  # as in a shell: the line is dropped, not the conversation
                print()
    finally:
        if history is not None:
            readline.write_history_file(history)
