"""Version of the contract between core and plugins.

``major.minor``. Core loads plugins built for its own major and the one before. A minor only adds: optional
hook arguments, keyword-only fields with defaults, ops that have a decomposition, capabilities.
It stays 0.x until tensor parallelism, draft-and-verify, LoRA, hybrid KV groups and a custom step program
have run on a plugin that was written without knowledge of core.
"""

from __future__ import annotations

API_VERSION = (0, 2)
"""The version that this core implements."""


def parse(version: str) -> tuple[int, int]:
    """Read ``"0.1"``. Raises ValueError on anything else."""
    major, _, minor = version.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise ValueError(f"API version {version!r} is not of the form major.minor")
    return int(major), int(minor)


def is_loadable(version: tuple[int, int]) -> bool:
    """Whether a plugin built for ``version`` can be loaded by this core."""
    return API_VERSION[0] - 1 <= version[0] <= API_VERSION[0]
