"""`vllm-core`: finds the command, and turns errors into messages and exit statuses.

A command's module is imported when it is named, so that ``--help`` is quick: it loads neither torch nor pydantic nor plugins.
"""

from __future__ import annotations

import argparse
import atexit
import errno
import gc
import itertools
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from vllm_core.elsewhere import instead
from vllm_core.errors import ConfigError, UnknownOptionError, VLLMCoreError, closest, nearest
from vllm_core.version import __version__

COMMANDS = {
    "serve": ("vllm_core.cli.serve", "serve a model over HTTP, with OpenAI's API"),
    "generate": ("vllm_core.cli.generate", "generate text for one prompt"),
    "chat": ("vllm_core.cli.chat", "talk to a model in the terminal"),
    "run-batch": ("vllm_core.cli.run_batch", "answer a file of requests in OpenAI's batch format"),
    "bench": ("vllm_core.cli.bench", "measure the engine"),
    "platforms": ("vllm_core.cli.platforms", "what can run here, and what a model would run on"),
    "plugin": ("vllm_core.cli.plugin", "write a hardware package, check it, see what changed for it"),
    "conformance": ("vllm_core.cli.conformance", "prove what a hardware package claims"),
    "top": ("vllm_core.cli.top", "what running servers do now"),
    "ps": ("vllm_core.cli.ps", "the servers that run on this machine"),
    "completion": ("vllm_core.cli.completion", "a script that completes commands and options in a shell"),
    "doctor": ("vllm_core.cli.doctor", "look at this machine, step by step"),
}

INTERRUPTED = 130
CLOSED_PIPE = 141
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; ``argv`` is without the program's name."""
    args = sys.argv[1:] if argv is None else list(argv)
    atexit.register(gc.freeze)  # else the interpreter looks through all of torch's objects once more before it ends
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # what a model writes must not fail on a terminal's encoding
    try:
        status = _run(args)
        sys.stdout.flush()
        return status
    except VLLMCoreError as error:
        if os.environ.get("VLLM_CORE_LOG_LEVEL") == "DEBUG":
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()  # whoever read it has left
        return CLOSED_PIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _drop_output()
        print(f"error: {_disk_full(error)}", file=sys.stderr)
        return 1


def _drop_output() -> None:
    """The interpreter would complain once more when it flushes what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _disk_full(error: OSError) -> ConfigError:
    return ConfigError(
        "Nothing more can be written",
        on=str(error.filename or "standard output"),
        found=str(error.strerror),
        expected="free space",
        fix="make room, or write elsewhere",
    )


def _run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if args[0] == "--version":
        print(f"vllm-core {__version__}")
        return 0
    if args[0] not in COMMANDS:
        raise UnknownOptionError(
            "Unknown command", on=args[0], found="no such command", expected="a command", fix=nearest(args[0], COMMANDS)
        )
    parser = Parser(prog="vllm-core")
    import_module(COMMANDS[args[0]][0]).add_parser(parser.add_subparsers())
    parsed = parser.parse_args(args)
    _set_up_logging(getattr(parsed, "log_level", "WARNING"))
    from vllm_core.config import check_environment

    check_environment()
    return int(parsed.func(parsed))


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: vllm-core COMMAND ...",
            "",
            "An inference engine for large language models that knows no hardware.",
            "",
            "commands:",
            *lines,
            "",
            "`vllm-core COMMAND --help` lists the options of a command; `vllm-core --version` prints the version.",
        ]
    )


def _set_up_logging(default: str) -> None:
    level = os.environ.get("VLLM_CORE_LOG_LEVEL", default)
    if level not in _LEVELS:
        raise ConfigError(
            "Log level does not exist",
            on="VLLM_CORE_LOG_LEVEL",
            found=repr(level),
            expected=f"one of: {', '.join(_LEVELS)}",
            fix=nearest(level.upper(), _LEVELS, listed=True),
        )
    logging.basicConfig(level="WARNING", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("vllm_core").setLevel(level)


class Parser(argparse.ArgumentParser):
    """Says what is wrong as an error of four parts, with the nearest name of an unknown option. No abbreviations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # argparse calls it for each nested parser
        """Parse; what is left over belongs to no one. Raises UnknownOptionError."""
        if self._subparsers is None:
            self._check_options(sys.argv[1:] if args is None else args)
        found, left = super().parse_known_args(args, namespace)
        if not left:
            return found, left
        name = left[0].partition("=")[0]
        if not name.startswith("-"):
            self.error(f"unexpected argument {name!r}; an option that may have several values is given once for each")
        raise self._unknown(name)

    def _check_options(self, args: Sequence[str]) -> None:
        """Before argparse misses what is required: a misspelt option is why. As there, text with a space is a value."""
        for arg in itertools.takewhile(lambda one: one != "--", args):
            name = arg.partition("=")[0]
            if arg.startswith("--") and " " not in arg and name not in self._option_string_actions:
                raise self._unknown(name)

    def _unknown(self, name: str) -> UnknownOptionError:
        return UnknownOptionError(
            "Unknown option",
            on=name,
            found=f"no such option of {self.prog}",
            expected=f"what `{self.prog} --help` lists",
            fix=instead("options", name) or self._alike(name),
        )

    def _alike(self, name: str) -> str:
        match = closest(name, [option for option in self._option_string_actions if option.startswith("--")])
        return f"see {self.prog} --help" if match is None else f"did you mean {match!r}?"

    def _check_value(self, action: argparse.Action, value: Any) -> None:  # argparse asks it about values with choices
        if action.choices is None or value in action.choices:
            return
        names = [str(choice) for choice in action.choices]
        raise ConfigError(
            "Value does not exist",
            on=f"{action.option_strings[0] if action.option_strings else action.metavar or action.dest} of {self.prog}",
            found=repr(value),
            expected=f"one of: {', '.join(names)}",
            fix=instead("values", action.dest) or nearest(str(value), names, listed=True),
        )

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        missing = message.partition("are required: ")[2]
        choices = [action.choices for action in self._actions if missing in (action.dest, action.metavar) and action.choices]
        raise ConfigError(
            "Command line cannot be read",
            on=self.prog,
            found=f"no {missing.lower()}" if choices else message,
            expected=f"one of: {', '.join(map(str, choices[0]))}" if choices else f"what `{self.prog} --help` lists",
            fix=f"see {self.prog} --help",
        )


if __name__ == "__main__":
    sys.exit(main())
