"""The suite in pytest: from `Conformance` objects in test modules, and from ``--vllm-platform``.

This module is loaded by every pytest of an environment that has the suite, so it imports nothing until one of them is met.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from vllm_conformance.pytest_session import SuiteSession

PROPERTY = "vllm_conformance"
COMMAND_LINE = "--vllm-platform"
SESSION = "vllm_conformance_session"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options for a run without a declaration."""
    group = parser.getgroup("vllm-conformance")
    group.addoption(COMMAND_LINE, metavar="NAME", help="run the conformance suite of vllm-core on this installed platform")
    group.addoption("--vllm-level", type=int, default=5, choices=range(6), metavar="N", help="highest level, 0 to 5")
    group.addoption("--vllm-subset", choices=("ci",), help="a fixed part of the cases; proves no level")
    group.addoption("--vllm-device", metavar="ID", help="id of the device to test; default: the first")
    group.addoption("--vllm-waivers", type=Path, metavar="FILE", help="waivers.toml")
    group.addoption("--vllm-out", type=Path, default=Path("conformance-report"), metavar="DIR", help="folder of the report")


def session_of(config: pytest.Config) -> SuiteSession:
    """The suites of this process; made, and registered for the hooks of its own, when it is first asked for."""
    found: SuiteSession | None = config.pluginmanager.get_plugin(SESSION)
    if found is None:
        from vllm_conformance.pytest_session import SuiteSession

        found = SuiteSession(config)
        config.pluginmanager.register(found, SESSION)
    return found


def pytest_pycollect_makeitem(collector: pytest.Module, name: str, obj: object) -> pytest.Collector | None:
    """A declaration in a test module becomes a collector."""
    declared = sys.modules.get("vllm_conformance.declaration")
    if declared is None or not isinstance(obj, declared.Conformance):
        return None
    return session_of(collector.config).collector(collector, name, obj)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add what the command line asks for, before anything is deselected."""
    if config.getoption(COMMAND_LINE) is not None:
        items.extend(session_of(config).asked_for(session))


def pytest_configure(config: pytest.Config) -> None:
    """Listen: the hook of reports is given no config."""
    config.pluginmanager.register(Listener(config), "vllm_conformance_listener")


class Listener:
    """Hands rows to the suites of this process, whether it or a worker of pytest-xdist ran them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A report that carries a case, and its row where it has one."""
        values = [str(value) for name, value in report.user_properties if name == PROPERTY]
        if values:
            session_of(self._config).take(report, values)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker of pytest-xdist ends in order: it says what it had collected. One that is lost says nothing."""
    told = getattr(node, "workeroutput", {}).get(PROPERTY)
    if told is not None:
        session_of(node.config).hear(told)
