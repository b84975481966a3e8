"""A platform in host memory whose fault is named by FAULT: right in everything else. Imports no torch."""

from __future__ import annotations

import ctypes
import os
import time

from vllm_core.api import (
    CAPABILITIES,
    POOLS,
    Check,
    ConfigPatch,
    Device,
    DeviceFacts,
    Eager,
    Full,
    Manifest,
    MemoryStats,
    Offer,
    ProbeReport,
    Unsupported,
    hookimpl,
)

FAULT = "none"
NAME = "broken"


def facts(index):
    return DeviceFacts(
        id=str(index),
        name="Broken 1",
        device_type=NAME,
        architecture="b1",
        memory_kind="host",
        memory_bytes=1 << 30,
        driver_version="7",
        properties={"eager": "none"},
    )


class BrokenDevice(Device):
    torch_device = "cpu"
    eager = Eager("none")
    asynchronous = stable_addresses = supports_graphs = False

    def __init__(self, one):
        self.facts = one

    def allocate(self, pool, shape, dtype):
        return [0] * shape[0]

    def adopt(self, pool, host):
        return host

    def release(self, pool):
        return 0

    def pinned(self, shape, dtype):
        return [0] * shape[0]

    def statistics(self):
        return MemoryStats(self.facts.memory_bytes, self.facts.memory_bytes, dict.fromkeys(POOLS, 0), 0)

    def synchronize(self): ...

    def event(self):
        raise NotImplementedError

    def seed(self, value): ...

    def capture(self, work):
        if FAULT == "underclaimed":
            return work
        if FAULT == "bad refusal":
            raise ValueError("no")
        return super().capture(work)


def add(out, a, b):
    """Adds lists; where the faults of ops lie."""
    if FAULT == "wrong":
        a = [value + 1 for value in a]
    elif FAULT == "crash":
        ctypes.string_at(0)
    elif FAULT == "exit":
        os._exit(0)
    elif FAULT == "hang":
        time.sleep(3600)
    elif FAULT == "skip":
        import pytest

        pytest.skip("not today")
    elif FAULT == "waits for a child":
        child = os.fork()
        if child == 0:
            time.sleep(3600)
        os._exit(1)
    elif FAULT == "prints":
        os.write(1, b'{"type":"Done","evidence":{"outcome":"PASS"}}\n')
    out[:] = [x + y for x, y in zip(a, b, strict=True)]


@hookimpl
def manifest():
    absent = {"graphs", "peer_copy"} if FAULT != "claims a peer" else {"graphs"}
    return Manifest(
        name=NAME,
        vendor="acme",
        device_type=NAME,
        api_version="0.1",
        core_range=">=0.1.0.dev0,<0.2",
        claims={name: Unsupported("by design") if name in absent else Full() for name in CAPABILITIES},
    )


@hookimpl
def probe():
    if FAULT == "probe crashes":
        ctypes.string_at(0)
    check = Check(name="driver", outcome="failed" if FAULT == "no device" else "ok", detail="libbroken.so", hint="install it")
    return ProbeReport(devices=() if FAULT == "no device" else (facts(0),), checks=(check,))


@hookimpl
def configure(config):
    return ConfigPatch(changes={}, reasons={})


@hookimpl
def programs(device):
    return ()


@hookimpl
def start(device): ...


@hookimpl
def create_device(facts):
    if FAULT == "device hangs":
        time.sleep(3600)
    if FAULT == "device raises":
        raise OSError("no context")
    return BrokenDevice(facts)


@hookimpl
def offers(device):
    if FAULT == "describing crashes":
        ctypes.string_at(0)
    return [Offer(provider="broken", ops={"add": f"{__name__}:add"})]
