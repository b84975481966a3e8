"""First looks: a plugin that was never imported on this machine is imported in a child process first, all of them at once.

An import can end the process, and a crash cannot be caught. Once it has come to an end, well or by an exception, it is repeated
here without a child, as long as nothing that it depends on has changed. What a first look probed is not probed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from vllm_core.api import ProbeReport
from vllm_core.registry import fingerprint
from vllm_core.registry.cache import cache_folder, write_atomic
from vllm_core.registry.discover import Found
from vllm_core.registry.load import Loaded
from vllm_core.registry.plan import Failed
from vllm_core.registry.probe import cached, probe, remember, timeout_of, visit

MAX_CHILDREN = 8

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Vetted:
    """`safe` may be imported here, in the order given; `failed` must not; `reports` by key are what first looks saw."""

    safe: tuple[Found, ...]
    failed: tuple[Failed, ...]
    reports: Mapping[str, ProbeReport | Failed]


def vet(found: Sequence[Found], *, environ: Mapping[str, str], use_cache: bool = True, look: bool = True) -> Vetted:
    """Visit those whose import has not come to an end here before; with ``look`` they are probed on that occasion."""
    here = fingerprint.machine()
    strangers = [one for one in found if not (use_cache and _mark(one, environ, here).exists())]
    limit_s = timeout_of(environ)
    visits = dict(
        zip(
            (one.key for one in strangers),
            _at_once(lambda one: visit(one, timeout_s=limit_s, environ=environ, look=look), strangers),
            strict=True,
        )
    )
    here = fingerprint.machine() if strangers else here  # an import may leave compiled files behind
    for one in strangers:
        if visits[one.key].importable:
            _remember(one, environ, here)
    barred = {key: one.outcome for key, one in visits.items() if not one.importable}
    return Vetted(
        safe=tuple(one for one in found if one.key not in barred),
        failed=tuple(one for one in barred.values() if isinstance(one, Failed)),
        reports={key: one.outcome for key, one in visits.items() if look and key not in barred},
    )


def probe_all(
    platforms: Sequence[Loaded], seen: Mapping[str, ProbeReport | Failed], *, environ: Mapping[str, str], use_cache: bool = True
) -> list[ProbeReport | Failed]:
    """The report of each platform, in order: of the first look, of the cache, or of a probe, all at once."""
    reports: dict[str, ProbeReport | Failed] = {}
    here = fingerprint.machine()
    for one in platforms:
        known = seen.get(one.found.key)
        if known is not None:
            remember(one, environ, known, here)
        elif use_cache:
            known = cached(one, environ, here)
        if known is not None:
            reports[one.found.key] = known
    left = [one for one in platforms if one.found.key not in reports]
    found = _at_once(lambda one: probe(one, environ=environ, use_cache=False), left)
    reports |= {one.found.key: report for one, report in zip(left, found, strict=True)}
    return [reports[one.found.key] for one in platforms]


def _at_once(call: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Results in order; each call waits for a child process."""
    items = list(items)
    if len(items) < 2:
        return [call(one) for one in items]
    with ThreadPoolExecutor(min(MAX_CHILDREN, len(items))) as threads:
        return list(threads.map(call, items))


def _mark(found: Found, environ: Mapping[str, str], here: str) -> Path:
    return cache_folder(environ) / "imports" / f"{found.distribution}-{fingerprint.digest(found, environ, here=here)}"


def _remember(found: Found, environ: Mapping[str, str], here: str) -> None:
    try:
        write_atomic(_mark(found, environ, here), b"")
    except OSError:
        return  # a read-only home is normal in containers; the next start looks again
