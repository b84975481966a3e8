"""Reading a Hugging Face config with checks: each wrong value is an error that names the key and what was expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from vllm_core.errors import ModelConfigError, nearest


class Fields:
    """Typed access to the keys of one ``config.json``. A key that is null counts as missing."""

    def __init__(self, config: Mapping[str, Any], where: str = "config.json") -> None:
        self.config = config
        self.where = where

    @property
    def architecture(self) -> str:
        """First entry of ``architectures``. Raises ModelConfigError where there is none."""
        names = self.config.get("architectures")
        if not isinstance(names, Sequence) or isinstance(names, str) or not names or not isinstance(names[0], str):
            self.fail("architectures", "a list with the name of the model's class")
        return names[0]

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of at least ``least``; required where there is no default."""
        value = self._value(key, default, "an integer")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.fail(key, f"an integer of at least {least}")
        return value

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """A positive integer, or None where the key is null, or missing without a default."""
        if key in self.config and self.config[key] is None:
            return None
        return self.integer(key, default) if key in self.config or default is not None else None

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number; required where there is no default."""
        value = self._value(key, default, "a number")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            self.fail(key, "a positive number")
        return float(value)

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of ``length`` positive numbers."""
        value = self._value(key, None, "a list of numbers")
        if not isinstance(value, Sequence) or len(value) != length or not all(_is_positive(v) for v in value):
            self.fail(key, f"a list of {length} positive numbers")
        return tuple(float(v) for v in value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._value(key, default, "true or false")
        if not isinstance(value, bool):
            self.fail(key, "true or false")
        return value

    def choice(self, key: str, choices: Mapping[str, str], default: str) -> str:
        """The meaning of a name that is one of ``choices``."""
        value = self._value(key, default, "a name")
        if not isinstance(value, str) or value not in choices:
            self.fail(key, f"one of {', '.join(sorted(choices))}", fix=nearest(str(value), choices))
        return choices[value]

    def names(self, key: str, length: int, choices: Sequence[str]) -> tuple[str, ...] | None:
        """A list of ``length`` names, or None where the key is missing."""
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, Sequence) or len(value) != length or any(v not in choices for v in value):
            self.fail(key, f"a list of {length} names out of {', '.join(choices)}")
        return tuple(value)

    def table(self, key: str) -> Fields | None:
        """A nested object, or None where the key is missing."""
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.fail(key, "an object")
        return Fields(value, f"{self.where}, {key}")

    def fail(self, key: str, expected: str, *, fix: str | None = None) -> NoReturn:
        """Raise ModelConfigError about ``key``."""
        value = self.config.get(key)
        raise ModelConfigError(
            "Model config is missing a value" if value is None else "Model config has a wrong value",
            on=f"{key} in {self.where}",
            found="missing" if value is None else repr(value)[:200],
            expected=expected,
            fix=fix or f"correct {key} in the model's config.json, or set it with --hf-overrides",
        )

    def _value(self, key: str, default: Any, expected: str) -> Any:
        value = self.config.get(key)
        if value is not None:
            return value
        if default is None:
            self.fail(key, expected)
        return default


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
