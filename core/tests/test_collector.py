"""The collector rests while an engine starts, and never for longer."""

from __future__ import annotations

import gc
import weakref

import pytest

from vllm_core import collector


class Node:
    """Part of a cycle: only a collection frees it."""

    def __init__(self):
        self.me = self


@pytest.fixture(autouse=True)
def enabled():
    gc.enable()
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_nothing_is_collected_before_the_engine_is_ready():
    with collector.starting() as ready:
        assert not gc.isenabled()
        ready()
        assert gc.isenabled()


def test_what_a_start_made_is_left_out_until_the_end():
    with collector.starting() as ready:
        made = Node()
        seen = weakref.ref(made)
        ready()
        del made
        gc.collect()
        assert seen() is not None
    gc.collect()
    assert seen() is None


def test_what_comes_after_is_collected():
    with collector.starting() as ready:
        ready()
        seen = weakref.ref(Node())
        gc.collect()
        assert seen() is None


def test_a_start_that_fails_leaves_the_collector_on():
    with pytest.raises(ZeroDivisionError), collector.starting():
        1 / 0  # noqa: B018
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)


def test_who_does_without_a_collector_keeps_doing_so():
    gc.disable()
    with collector.starting() as ready:
        ready()
        assert not gc.isenabled()
    assert not gc.isenabled()
