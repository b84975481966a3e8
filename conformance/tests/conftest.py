"""Packages that stand for core and for somebody else's library; and a platform that is broken as a test wants it."""

from __future__ import annotations

import importlib
import itertools
import sys
import textwrap
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from vllm_conformance import lists
from vllm_conformance.options import RunOptions
from vllm_conformance.report import FORMAT, Platform, Report, Versions, sealed, write_report
from vllm_conformance.run import run
from vllm_conformance.sources import Source
from vllm_conformance.subject import claims_data
from vllm_conformance.verdict import JudgedWaiver, Row
from vllm_conformance.version import __version__
from vllm_core.api import CAPABILITIES, DeviceFacts, Full, Offer, Unsupported

FAKES = Path(__file__).parent / "fakes"
QUICK_S = {"small": 10.0, "medium": 30.0, "large": 30.0}

CORE = """
import functools
from collections import OrderedDict
from stand_core.engine import Engine

LIMIT = 7
HANDLERS = {"a": len}
STEPS = [len]
_cache = {}

def run(value, scale=2, *, shift=0):
    return value * scale + shift

def counted(function):
    calls = 0
    @functools.wraps(function)
    def wrapper(*args):
        nonlocal calls
        calls += 1
        return function(*args)
    return wrapper

@counted
def wrapped(value):
    return value

@functools.lru_cache
def remembered(value):
    return value

shared = Engine()
"""

ENGINE = """
class Engine:
    name = "engine"
    class Inner:
        def deep(self):
            return 1
    def __init__(self):
        self.steps = 0
    def step(self):
        self.steps += 1
        return self.steps
    @staticmethod
    def fixed():
        return 1
    @classmethod
    def made(cls):
        return cls()
    @property
    def size(self):
        return self.steps
"""

LATE = "def late():\n    return 1\n"

OTHER = """
class Tensor:
    def add(self):
        return 1

def relu(x):
    return x

_private = 1
"""


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Write the packages, import them and forget them again; returns (stand_core, stand_other)."""
    for name, text in {
        "stand_core/__init__.py": CORE,
        "stand_core/engine.py": ENGINE,
        "stand_core/late.py": LATE,
        "stand_other/__init__.py": OTHER,
        "stand_other/extra.py": "value = 1\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("stand_core"), importlib.import_module("stand_other")
    for name in [name for name in sys.modules if name.split(".")[0] in {"stand_core", "stand_other"}]:
        del sys.modules[name]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the path of this process and its children, and a cache of its own."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.syspath_prepend(FAKES)
    monkeypatch.setenv("VLLM_CORE_CACHE", str(tmp_path / "cache"))
    yield folder
    for name in [name for name in sys.modules if name.startswith(("broken_", "small_cases"))]:
        del sys.modules[name]


@pytest.fixture
def install(site):
    """Install the platform with a fault, as a distribution; returns its module's name."""
    numbers = itertools.count()

    def put(fault="none", name="broken", version="1.0", **replacements):
        module = f"broken_{next(numbers)}"
        text = (FAKES / "broken_platform.py").read_text()
        for old, new in {'FAULT = "none"': f"FAULT = {fault!r}", 'NAME = "broken"': f"NAME = {name!r}", **replacements}.items():
            assert old in text
            text = text.replace(old, new)
        (site / f"{module}.py").write_text(text)
        info = site / f"vllm_{name}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-{name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[vllm.platforms]\n{name} = {module}\n")
        importlib.invalidate_caches()
        return module

    return put


@pytest.fixture
def small_lists(tmp_path, site):
    """The must-pass lists of `small_cases`."""
    module = importlib.import_module("small_cases.basic")

    def cases(absent, services):
        claims = {name: Unsupported("absent") if name in absent else Full() for name in CAPABILITIES}
        ops = {service.removeprefix("op:"): "a:b" for service in services if service}
        return module.collect(claims, [Offer(provider="any", ops=ops)], None)

    derived = lists.derive(cases, CAPABILITIES, ["op:add"])
    folder = tmp_path / "lists"
    lists.write_lists({f"L{level}.txt": lists.to_text(entries) for level, entries in derived.items()}, folder)
    return folder


@pytest.fixture
def options(small_lists):
    """Options of a run of `small_cases` on the broken platform."""
    return RunOptions(platform="broken", cases="small_cases", lists=small_lists, limits_s=QUICK_S)


@pytest.fixture
def run_with(install, options):
    """Install the platform with a fault and run `small_cases` on it; keywords change the options."""

    def go(fault="none", **changes):
        install(fault)
        return run(replace(options, **changes))

    return go


@pytest.fixture
def saved(tmp_path):
    """Write a report to a file."""

    def save(report, name="conformance.json"):
        write_report(report, tmp_path / name)
        return tmp_path / name

    return save


@pytest.fixture
def row():
    """A row of level 1; keywords change it."""

    def make(id_="L1/add/seed0", outcome="PASS", **changes):
        values = {"level": int(id_[1]), "group": "op:add", "size": "small", "verdict": outcome, "seconds": 0.5}
        return Row(id=id_, outcome=outcome, **{**values, **changes})

    return make


@pytest.fixture
def judged_waiver():
    """A waiver with its verdict."""

    def make(id_, verdict, expiry=date(2026, 12, 31)):
        return JudgedWaiver(id=id_, link="https://example.org/1", owner="jane", expiry=expiry, verdict=verdict)

    return make


@pytest.fixture
def report_of(row):
    """A report of a right platform on the first of May 2026, without running anything."""

    def make(folder=None, **changes):
        adds = [row(f"L1/add/seed{seed}", seed=seed, digest="a" * 64, calls={"kernel": 1}) for seed in range(3)]
        others = [row("L0/loads", group="loads"), row("L1/no_graphs", "REFUSED", group="capability:graphs")]
        speed = row("L5/speed", group="speed", measured={"adds_per_s": 5.0})
        absent = {"graphs", "peer_copy"}
        claims = {name: Unsupported("by design") if name in absent else Full() for name in CAPABILITIES}
        source = {"version": "1.0", "kind": "git", "commit": "c" * 40, "dirty": False, "digest": "d" * 64}
        values = {
            "format": FORMAT,
            "result": "CONFORMANT",
            "level": 5,
            "reached": 4,
            "subset": None,
            "started": "2026-05-01T12:00:00+00:00",
            "seconds": 3.0,
            "platform": Platform(
                name="broken", distribution="vllm-broken", entry_point="broken", vendor="acme", support_level="beta"
            ),
            "devices": (
                DeviceFacts(
                    id="0", name="Broken 1", device_type="broken", architecture="b1", memory_kind="host", memory_bytes=1 << 30
                ),
            ),
            "versions": Versions(
                core="1", suite=__version__, plugin="1.0", api="0.1", torch="2", python="3", driver="", runtime=""
            ),
            "host": {"system": "Linux"},
            "sources": tuple(Source(name=name, **source) for name in ("vllm-core", "vllm-conformance", "vllm-broken")),
            "lists": {f"L{level}": one.sha256 for level, one in lists.read_lists(folder).items()} if folder else {},
            "claims": claims_data(claims),
            "providers": {"add": ("broken",)},
            "plan": None,
            "plan_problem": "nothing was planned",
            "options": {},
            "rows": (others[0], *adds, others[1], speed),
            "waivers": (),
        }
        return sealed(Report(**{**values, **changes}))

    return make
