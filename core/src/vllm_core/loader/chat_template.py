"""Chat templates: Jinja from a model repository, so untrusted. Rendered in a sandbox, bounded in output and loops.

The environment and the continuation of a final message follow transformers' `apply_chat_template`, so that a template
renders to the same text.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from vllm_core.errors import RequestError, TokenizerError

MAX_SOURCE_CHARS, MAX_OUTPUT_CHARS, MAX_RENDER_S = 1 << 20, 1 << 26, 10.0
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_DEADLINE: ContextVar[float] = ContextVar("deadline of a rendering", default=math.inf)
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """One compiled template. Raises TokenizerError where its syntax is wrong or it is too long."""

    def __init__(self, source: str, *, on: str) -> None:
        self.source, self._on = source, on
        if len(source) > MAX_SOURCE_CHARS:
            raise _broken(on, f"{len(source)} characters", f"at most {MAX_SOURCE_CHARS}")
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            line = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise _broken(on, f"{error}{line}", "a Jinja template") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Render a conversation.

        ``variables`` are seen by the template, special tokens among them. Raises RequestError where the template
        refuses the conversation, takes too long or writes too much, or the final message cannot be continued.
        """
        chat = [_message(message) for message in messages]
        final = _mark_final(chat) if continue_final_message else None
        values = {"documents": None, **_plain(variables), "messages": chat, "tools": _plain(tools)}
        text = self._run({**values, "add_generation_prompt": add_generation_prompt and not continue_final_message})
        return text if final is None else _cut_final(text, final)

    def _run(self, values: dict[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        token = _DEADLINE.set(time.monotonic() + MAX_RENDER_S)
        try:
            for piece in self._template.generate(values):
                size += len(piece)
                if size > MAX_OUTPUT_CHARS:
                    raise OverflowError(f"the output has more than {MAX_OUTPUT_CHARS} characters")
                pieces.append(piece)
        except Exception as error:  # a template is a program: it can raise whatever Python can
            raise _refused(f"{type(error).__name__}: {error}", "a conversation that the template takes") from error
        finally:
            _DEADLINE.reset(token)
        return "".join(pieces)


@lru_cache(maxsize=1)
def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters.update(tojson=_to_json, paced=_paced, concatenated=_concatenated)
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_template_dict, namespace=_Namespace
    )
    return environment


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox in which loops and calls meet the deadline, and one operator cannot make a huge value."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Bounds().visit(source), *args, **kwargs)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call an object of the template, in time and with no huge number as an argument."""
        _check_deadline()
        if any(_count(value) > MAX_OUTPUT_CHARS for value in args):
            raise OverflowError("an argument that is too large")
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator. Raises OverflowError where the result would be too large."""
        if operator == "**" and (_count(left) > 1 << 16 or _count(right) > 64):
            raise OverflowError("a power that is too large")
        if operator == "*" and max(_length(left) * _count(right), _length(right) * _count(left)) > MAX_OUTPUT_CHARS:
            raise OverflowError("a repetition that is too long")
        if operator == "+" and _length(left) + _length(right) > MAX_OUTPUT_CHARS:
            raise OverflowError("a text that is too long")
        return super().call_binop(context, operator, left, right)


class _Bounds(NodeTransformer):
    """Sends loops and `~` through filters that keep the bounds."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        """Loop in time."""
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "paced", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        """Concatenate within the size."""
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "concatenated", [], [], None, None, lineno=node.lineno)


def _paced(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _check_deadline()
        yield item


def _concatenated(parts: Sequence[Any]) -> str:
    texts = [str(part) for part in parts]
    if sum(map(len, texts)) > MAX_OUTPUT_CHARS:
        raise OverflowError("a text that is too long")
    return "".join(texts)


def _check_deadline() -> None:
    if time.monotonic() > _DEADLINE.get():
        raise TimeoutError(f"rendering takes more than {MAX_RENDER_S} s")


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote; for a prompt it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """A namespace without underscore names: they would reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no attribute {name!r}")


def _template_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without empty keys, with reasoning under the name that templates read."""
    plain: dict[str, Any] = _plain({key: value for key, value in message.items() if value is not None})
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Only JSON types reach a template: methods of richer objects are not known to the sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise _refused(f"a value of type {type(value).__name__}", "JSON types in messages, tools and template arguments")


def _mark_final(chat: list[dict[str, Any]]) -> str:
    """Append a mark to the final message's text and return that text."""
    content = chat[-1].get("content") if chat else None
    if isinstance(content, list):
        for part in reversed(content):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                text: str = part["text"]
                part["text"] = text + _CONTINUE_TAG
                return text
    if not isinstance(content, str):
        raise _refused("no text in the final message", "a final message with text to continue")
    chat[-1]["content"] = content + _CONTINUE_TAG
    return content


def _cut_final(text: str, final: str) -> str:
    """Cut the rendered text behind the final message, as its template spaced it."""
    where = text.rfind(_CONTINUE_TAG.strip())
    if where < 0 or final.strip() not in text:
        raise _refused("a template that drops part of the final message", "one that keeps it")
    if text[where : where + len(_CONTINUE_TAG)] == _CONTINUE_TAG:
        return text[:where]
    return text[:where].rstrip()  # the template strips messages


def _length(value: object) -> int:
    return len(value) if isinstance(value, (str, list, tuple)) else 0


def _count(value: object) -> int:
    return abs(value) if isinstance(value, int) else 1


def _broken(on: str, found: str, expected: str) -> TokenizerError:
    return TokenizerError(
        "Chat template is broken", on=on, found=found, expected=expected, fix="give another with --chat-template"
    )


def _refused(found: str, expected: str) -> RequestError:
    return RequestError(
        "Chat template cannot render the conversation",
        on="messages",
        found=found,
        expected=expected,
        fix="change the messages, or the template with --chat-template",
    )
