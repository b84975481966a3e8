"""The counts in simulator/README.md are those of the recorded reports."""

from __future__ import annotations

import json

import pytest

from tools import simulated


@pytest.mark.parametrize("platform", simulated.PLATFORMS)
def test_the_page_has_the_rows_and_the_result_of_the_recorded_report(platform):
    report = json.loads(simulated.recorded(platform).read_text("utf-8"))
    assert report["host"]["simulated"]
    text = simulated.PAGE.read_text("utf-8")
    assert simulated.written(text, platform, report) == text


def test_a_new_report_changes_its_line_alone():
    text = "| ascend | 910B3 | 1,786 | CONFORMANT, L3 | calls |\n| rocm | gfx942 | 9 | CONFORMANT, L3 | references |\n"
    changed = simulated.written(text, "ascend", {"rows": [None] * 2000, "result": "FAILED", "reached": 2})
    assert changed == text.replace("1,786 | CONFORMANT, L3", "2,000 | FAILED, L2")


def test_a_platform_without_a_line_is_an_error():
    with pytest.raises(ValueError, match="xpu"):
        simulated.written("| ascend | 910B3 | 1 | CONFORMANT, L3 | calls |", "xpu", {"rows": [], "result": "", "reached": 0})
