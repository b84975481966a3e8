"""`vllm-core conformance ...`: the command of the distribution vllm-conformance, where that is installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from vllm_core.errors import ConfigError

Subparsers = Any
SUITE = "vllm_conformance"


def add_parser(subparsers: Subparsers) -> None:
    """Add `conformance`, as the suite defines it. Raises ConfigError where that is not installed."""
    if find_spec(SUITE) is None:
        raise ConfigError(
            "The conformance suite is not installed",
            on="vllm-core conformance",
            found=f"no module {SUITE}",
            expected="the distribution vllm-conformance, of the version of vllm-core",
            fix="pip install ./conformance in a checkout",
        )
    from vllm_conformance.cli.conformance import add_parser as add_suite

    add_suite(subparsers)
