"""A manifest against what its claims, versions and metadata have to say. What makes it unusable, `load` has refused before."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from vllm_core.api import (
    CAPABILITIES,
    ENTRY_POINT_GROUP,
    Manifest,
    NotImplementedYet,
    Partial,
    Unsupported,
    Versioned,
    is_available,
)
from vllm_core.api.capability import describe
from vllm_core.authoring.finding import Finding, failed, ok, skipped
from vllm_core.authoring.subject import UNKNOWN_VERSION, Subject
from vllm_core.registry.hardware import known_plugins
from vllm_core.registry.matching import SINCE
from vllm_core.registry.validate import claim
from vllm_core.version import __version__

CORE = "vllm-core"
OLDEST_PYTHON = "3.10"
NATIVE = re.compile(r"\.(so|dylib|dll|pyd)(\.[0-9.]+)?$")
_LEVELS = range(6)


def check_manifest(subject: Subject, manifest: Manifest) -> list[Finding]:
    """Claims that say something, required ones available, versions of both places in step."""
    findings = [*_claims(manifest), *_versions(subject, manifest), *_architectures(subject, manifest)]
    if not any(one.outcome == "failed" for one in findings):
        available = sum(is_available(claim(manifest, name)) for name in CAPABILITIES)
        findings.insert(
            0, ok("claims", manifest.name, f"{available} of {len(CAPABILITIES)} capabilities available, all answered")
        )
    gaps = [f"{name}: {describe(one)}" for name, one in manifest.claims.items() if isinstance(one, NotImplementedYet)]
    if gaps:
        findings.append(
            skipped("claims", manifest.name, "\n".join(gaps), fix="known gaps; nothing that is asked for them starts")
        )
    return findings


def _claims(manifest: Manifest) -> Iterator[Finding]:
    for name, capability in CAPABILITIES.items():
        support = claim(manifest, name)
        if capability.required and not is_available(support):
            yield _claim(
                name, describe(support), f"available: it is required ({capability.doc})", "the engine cannot run without it"
            )
        empty = (
            (isinstance(support, Unsupported) and not support.why)
            or (isinstance(support, NotImplementedYet) and not support.issue)
            or (isinstance(support, Partial) and not (support.reason and support.cases))
        )
        if empty:
            yield _claim(
                name, repr(support), "words for a person: why, which cases, or where it is tracked", "say it in the claim"
            )
        if isinstance(support, Versioned) and not _readable(support.since):
            yield _claim(
                name, repr(support), "'driver' or 'runtime' and a version range", 'for example Versioned("driver>=550")'
            )


def _claim(name: str, found: str, expected: str, fix: str) -> Finding:
    return failed("claims", f"claims[{name!r}]", found, expected=expected, fix=fix)


def _readable(since: str) -> bool:
    parts = SINCE.fullmatch(since.strip())
    try:
        return parts is not None and SpecifierSet(parts[2]) is not None
    except InvalidSpecifier:
        return False


def _versions(subject: Subject, manifest: Manifest) -> Iterator[Finding]:
    if manifest.conformance_level not in _LEVELS:
        yield failed(
            "manifest",
            "conformance_level",
            repr(manifest.conformance_level),
            expected="0 to 5",
            fix="name the level that `vllm-core conformance run` reached",
        )
    requirement = _core_requirement(subject)
    if requirement is not None and manifest.core_range and not _same_range(requirement.specifier, manifest.core_range):
        yield failed(
            "versions",
            f"core_range of {manifest.name}",
            f"{manifest.core_range!r} in the manifest, {str(requirement.specifier)!r} in the dependencies",
            expected="one range in both places: pip reads one, vllm-core the other",
            fix="make them equal",
        )


def _same_range(left: SpecifierSet, right: str) -> bool:
    return left == SpecifierSet(right)


def _core_requirement(subject: Subject) -> Requirement | None:
    for text in subject.requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if canonicalize_name(requirement.name) == CORE:
            return requirement
    return None


def _architectures(subject: Subject, manifest: Manifest) -> Iterator[Finding]:
    native = [name for name in subject.files or () if NATIVE.search(name)]
    if native and not manifest.architectures:
        yield failed(
            "architectures",
            f"manifest of {manifest.name}",
            f"none, and the wheel has native code: {', '.join(native[:3])}",
            expected="the architectures that the kernels are built for, so that others are refused by name",
            fix='architectures=("sm_80", "sm_90"), for example',
        )
    if len(set(manifest.architectures)) != len(manifest.architectures) or not all(manifest.architectures):
        found, expected = ", ".join(map(repr, manifest.architectures)), "each named once"
        yield failed("architectures", f"manifest of {manifest.name}", found, expected=expected, fix="remove the doubles")


def check_metadata(subject: Subject) -> list[Finding]:
    """What pip, and people, read of the distribution."""
    findings = [*_own_names(subject), *_requirements(subject), *_wheel(subject)]
    if not any(one.outcome == "failed" for one in findings):
        entries = ", ".join(one.entry_point for one in subject.entries)
        findings.append(ok("metadata", subject.origin, f"{subject.distribution} {subject.version}, entry points: {entries}"))
    return findings


def _own_names(subject: Subject) -> Iterator[Finding]:
    if not subject.entries:
        yield failed(
            "entry point",
            subject.distribution,
            f"no entry point of the group {ENTRY_POINT_GROUP}",
            expected=f'[project.entry-points."{ENTRY_POINT_GROUP}"] with NAME = "package.plugin"',
            fix="add it to pyproject.toml: core finds plugins by it alone",
        )
    for one in subject.entries:
        ours = next((known for known in known_plugins() if known.platform == one.platform), None)
        if ours is not None and not one.kernels_only and canonicalize_name(subject.distribution) != ours.distribution:
            found = f"{one.entry_point!r}, which is the platform of {ours.distribution}"
            fix = "choose another name; `PLATFORM.NAME` adds kernels to that platform"
            yield failed("entry point", subject.distribution, found, expected="a name of its own", fix=fix)
    try:
        Version(subject.version)
    except InvalidVersion:
        expected, fix = "a version as pip knows it", "for example 0.1.0"
        yield failed("versions", subject.distribution, repr(subject.version), expected=expected, fix=fix)
    if subject.version == UNKNOWN_VERSION:
        yield skipped("versions", subject.distribution, "only its build tool knows the version", fix="check the wheel")


def _requirements(subject: Subject) -> Iterator[Finding]:
    requirement = _core_requirement(subject)
    ours = Version(__version__)
    example = f'"{CORE}>={ours.major}.{ours.minor}.0.dev0,<{ours.major}.{ours.minor + 1}"'
    if requirement is None:
        found, expected = f"no dependency on {CORE}", "a range of versions that it was made for"
        yield failed("versions", f"dependencies of {subject.distribution}", found, expected=expected, fix=f"add {example}")
    elif not any(one.operator in ("<", "<=", "==", "~=") for one in requirement.specifier):
        found, expected = str(requirement), "an upper bound: a plugin that is too old must be refused by pip, not by a crash"
        yield failed(
            "versions", f"dependencies of {subject.distribution}", found, expected=expected, fix=f"for example {example}"
        )
    if not subject.requires_python:
        yield failed(
            "metadata",
            f"requires-python of {subject.distribution}",
            "none",
            expected=f"the oldest Python it runs on, {OLDEST_PYTHON} or newer",
            fix=f'requires-python = ">={OLDEST_PYTHON}"',
        )


def _wheel(subject: Subject) -> Iterator[Finding]:
    if subject.files is None:
        return
    tops = {name.partition("/")[0] for name in subject.files}
    for top in sorted(tops & {"vllm", "vllm_core", "torch", "triton", "transformers"}):
        fix = "build the wheel from the plugin's package alone"
        yield failed("metadata", f"wheel {subject.origin}", f"contains {top}/", expected="its own packages only", fix=fix)
    if not any(name.endswith(".dist-info/RECORD") for name in subject.files):
        expected, fix = "a RECORD, which pip needs to remove it again", "build it with a build backend"
        yield failed("metadata", f"wheel {subject.origin}", "no RECORD", expected=expected, fix=fix)
