"""`vllm-core completion SHELL`: a script that completes commands and options, made from the parsers themselves."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

from vllm_core.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "completion",
        help="completion for a shell",
        description="Print a completion script: source <(vllm-core completion bash)",
    )
    parser.add_argument("shell", choices=SHELLS, metavar="{bash,zsh,fish}")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    words = {path: [*_names(parser)] for path, parser in _parsers()}
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[args.shell](words))
    return 0


Words = dict[tuple[str, ...], list[tuple[str, str]]]
"""For each command (``("bench", "serve")``), what may follow with its help: commands, and options."""


def _parsers() -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    from vllm_core.cli.main import COMMANDS, Parser

    root = Parser(prog="vllm-core")
    subparsers = root.add_subparsers()
    for module, _ in COMMANDS.values():
        with suppress(ConfigError):  # a command of a package that is not installed
            import_module(module).add_parser(subparsers)
    yield from _walk((), root)


def _walk(path: tuple[str, ...], parser: argparse.ArgumentParser) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    yield path, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from _walk((*path, name), child)


def _names(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {one.dest: one.help or "" for one in action._choices_actions}
            for name in action.choices:
                yield name, helps.get(name, "")
        for option in action.option_strings:
            if option.startswith("--"):
                yield option, action.help or ""


def _function(words: Words) -> str:
    """Shell code, the same in bash and zsh, that sets ``found`` to the words that may follow those typed before."""
    cases = [
        f'    "{" ".join(path)}") found="{" ".join(name for name, _ in names)}" ;;' for path, names in words.items() if names
    ]
    known = " ".join(f"'{' '.join(path)}'" for path in words if path)
    return "\n".join(
        [
            "_vllm_core_words() {",
            "  local path='' word known=0 one",
            '  for word in "$@"; do',
            f"    for one in {known}; do",
            '      if [ "${path:+$path }$word" = "$one" ]; then path="$one"; break; fi',
            "    done",
            "  done",
            "  found=''",
            '  case "$path" in',
            *cases,
            "  esac",
            "}",
        ]
    )


def _bash(words: Words) -> str:
    return f"""{_function(words)}
_vllm_core() {{
  local found
  _vllm_core_words "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"
  COMPREPLY=($(compgen -W "$found" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _vllm_core vllm-core"""


def _zsh(words: Words) -> str:
    return f"""#compdef vllm-core
{_function(words)}
_vllm_core() {{
  local found
  _vllm_core_words "${{(@)words[2,CURRENT-1]}}"
  compadd -- ${{=found}} || _files
}}
compdef _vllm_core vllm-core"""


def _fish(words: Words) -> str:
    lines = []
    children: dict[tuple[str, ...], list[str]] = {}
    for path in words:
        if path:
            children.setdefault(path[:-1], []).append(path[-1])
    for path, names in words.items():
        seen = "; and ".join(f"__fish_seen_subcommand_from {one}" for one in path)
        none = f"not __fish_seen_subcommand_from {' '.join(children[path])}" if path in children else ""
        condition = "; and ".join(part for part in (seen, none) if part)
        for name, text in names:
            what = f"-l {name[2:]}" if name.startswith("--") else f"-f -a {name}"
            lines.append(f"complete -c vllm-core -n '{condition}' {what} -d '{_plain(text)}'")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """One short line without quotes and argparse's formats."""
    return re.sub(r"\s+", " ", re.sub(r"['\\]", "", text).replace("%%", "%").replace("(default: %(default)s)", "")).strip()[:80]
