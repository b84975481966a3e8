"""The child process of `plugin check`: imports one plugin, asks every hook that needs no device, and reports step by step.

    python -m vllm_core.authoring.child DISTRIBUTION ENTRY_POINT REPORT

The report has one JSON value a line, written as each step begins and ends, so that a crash or a hang has a place.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import invalidate_caches
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from vllm_core.api import Companion, DeviceFacts, Offer, ProbeReport
from vllm_core.authoring.offer_rules import OfferFacts
from vllm_core.errors import VLLMCoreError
from vllm_core.registry.discover import find
from vllm_core.registry.load import Loaded, load
from vllm_core.registry.plan import Failed
from vllm_core.registry.snapshot import manifest_data

HEAVY = ("torch", "pydantic", "transformers", "triton")
MADE_UP = "unknown"
"""Architecture of the device that is asked about where the manifest names none and none is here."""
TOO_OLD = "0.0.0.1"
"""A version that no range of a companion should have."""


class Begun(msgspec.Struct, frozen=True, tag=True):
    """A step has begun."""

    step: str


class Broken(msgspec.Struct, frozen=True, tag=True):
    """A step failed."""

    step: str
    found: str
    expected: str
    fix: str


class Imported(msgspec.Struct, frozen=True, tag=True):
    """The plugin is loaded: its manifest (None: kernels alone), what it imported and what it changed in core meanwhile."""

    manifest: dict[str, Any] | None
    heavy: list[str]
    changed: list[str]
    took_s: float


class Configured(msgspec.Struct, frozen=True, tag=True):
    """Answer of `configure` to the default configuration, asked twice."""

    changes: list[str]
    without_reason: list[str]
    unknown: list[str]
    pure: bool


class Offered(msgspec.Struct, frozen=True, tag=True):
    """Offers and programs for a device of one architecture."""

    architecture: str
    offers: list[OfferFacts]
    programs: list[str]


class Probed(msgspec.Struct, frozen=True, tag=True):
    """The probe's report."""

    report: ProbeReport


class Refused(msgspec.Struct, frozen=True, tag=True):
    """What the probe said where a companion had a version that is too old: the check that names it; empty if none does."""

    companion: str
    planted: str
    said: str
    complete: bool
    """Whether the check failed and names the numbers of the range too."""


Event = Begun | Broken | Imported | Configured | Offered | Probed | Refused


class Reporter:
    """Appends events to the report; each is on disk when the call returns."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, event: Event) -> None:
        """Append."""
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")


def main(arguments: list[str]) -> int:
    """Return the exit status: 0 when every step ended, whatever was found."""
    distribution, entry_point, path = arguments
    report = Reporter(Path(path))
    found = next((one for one in find() if (one.distribution, one.entry_point) == (distribution, entry_point)), None)
    if found is None:
        report(
            Broken(
                "import", "the entry point is not found in the child process", "an installed entry point", "install it again"
            )
        )
        return 0
    report(Begun("import"))
    before, began = _core_names(), time.perf_counter()
    heavy = {name for name in HEAVY if name in sys.modules}
    loaded = load(found)
    if isinstance(loaded, Failed):
        report(Broken(loaded.stage, loaded.cause, "a plugin that loads", loaded.fix))
        return 0
    took_s = time.perf_counter() - began
    manifest = loaded.manifest
    data = manifest_data(manifest) if manifest is not None else None
    report(Imported(data, [name for name in HEAVY if name in sys.modules and name not in heavy], _changed(before), took_s))
    if manifest is None:
        _offered(report, loaded, _facts(found.platform, MADE_UP))
        return 0
    for architecture in manifest.architectures:
        _offered(report, loaded, _facts(manifest.device_type, architecture))
    _configured(report, loaded)
    devices = _probed(report, loaded)
    for one in manifest.companions:
        if one.distribution:
            _refused(report, loaded, one)
    seen = {one.architecture: one for one in devices if one.architecture not in manifest.architectures}
    if not seen and not manifest.architectures:
        seen = {MADE_UP: _facts(manifest.device_type, MADE_UP)}
    for device in seen.values():
        _offered(report, loaded, device)
    return 0


def _facts(device_type: str, architecture: str) -> DeviceFacts:
    return DeviceFacts(
        id="0",
        name="made up",
        device_type=device_type,
        architecture=architecture,
        memory_kind="discrete",
        memory_bytes=16 << 30,
    )


def _offered(report: Reporter, loaded: Loaded, device: DeviceFacts) -> None:
    step = f"offers for {device.architecture}"
    report(Begun(step))
    try:
        offers = loaded.offers(device)
        programs = loaded.programs(device) if loaded.manifest is not None else ()
        report(Offered(device.architecture, [_offer_facts(one) for one in offers], [one.entry for one in programs]))
    except VLLMCoreError as error:
        report(Broken(step, error.found, error.expected, error.fix))


def _offer_facts(offer: Offer) -> OfferFacts:
    architectures = None if offer.architectures is None else tuple(sorted(offer.architectures))
    return OfferFacts(
        provider=offer.provider,
        kind=offer.kind,
        ops=dict(offer.ops),
        architectures=architectures,
        op_versions=dict(offer.op_versions),
    )


def _configured(report: Reporter, loaded: Loaded) -> None:
    report(Begun("configure"))
    from vllm_core.config import EngineConfig, option_owners

    settings = EngineConfig.from_options({"model": "demo"})
    config: dict[str, Any] = {name: value for _, group in settings for name, value in group}
    config |= {"dtype": "float32", "memory_bytes": 16 << 30}
    try:
        first, second = (loaded.configure(dict(config), frozenset()) for _ in range(2))
    except VLLMCoreError as error:
        report(Broken("configure", error.found, error.expected, error.fix))
        return
    changes = sorted(first.changes)
    report(
        Configured(
            changes=changes,
            without_reason=[name for name in changes if not first.reasons.get(name)],
            unknown=[name for name in changes if name not in option_owners()],
            pure=first == second,
        )
    )


def _probed(report: Reporter, loaded: Loaded) -> tuple[DeviceFacts, ...]:
    """The devices that are here, if any."""
    report(Begun("probe"))
    try:
        found = loaded.probe()
        report(Probed(found))
    except VLLMCoreError as error:
        report(Broken("probe", error.found, error.expected, error.fix))
    except (TypeError, msgspec.MsgspecError) as error:
        report(
            Broken("probe", f"its report is not plain data: {error}", "a ProbeReport of plain values", "return plain values")
        )
    else:
        return found.devices
    return ()


def _refused(report: Reporter, loaded: Loaded, companion: Companion) -> None:
    """Whether the probe refuses a version that is too old, and says which it found and which it expected."""
    report(Begun(f"probe with {companion.distribution} {TOO_OLD}"))
    with _planted(companion.distribution):
        found = loaded.probe()
    checks = [one for one in found.checks if TOO_OLD in one.detail]
    said = checks[0].detail if checks else ""
    numbers = re.findall(r"\d+(?:\.\d+)*", companion.versions)
    complete = bool(checks) and checks[0].outcome == "failed" and all(number in said for number in numbers)
    report(Refused(str(companion), TOO_OLD, said, complete))


@contextmanager
def _planted(distribution: str) -> Iterator[None]:
    """Metadata of an installed distribution in that version, before all others, in this process alone."""
    with tempfile.TemporaryDirectory(prefix="vllm-core-planted-") as folder:
        place = Path(folder, f"{distribution.replace('-', '_')}-{TOO_OLD}.dist-info")
        place.mkdir()
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {TOO_OLD}\n", "utf-8")
        sys.path.insert(0, folder)
        invalidate_caches()
        try:
            yield
        finally:
            sys.path.remove(folder)
            invalidate_caches()


def _core_names() -> dict[tuple[str, str], object]:
    """Every name in the modules and classes of core that are loaded."""
    names: dict[tuple[str, str], object] = {}
    for module, value in list(sys.modules.items()):
        if module.partition(".")[0] == "vllm_core" and isinstance(value, ModuleType):
            names |= _names_in(module, vars(value))
            for name, member in list(vars(value).items()):
                if isinstance(member, type) and member.__module__.partition(".")[0] == "vllm_core":
                    names |= _names_in(f"{module}.{name}", vars(member))
    return names


def _names_in(owner: str, namespace: Mapping[str, object]) -> dict[tuple[str, str], object]:
    return {(owner, name): value for name, value in list(namespace.items()) if not name.startswith("_")}


def _changed(before: Mapping[tuple[str, str], object]) -> list[str]:
    """Names of core that are another object now, or new in what was loaded; submodules are not counted."""
    owners = {owner for owner, _ in before}
    changed = []
    for key, value in _core_names().items():
        if key[0] in owners and before.get(key) is not value and not isinstance(value, ModuleType):
            changed.append(".".join(key))
    return sorted(changed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
