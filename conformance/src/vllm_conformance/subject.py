"""The platform under test inside a child process, and what can be said of it without opening a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_conformance.case import MissingDeviceError, Subject
from vllm_core.api import CAPABILITIES, ProbeReport
from vllm_core.errors import PluginError, UnknownPlatformError, nearest
from vllm_core.registry.candidates import Plugins, load_all, narrow, with_offers
from vllm_core.registry.discover import Found, find
from vllm_core.registry.load import Loaded
from vllm_core.registry.plan import Candidate
from vllm_core.registry.probe import probe
from vllm_core.registry.validate import claim

if TYPE_CHECKING:
    from vllm_core.api import Device, DeviceFacts, Offer, Support

DENY = "deny_provider"
"""Option of a run, and of an engine: names of providers."""


def found_platform(name: str) -> Found:
    """The installed platform of this name. Raises UnknownPlatformError."""
    platforms = [one for one in find() if not one.kernels_only]
    exact = [one for one in platforms if one.entry_point == name]
    named = exact or [one for one in platforms if one.answers_to(name)]
    if len(named) == 1:
        return named[0]
    raise UnknownPlatformError(
        "Platform's name fits several" if named else "No such platform",
        on=name,
        found=", ".join(one.key for one in named) or "no installed distribution has it",
        expected="an installed platform",
        fix=f"use one of: {', '.join(one.key for one in named)}"
        if named
        else nearest(name, [one.platform for one in platforms]),
    )


class LiveSubject:
    """A `vllm_conformance.case.Subject`. Everything is loaded when it is first asked for, and kept.

    ``announce`` is called with False before something is opened that takes its time, and with True afterwards.
    """

    def __init__(
        self,
        name: str,
        *,
        devices: Sequence[DeviceFacts] = (),
        options: Mapping[str, Any] | None = None,
        announce: Callable[[bool], None] = lambda done: None,
    ) -> None:
        self.found = found_platform(name)
        self.platform = self.found.platform
        self.options: Mapping[str, Any] = options or {}
        self._given = tuple(devices)
        self.announce = announce
        self._opened: dict[int, Device] = {}
        self._started = False

    @cached_property
    def _plugins(self) -> Plugins:
        return load_all(narrow(find(), self.found.key))

    @cached_property
    def loaded(self) -> Loaded:
        """The plugin. Raises PluginError where it cannot be loaded."""
        if self._plugins.platforms:
            return self._plugins.platforms[0]
        failed = next(one for one in self._plugins.failed if one.key == self.found.key)
        raise PluginError(
            "Plugin failed", on=failed.key, found=failed.cause, expected=f"stage {failed.stage} to pass", fix=failed.fix
        )

    @cached_property
    def candidate(self) -> Candidate:
        """The platform with the devices that are under test. Raises PluginError, or MissingDeviceError where none is there."""
        report = ProbeReport(devices=self._given, checks=()) if self._given else self._probe()
        candidates = with_offers(self.loaded, report, self._plugins)
        if not candidates:
            failed = self._plugins.failed[-1]
            raise PluginError("Plugin failed", on=failed.key, found=failed.cause, expected="its offers", fix=failed.fix)
        if not candidates[0].devices:
            causes = [f"{check.name}: {check.detail}" for check in report.failures]
            raise missing_device(self.platform, "; ".join(causes) or "the probe found none")
        return candidates[0]

    def _probe(self) -> ProbeReport:
        report = probe(self.loaded, environ=os.environ)
        if isinstance(report, ProbeReport):
            return report
        raise PluginError("Probe failed", on=report.key, found=report.cause, expected="a report", fix=report.fix)

    def choose(self, device: str) -> None:
        """Put the device of this id first. Raises MissingDeviceError."""
        named = [one for one in self._probe().devices if one.id == device]
        if not named:
            raise missing_device(self.platform, f"no device {device!r}")
        same = [one for one in self._probe().devices if one.architecture == named[0].architecture and one != named[0]]
        self._given = (*named, *same)

    @cached_property
    def claims(self) -> Mapping[str, Support]:
        """The answer for every capability that this core knows."""
        manifest = self.loaded.manifest
        assert manifest is not None, "a platform has a manifest"
        return {name: claim(manifest, name) for name in CAPABILITIES}

    @cached_property
    def offers(self) -> Sequence[Offer]:
        """Offers that may serve here; references only where the device is fully eager, and none that the run denies."""
        one, denied = self.candidate, denied_by(self.options)
        fitting = [offer for offer in one.offers if offer.kind != "reference" or one.eager_full]
        return tuple(offer for offer in fitting if offer.provider not in denied)

    @property
    def facts(self) -> DeviceFacts:
        """The device under test."""
        return self.candidate.devices[0]

    @property
    def all_facts(self) -> Sequence[DeviceFacts]:
        """All devices of its architecture."""
        return self.candidate.devices

    @property
    def device(self) -> Device:
        """The device under test, opened; ops run on it, also where a peer was opened meanwhile."""
        device = self.peer(0)
        device.make_current()
        return device

    def peer(self, index: int = 1) -> Device:
        """Another one, opened. Raises MissingDeviceError."""
        if index not in self._opened:
            if index >= len(self.all_facts):
                raise missing_device(
                    self.platform, f"{len(self.all_facts)} of architecture {self.facts.architecture}", index + 1
                )
            self.announce(False)
            if not self._started:
                self.loaded.start(self.facts)
                self._started = True
            self._opened[index] = self.loaded.create_device(self.all_facts[index])
            self.announce(True)
        return self._opened[index]

    def providers(self) -> dict[str, tuple[str, ...]]:
        """Of each op that something serves: its providers, best first."""
        served: dict[str, dict[str, None]] = {}
        for offer in sorted(self.offers, key=lambda offer: -offer.priority):
            for op in offer.ops:
                served.setdefault(op, {})[offer.provider] = None
        return {op: tuple(names) for op, names in sorted(served.items())}


def denied_by(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Providers that a run leaves out, from its options: what they serve is then the next one's, or the references'."""
    return tuple(options.get(DENY, ()))


def missing_device(platform: str, found: str, wanted: int = 1) -> MissingDeviceError:
    """The error of a case that lacks a device."""
    return MissingDeviceError(
        "Not enough devices",
        on=f"platform {platform}",
        found=found,
        expected=f"{wanted} device{'s' if wanted > 1 else ''}",
        fix="run where they are; `vllm-core doctor` says why one is not seen",
    )


def places_of(subject: Subject, workers: int) -> list[DeviceFacts]:
    """The device of each of so many workers, one that they may share if need be. Raises MissingDeviceError."""
    if len(subject.all_facts) >= workers:
        return list(subject.all_facts[:workers])
    if subject.facts.max_workers >= workers:
        return [subject.facts] * workers
    raise missing_device(
        subject.platform,
        f"{len(subject.all_facts)} of architecture {subject.facts.architecture}, and none that {workers} workers may share",
        workers,
    )


def claims_data(claims: Mapping[str, Support]) -> dict[str, dict[str, Any]]:
    """Claims as plain data, tagged by their kind."""
    return {name: {"kind": KINDS[type(one).__name__], **msgspec.to_builtins(one)} for name, one in claims.items()}


KINDS: Mapping[str, str] = {
    "Full": "full",
    "Versioned": "versioned",
    "Partial": "partial",
    "NotImplementedYet": "not_implemented",
    "Unsupported": "unsupported",
}
ABSENT = frozenset({"not_implemented", "unsupported"})
"""Kinds of claims that say: absent."""
