"""Builds go through the compiler cache where there is one, and where nobody has chosen another way."""

from __future__ import annotations

import pytest

from tools import compiler_cache


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """An environment with a ccache, on a machine without."""
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.delenv(compiler_cache.LAUNCHER, raising=False)
    command = tmp_path / "ccache"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    return tmp_path


def test_the_cache_of_the_environment_is_used(scripts):
    assert compiler_cache.variables(scripts)[compiler_cache.LAUNCHER] == str(scripts / "ccache")


def test_without_a_cache_nothing_changes(scripts):
    assert compiler_cache.variables(scripts / "elsewhere") == {}


def test_a_launcher_that_somebody_chose_is_kept(scripts, monkeypatch):
    monkeypatch.setenv(compiler_cache.LAUNCHER, "distcc")
    assert compiler_cache.variables(scripts) == {}
