"""Finding plugins by their entry points, without importing any.

An entry point named ``x`` is the platform x. One named ``x.anything`` belongs to a distribution that only adds kernels
to platform x: the name says so, because choosing x must import no other platform, and only an import could tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import importlib_metadata

from vllm_core.api import ENTRY_POINT_GROUP
from vllm_core.errors import ConfigError, nearest
from vllm_core.registry.hardware import KnownPlugin, known_plugins
from vllm_core.registry.plan import Failed

ALLOW_LIST = "VLLM_CORE_PLUGINS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One entry point of an installed distribution; `value` is ``module`` or ``module:object``."""

    distribution: str
    version: str
    entry_point: str
    value: str

    @property
    def key(self) -> str:
        """``distribution:entry_point``, unique among the plugins of an environment."""
        return f"{self.distribution}:{self.entry_point}"

    @property
    def platform(self) -> str:
        """Name of the platform it is, or adds kernels to."""
        return self.entry_point.partition(".")[0]

    @property
    def kernels_only(self) -> bool:
        """Whether it adds kernels to another distribution's platform."""
        return "." in self.entry_point

    def answers_to(self, name: str) -> bool:
        """Whether ``name`` means this plugin, and not merely the platform that it adds kernels to."""
        return name in (self.entry_point, self.distribution, self.key)


def find(group: str = ENTRY_POINT_GROUP) -> list[Found]:
    """Return every entry point of ``group``, ordered by key. Two of one name are both found. Imports no plugin."""
    return _sorted((entry.dist, entry) for entry in importlib_metadata.entry_points(group=group))


def find_in(distribution: str) -> list[Found]:
    """The entry points of one distribution, as `find` has them, without a look at all that is installed."""
    try:
        there = importlib_metadata.distribution(distribution)
    except importlib_metadata.PackageNotFoundError:  # one that is half removed has lost its name, and is found by a look at all
        return [one for one in find() if one.distribution == distribution]
    return _sorted((there, entry) for entry in there.entry_points.select(group=ENTRY_POINT_GROUP))


def _sorted(entries: Iterable[tuple[importlib_metadata.Distribution, importlib_metadata.EntryPoint]]) -> list[Found]:
    found = {
        Found(distribution=_name(owner), version=_version(owner), entry_point=entry.name, value=entry.value)
        for owner, entry in entries
    }
    return sorted(found, key=lambda one: (one.key, one.value))


def enabled(found: Sequence[Found], environ: Mapping[str, str]) -> list[Found]:
    """Apply the allow-list `VLLM_CORE_PLUGINS`. Raises ConfigError for a name in it that nothing answers to."""
    text = environ.get(ALLOW_LIST)
    if text is None:
        return list(found)
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if not any(one.answers_to(name) for one in found):
            raise ConfigError(
                "Unknown plugin in the allow-list",
                on=ALLOW_LIST,
                found=repr(name),
                expected=f"installed plugins of the group {ENTRY_POINT_GROUP}",
                fix=nearest(name, {one.entry_point for one in found} | {one.key for one in found}),
            )
    return [one for one in found if any(one.answers_to(name) for name in names)]


def foreign(known: Iterable[KnownPlugin] | None = None) -> list[Failed]:
    """Report installed distributions that have a name of ours but no entry point of ours: other projects' packages."""
    failed = []
    for plugin in known_plugins() if known is None else known:
        try:
            distribution = importlib_metadata.distribution(plugin.distribution)
        except importlib_metadata.PackageNotFoundError:
            continue
        if not distribution.entry_points.select(group=ENTRY_POINT_GROUP):
            failed.append(
                Failed(
                    distribution=plugin.distribution,
                    entry_point=plugin.platform,
                    stage="foreign",
                    cause=f"another project's package of this name is installed (version {_version(distribution)}): "
                    f"it has no entry point of the group {ENTRY_POINT_GROUP}",
                    fix=f"pip uninstall {plugin.distribution}, then {plugin.install}; "
                    "keep the other project in an environment of its own",
                )
            )
    return failed


def _name(distribution: importlib_metadata.Distribution) -> str:
    try:
        return str(distribution.name)
    except FileNotFoundError:  # a half-removed distribution has entry points and no METADATA
        return "unnamed"


def _version(distribution: importlib_metadata.Distribution) -> str:
    try:
        return str(distribution.version)
    except FileNotFoundError:
        return "0"
