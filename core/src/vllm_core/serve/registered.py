"""Servers of this user on this machine: a small file each while they run, for `vllm-core ps` and `vllm-core top`."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from vllm_core.registry.cache import cache_folder, write_atomic

log = logging.getLogger("vllm_core.serve")


class Entry(msgspec.Struct, frozen=True):
    """One server. `began` is when its process began, in the kernel's ticks: process ids are used again."""

    host: str
    pid: int
    began: int
    address: str
    models: list[str]
    platform: dict[str, str]
    started: float


@contextlib.contextmanager
def entry(address: str, models: Sequence[str], platform_info: Mapping[str, str]) -> Iterator[None]:
    """Be listed while the block runs. A server that cannot be listed serves all the same, and says so."""
    path = _folder() / f"{os.getpid()}.json"
    mine = Entry(
        platform.node(), os.getpid(), _began(os.getpid()) or 0, address, list(models), dict(platform_info), time.time()
    )
    try:
        write_atomic(path, msgspec.json.encode(mine))
    except OSError as error:
        log.warning("`vllm-core ps` will not list this server: %s", error)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it is listed no longer once the process has gone
            path.unlink(missing_ok=True)


def entries() -> list[Entry]:
    """The servers that run, oldest first. Files of others, and of those that were killed, are passed over."""
    found = []
    for path in _folder().glob("*.json") if _folder().is_dir() else ():
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # removed meanwhile, or not ours
            one = msgspec.json.decode(path.read_bytes(), type=Entry)
            if one.host != platform.node():  # the folder is shared between machines
                continue
            if _began(one.pid) == one.began:
                found.append(one)
            else:
                path.unlink(missing_ok=True)
    return sorted(found, key=lambda one: one.started)


def _folder() -> Path:
    return cache_folder(os.environ) / "servers"


def _began(pid: int) -> int | None:
    """Start of a process since boot, in ticks; None where it has gone. 0 where the kernel does not say (not Linux)."""
    stat = Path(f"/proc/{pid}/stat")
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except OSError:
            return None
        return 0
    try:
        return int(stat.read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None
