"""Looks before and after: loads a plugin, opens its device, runs its ops and, if asked, a model, and counts patches."""

from __future__ import annotations

import sys

from vllm_conformance import opcheck
from vllm_conformance.patches import Change, snapshot
from vllm_core.errors import UnknownPlatformError, nearest
from vllm_core.registry.discover import find
from vllm_core.registry.load import Loaded, load


def changes_by(platform: str, model: str | None = None) -> tuple[Change, ...]:
    """What the plugin changed in core, torch and transformers.

    Must run in a process that has not loaded the plugin yet. Raises UnknownPlatformError, and what the plugin raises.
    """
    found = [one for one in find() if platform in (one.entry_point, one.distribution)]
    if not found:
        raise UnknownPlatformError(
            "No such platform",
            on=platform,
            found="no installed distribution has it",
            expected="an installed platform",
            fix=nearest(platform, [one.platform for one in find()]),
        )
    module = found[0].value.partition(":")[0]
    if module in sys.modules:
        raise UnknownPlatformError(
            "Too late to look for patches",
            on=platform,
            found=f"{module} is loaded in this process",
            expected="a process that has not loaded the plugin",
            fix="run `python -m vllm_conformance patches` by itself",
        )
    before = snapshot()
    candidate = opcheck.candidate_of(platform)
    loaded = load(found[0])
    assert isinstance(loaded, Loaded), "the candidate came from it"
    loaded.start(candidate.devices[0])
    loaded.create_device(candidate.devices[0])
    for _ in opcheck.check_platform(candidate, seeds=(0,)):
        pass
    if model is not None:
        _generate(platform, model)
    return before.changes(device_type=candidate.devices[0].device_type)


def _generate(platform: str, model: str) -> None:
    from vllm_core import LLM, SamplingParams

    LLM(model=model, platform=platform).generate("Hello", SamplingParams(max_tokens=4))
