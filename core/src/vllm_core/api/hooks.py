"""The hooks that a plugin implements. This docstring and those below are the contract.

A distribution declares an entry point in the group `vllm.platforms` whose value is a module or object with the
hooks below, each marked with `hookimpl`. Core imports it itself, guarded, registers it as
``distribution:entry_point`` and validates every hook's signature; what fails is reported with its cause and never
hides another plugin. Hooks return facts and factories; nothing here is called per token.

The entry point's name is the platform's, equal to `Manifest.name`. A distribution that only adds kernels to another's
platform implements `offers` alone, and names its entry point ``PLATFORM.NAME``: choosing a platform imports no other,
so the name has to say to which one the kernels belong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

from vllm_core.api.backend import Offer
from vllm_core.api.manifest import DeviceFacts, Manifest, ProbeReport

if TYPE_CHECKING:
    from vllm_core.api.device import Device
    from vllm_core.api.program import ProgramOffer

PROJECT = "vllm"
ENTRY_POINT_GROUP = "vllm.platforms"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigPatch:
    """Answer of `configure`: options to change, each with a reason that a user can read."""

    changes: Mapping[str, Any]
    reasons: Mapping[str, str]


class PlatformSpec:
    """Hooks that make a distribution a platform."""

    @hookspec(firstresult=True)
    def manifest(self) -> Manifest:  # type: ignore[empty-body]
        """Return the manifest.

        Called in every process that looks for platforms. Must not import torch, touch a device or read files
        outside the distribution; takes milliseconds.
        """

    @hookspec(firstresult=True)
    def probe(self) -> ProbeReport:  # type: ignore[empty-body]
        """Look at this machine.

        Called in a child process with a time limit, never in the engine's process. Pure: it reports every check it
        made, successful or not, with a hint for each that failed, and leaves no device context behind.
        """

    @hookspec(firstresult=True)
    def configure(self, config: Mapping[str, Any], explicit: frozenset[str]) -> ConfigPatch:  # type: ignore[empty-body]
        """Adapt a complete configuration.

        Called once, on the chosen plugin alone, with every option at its value and the names of those that the user
        set. Pure. Changing an explicit option is an error.
        """

    @hookspec(firstresult=True)
    def programs(self, device: DeviceFacts) -> Sequence[ProgramOffer]:  # type: ignore[empty-body]
        """Return the plugin's own step programs and flat models; an empty sequence is normal. Pure."""

    @hookspec(firstresult=True)
    def start(self, device: DeviceFacts, sharers: int) -> None:
        """Called first in every engine process of the chosen platform, before its Device is created.

        ``sharers`` is how many processes of this model run on the device, this one included: more than 1 only where
        `DeviceFacts.max_workers` allows it. An implementation may leave the argument out.
        """


class DeviceSpec:
    """Hook that opens a device."""

    @hookspec(firstresult=True)
    def create_device(self, facts: DeviceFacts) -> Device:  # type: ignore[empty-body]
        """Open the device in this engine process. Called once, after `start`, on the chosen plugin alone."""


class BackendSpec:
    """Hook that offers ops."""

    @hookspec
    def offers(self, device: DeviceFacts) -> Sequence[Offer]:  # type: ignore[empty-body]
        """Return the ops that this distribution implements for ``device``.

        Called on every enabled plugin while planning. Pure: metadata and names, no import of kernels.
        """


PLATFORM_HOOKS = ("manifest", "probe", "configure", "programs", "start", "create_device", "offers")
"""Hooks that a platform must implement; a kernel-only distribution needs `offers` alone."""
