"""field-reports 44: after an upgrade an architecture had no attention any more, and its users were the first to see it."""

from __future__ import annotations

import pytest

from tools import record_plans
from vllm_core.registry.discover import find

INSTALLED = {one.platform for one in find()}


@pytest.mark.skipif(not set(record_plans.PLATFORMS) <= INSTALLED, reason="needs all accelerator packages")
def test_plans_are_those_that_were_recorded():
    """Where the difference is meant: python tools/record_plans.py."""
    assert record_plans.to_text(record_plans.recorded()) == record_plans.PATH.read_text("utf-8")


def test_every_architecture_that_a_manifest_names_can_run_a_model_of_its_own_kernels():
    rows = record_plans.recorded()
    assert {name.split()[0] for name in rows} == INSTALLED & set(record_plans.PLATFORMS)
    assert [name for name, row in rows.items() if not row["providers"]] == []
