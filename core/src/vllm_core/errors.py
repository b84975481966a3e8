"""Every exception that vllm-core raises on purpose.

    VLLMCoreError
    ├── ConfigError              an option or environment variable is wrong        (exit status 2)
    │   └── UnknownOptionError   the name does not exist; carries the nearest one
    ├── ModelError               the model cannot be used                           (exit status 2)
    │   ├── ModelNotFoundError   no such folder, file or repository
    │   ├── ModelConfigError     config.json is missing, broken or of an unknown architecture
    │   ├── WeightsError         weights are missing, truncated or of a wrong shape
    │   └── TokenizerError       tokenizer or chat template is missing or broken
    ├── RequestError             one request is wrong; no other is disturbed        (HTTP 400)
    │   ├── ContextLengthError   its prompt is longer than the model's context
    │   └── DeadlineError        it took longer than it may                         (HTTP 504)
    ├── PlatformError            no usable platform                                 (exit status 2)
    │   ├── UnknownPlatformError the name asked for is not installed
    │   ├── PluginError          a plugin failed: import, hook, manifest, version
    │   └── PlanError            needs and claims do not match; carries the rejected candidates
    ├── UnsupportedError         an op or device was asked for what it declares absent
    ├── MemoryBudgetError        the memory does not hold what was asked for        (exit status 2)
    └── EngineError              the engine failed while running
        └── EngineDeadError      its process is gone                                (HTTP 503)

Each message has four parts: what failed, on which object, what was found against what was expected,
and what to do about it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class VLLMCoreError(Exception):
    """Base of all; the four parts stay readable as attributes."""

    exit_status = 2

    def __init__(self, what: str, *, on: str, found: str, expected: str, fix: str) -> None:
        self.what, self.on, self.found, self.expected, self.fix = what, on, found, expected, fix
        super().__init__(what, on, found, expected, fix)

    def __str__(self) -> str:
        return f"{self.what}: {self.on}\n  found:    {self.found}\n  expected: {self.expected}\n  fix:      {self.fix}"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.on, self.found, self.expected, self.fix)


def _rebuild(cls: type[VLLMCoreError], what: str, on: str, found: str, expected: str, fix: str) -> VLLMCoreError:
    return cls(what, on=on, found=found, expected=expected, fix=fix)


class ConfigError(VLLMCoreError):
    """An option or environment variable has a value that cannot be used."""


class UnknownOptionError(ConfigError):
    """An option or environment variable does not exist."""


class ModelError(VLLMCoreError):
    """The model cannot be used."""


class ModelNotFoundError(ModelError):
    """No such folder, file or repository."""


class ModelConfigError(ModelError):
    """The model's configuration is missing, broken or of an unknown architecture."""


class WeightsError(ModelError):
    """Weights are missing, truncated or of a wrong shape."""


class TokenizerError(ModelError):
    """Tokenizer or chat template is missing or broken."""


class RequestError(VLLMCoreError):
    """One request is wrong; no other request is disturbed."""


class ContextLengthError(RequestError):
    """A prompt is longer than the context; clients that know this error shorten it and try again."""


class DeadlineError(RequestError):
    """A request took longer than it may; it was ended."""


class PlatformError(VLLMCoreError):
    """No platform can be used."""


class UnknownPlatformError(PlatformError):
    """The platform asked for by name is not installed."""


class PluginError(PlatformError):
    """A plugin failed: its import, a hook, its manifest or its API version."""


class PlanError(PlatformError):
    """What the model needs and what the platforms claim do not match."""


class UnsupportedError(VLLMCoreError):
    """An op or device was asked for something that it declares absent."""


class MemoryBudgetError(VLLMCoreError):
    """The memory does not hold what was asked for."""


class EngineError(VLLMCoreError):
    """The engine failed while running."""

    exit_status = 1


class EngineDeadError(EngineError):
    """The engine's process is gone."""


_FOREWORD = re.compile(r"^(?:-+|/(?:[^/]*/)*)")
"""What says nothing of a name: an option's dashes, a path's folders."""


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like ``name``, or None where none does."""
    alike = difflib.get_close_matches(name, sorted(known), n=8, cutoff=0.6)
    bare = _FOREWORD.sub("", name)
    return next((one for one in alike if difflib.get_close_matches(bare, [_FOREWORD.sub("", one)], cutoff=0.6)), None)


def nearest(name: str, known: Iterable[str], *, listed: bool = False) -> str:
    """Return ``did you mean 'x'?`` for the known name closest to ``name``, or the list unless it is ``listed`` before."""
    names = sorted(known)
    match = closest(name, names)
    if match is not None:
        return f"did you mean {match!r}?"
    if listed and names:
        return "use one of those"
    return f"use one of: {', '.join(names)}" if names else "nothing is available"
