"""What chat-like endpoints share: from messages, tools and structure to a prompt, and from text to pieces of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm_core.chat import render
from vllm_core.sampling_params import SamplingParams, StructuredOutputsParams
from vllm_core.serve.context import Context
from vllm_core.serve.features import TEMPLATE_ARGUMENTS
from vllm_core.serve.reasoning.registry import ReasoningStream, closes
from vllm_core.serve.schema import refused
from vllm_core.serve.tools.json_calls import ListedCalls, NamedCall
from vllm_core.serve.tools.offered import Tools
from vllm_core.serve.tools.pieces import Arguments, Call, Piece, Reasoning, Text, ToolStream, merged


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A conversation that is to go on. Messages and tools are checked; values of `variables` reach the template."""

    messages: Sequence[Mapping[str, Any]]
    tools: Tools = field(default_factory=Tools)
    structure: StructuredOutputsParams | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


class Turn:
    """The prompt of a conversation, what is enforced of the answer, and how the answer is read."""

    def __init__(self, context: Context, asked: Asked, prompt: str) -> None:
        self.prompt, self._asked, self._features = prompt, asked, context.features
        parser = self._features.reasoning
        self._thinks = parser is not None and not closes(prompt)

    def params(self, params: SamplingParams) -> SamplingParams:
        """``params`` with what the conversation adds. Raises RequestError."""
        asked, features = self._asked, self._features
        structure = asked.tools.structure()
        if structure is not None and asked.structure is not None:
            raise refused("response_format", "with a call that must come", "one of them", "leave response_format out")
        structure = structure or asked.structure
        if structure is not None:
            if self._thinks and features.reasoning is not None:
                structure = msgspec.structs.replace(structure, after=features.reasoning.end)
            if features.compact_json:
                structure = msgspec.structs.replace(structure, disable_any_whitespace=True)
            params = params.replace(structured_outputs=structure)
        if asked.tools.choice == "auto" and features.tools is not None and features.tools.special:
            params = params.replace(skip_special_tokens=False)
        return params

    def reader(self) -> AnswerReader:
        """A reader for one sequence."""
        features, tools = self._features, self._asked.tools
        reasoning = None if features.reasoning is None else features.reasoning.make(self.prompt)
        calls: ToolStream | None = None
        if tools.choice == "named":
            calls = NamedCall(tools.named)
        elif tools.choice == "required":
            calls = ListedCalls(None)
        elif tools.choice == "auto" and features.tools is not None:
            calls = features.tools.make(tools.names)
        return AnswerReader(reasoning, calls, parallel=tools.parallel)


class AnswerReader:
    """Splits one answer into reasoning, text and calls while it is written."""

    def __init__(self, reasoning: ReasoningStream | None, tools: ToolStream | None, *, parallel: bool) -> None:
        self._reasoning, self._tools, self._parallel = reasoning, tools, parallel
        self.calls = 0

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._reasoning is not None and self._reasoning.is_inside

    def push(self, text: str, *, last: bool) -> list[Piece]:
        """Take further text, of which ``last`` is the end; returns what became certain."""
        pieces: list[Piece] = [Text(text)] if self._reasoning is None else self._reasoning.push(text)
        if last and self._reasoning is not None:
            pieces += self._reasoning.flush()
        if self._tools is not None:
            pieces = [one for piece in pieces for one in self._split(self._tools, piece)]
            if last:
                pieces += self._tools.flush()
        pieces = [piece for piece in merged(pieces) if self._wanted(piece)]
        self.calls += sum(isinstance(piece, Call) for piece in pieces)
        return pieces

    @staticmethod
    def _split(tools: ToolStream, piece: Piece) -> list[Piece]:
        return tools.push(piece.text) if isinstance(piece, Text) else [piece]

    def _wanted(self, piece: Piece) -> bool:
        """Whether it belongs to the answer: one call is all where calls may not be parallel."""
        return self._parallel or not isinstance(piece, (Call, Arguments)) or piece.index == 0


async def open_turn(context: Context, asked: Asked) -> Turn:
    """Render the prompt, off the event loop. Raises RequestError."""
    features = context.features
    if asked.chat_template is not None and not features.request_templates:
        raise refused(
            "chat_template", "a template with the request", "the server's own", "start with --trust-request-chat-template"
        )
    if not TEMPLATE_ARGUMENTS.isdisjoint(asked.variables):
        name = min(TEMPLATE_ARGUMENTS & set(asked.variables))
        raise refused(f"chat_template_kwargs.{name}", name, "arguments of the template", f"leave {name} out")
    if asked.continue_final_message and asked.add_generation_prompt:
        raise refused("continue_final_message", "add_generation_prompt too", "one of them", "leave add_generation_prompt out")
    if asked.tools.choice == "auto" and not features.auto_tools:
        raise refused(
            "tool_choice",
            "auto",
            "none, required or a named function, or a server that finds calls",
            "start with --enable-auto-tool-choice and --tool-call-parser",
        )
    return Turn(context, asked, await asyncio.to_thread(_render, context, asked))


def _render(context: Context, asked: Asked) -> str:
    options = {**context.features.template_values, **asked.variables}
    tools = asked.tools.for_template()
    if tools is not None:
        options["tools"] = tools
    if asked.chat_template is not None:
        options["chat_template"] = asked.chat_template
    return render(
        context.engine.tokenizer,
        asked.messages,
        continue_final_message=asked.continue_final_message,
        add_generation_prompt=asked.add_generation_prompt,
        **options,
    )


def texts(pieces: Sequence[Piece]) -> tuple[str, str]:
    """Text and reasoning of an answer."""
    text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    return text, "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))


def calls(pieces: Sequence[Piece]) -> list[tuple[Call, str]]:
    """Calls of an answer with their arguments."""
    found = {piece.index: (piece, "") for piece in pieces if isinstance(piece, Call)}
    for piece in pieces:
        if isinstance(piece, Arguments) and piece.index in found:
            call, text = found[piece.index]
            found[piece.index] = call, text + piece.text
    return list(found.values())
