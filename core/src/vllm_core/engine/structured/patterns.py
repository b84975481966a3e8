"""Regular expressions of JSON schemas. They speak of a text, the grammar of how JSON writes it: quotes, backslashes and line
breaks that an expression asks for outside of a class have to be escaped. Classes need nothing: the compiler leaves out of
them what cannot stand in a JSON text as it is."""

from __future__ import annotations

import re
from collections.abc import Iterator

SAFE = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"
"""A character that stands in a JSON text as it is. Listed, since the compiler counts half of a surrogate pair among the
characters that a negated class leaves."""

EMAIL = r"^[A-Za-z0-9]+([._+-][A-Za-z0-9]+)*@[A-Za-z0-9]+([.-][A-Za-z0-9]+)*[.][A-Za-z]{2,10}$"
"""Addresses without quoted parts."""

_ESCAPED = {'"': r'(?:\\")', r"\"": r'(?:\\")', r"\\": r"(?:\\\\)"}
_ESCAPED.update({rf"\{name}": rf"(?:\\{name})" for name in "nrtf"})
_NUMBERED = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]+)\}|c.|0|v)")
_TOKEN = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\u\{[0-9a-fA-F]+\}|\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}|\\c.|\\.|.", re.DOTALL)


def escaped(pattern: str) -> str:
    """``pattern`` for the text as JSON writes it."""
    return "".join(_ESCAPED.get(token, token) for token in _tokens(pattern))


def can_be_escaped(pattern: str) -> bool:
    """Whether it names no such character by its number, and has none below a space."""
    for token in _tokens(pattern):
        numbered = _NUMBERED.fullmatch(token)
        if numbered is not None:
            digits = numbered[1] or numbered[2] or numbered[3]
            if digits is None or int(digits, 16) < 32 or chr(min(int(digits, 16), 0x10FFFF)) in '"\\':
                return False
        elif len(token) == 1 and token < " ":
            return False
    return True


def _tokens(pattern: str) -> Iterator[str]:
    """Classes, escapes and characters."""
    return (found[0] for found in _TOKEN.finditer(pattern))
