"""The platforms that the user's choice leaves: one name, or several in the user's order."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_core.errors import PluginError, UnknownPlatformError, nearest
from vllm_core.registry.candidates import names_in
from vllm_core.registry.hardware import KnownPlugin, known_plugins
from vllm_core.registry.plan import Candidate, Failed

_ABSENT = ("missing", "foreign")


def asked(name: str | None, candidates: Sequence[Candidate], failed: Sequence[Failed]) -> list[Candidate]:
    """The candidates that ``name`` means. Of several names, those that failed or are not installed are passed over.

    Raises UnknownPlatformError if a name is unknown, or none of them is installed, PluginError if the only one failed.
    """
    if name is None:
        return list(candidates)
    names = names_in(name)
    named = {one: [c for c in candidates if one in names_of(c)] or _of_vendor(one, candidates) for one in names}
    for one in names:
        if not named[one] and (len(names) == 1 or (_failure(one, failed) is None and _known(one) is None)):
            raise _unusable(one, candidates, failed)
    found = [candidate for one in names for candidate in named[one]]
    if not found:
        raise _unusable(names[0] if names else name, candidates, failed)
    return list({id(one): one for one in found}.values())


def position(name: str | None, candidate: Candidate) -> int:
    """Place in the user's order of the first name that means the candidate."""
    names = names_in(name) if name is not None else ()
    meant = [index for index, one in enumerate(names) if one in names_of(candidate)]
    vendor = [index for index, one in enumerate(names) if one == candidate.manifest.vendor]
    return next(iter(meant or vendor), 0)


def passed_over(name: str | None, candidates: Sequence[Candidate], failed: Sequence[Failed]) -> list[str]:
    """A line for each of several names that is not installed; those that failed are reported as failures."""
    notes = []
    for one in names_in(name) if name is not None else ():
        known = _known(one)
        installed = any(one in names_of(candidate) for candidate in candidates) or _of_vendor(one, candidates)
        if known is not None and not installed and _failure(one, failed) is None:
            notes.append(f"{one} was asked for and is not installed; fix: {known.install}")
    return notes


def names_of(candidate: Candidate) -> tuple[str, ...]:
    """All that a candidate answers to but its vendor."""
    key = f"{candidate.distribution}:{candidate.entry_point}"
    return candidate.manifest.name, candidate.entry_point, candidate.distribution, key


def plugin_error(failure: Failed, expected: str, fix: str) -> PluginError:
    """The error of a plugin that failed, with its own exception as the cause."""
    error = PluginError("Plugin failed", on=failure.key, found=f"{failure.stage}: {failure.cause}", expected=expected, fix=fix)
    error.__cause__ = failure.error
    return error


def _of_vendor(name: str, candidates: Sequence[Candidate]) -> list[Candidate]:
    return [one for one in candidates if name == one.manifest.vendor]


def _failure(name: str, failed: Sequence[Failed]) -> Failed | None:
    return next((one for one in failed if name in (one.entry_point, one.distribution, one.key)), None)


def _known(name: str) -> KnownPlugin | None:
    return next((one for one in known_plugins() if name in (one.platform, one.distribution)), None)


def _unusable(name: str, candidates: Sequence[Candidate], failed: Sequence[Failed]) -> UnknownPlatformError | PluginError:
    """Why nothing that is installed can be meant by ``name``."""
    failure = _failure(name, failed)
    if failure is not None and failure.stage not in _ABSENT:
        return plugin_error(failure, f"platform {name}, which was asked for, to work", failure.fix)
    ours = _known(name)
    known = {alias for one in candidates for alias in (one.manifest.name, one.manifest.vendor)} | {
        one.entry_point for one in failed
    }
    # One of our own packages is to be installed, not mistaken for another platform whose name is near.
    how = ours.install if ours is not None else nearest(name, known)
    return UnknownPlatformError(
        "Unknown platform",
        on=name,
        found=failure.cause if failure is not None else "no installed plugin has this name",
        expected=f"one of the installed platforms: {', '.join(sorted({one.manifest.name for one in candidates})) or 'none'}",
        fix=failure.fix if failure is not None else how,
    )
