"""A small package that stands for core, and one that stands for somebody else's library."""

from __future__ import annotations

import importlib
import sys
import textwrap

import pytest

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
