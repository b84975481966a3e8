"""The Grafana dashboard asks for metrics that are there, and is what Grafana reads."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

FILE = Path(__file__).parents[3] / "docs" / "grafana-dashboard.json"


@pytest.fixture
def dashboard() -> Any:
    if not FILE.exists():
        pytest.skip("the dashboard is in the repository, not in the distribution")
    return json.loads(FILE.read_text())


def expressions(dashboard: Any) -> list[str]:
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return asked + [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]


@pytest.mark.anyio
async def test_every_metric_that_is_asked_for_is_served_with_its_labels(client: Any, dashboard: Any) -> None:
    await client.post("/v1/completions", {"prompt": "a", "max_tokens": 5})
    page = (await client.get("/metrics")).text
    served = {sample.name: set(sample.labels) for family in text_string_to_metric_families(page) for sample in family.samples}
    for expression in expressions(dashboard):
        names = re.findall(r"vllm:\w+", expression)
        assert names
        assert set(names) <= set(served), expression
        grouped = [name for part in re.findall(r"by \(([\w, ]+)\)", expression) for name in part.split(", ")]
        assert {*grouped, "model_name"} <= served[names[0]], expression


def test_panels_have_what_grafana_needs_and_do_not_overlap(dashboard: Any) -> None:
    panels = dashboard["panels"]
    assert dashboard["schemaVersion"] >= 36
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not taken & cells, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert panel["targets"]


def lost(before: Any, after: Any, at: str = "") -> Iterator[str]:
    """Where ``after`` has less than ``before``, or something else."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name, value in before.items():
            yield from lost(value, after.get(name), f"{at}.{name}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from lost(one, other, f"{at}[{index}]")
    elif before != after:
        yield at


def test_grafanas_own_types_hold_all_of_it(dashboard: Any) -> None:
    """Read into the types that Grafana publishes, of panels and of Prometheus queries too, and written again."""
    plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins", reason="pip install grafana-foundation-sdk")
    encoder = importlib.import_module("grafana_foundation_sdk.cog.encoder")
    models = importlib.import_module("grafana_foundation_sdk.models.dashboard")
    plugins.register_default_plugins()
    read = models.Dashboard.from_json(dashboard)
    queries = [target for panel in read.panels for target in getattr(panel, "targets", None) or ()]
    assert {type(one).__module__.rpartition(".")[2] for one in queries} == {"prometheus"}
    written = json.loads(encoder.JSONEncoder().encode(read))
    assert list(lost(dashboard, written)) == []
    broken = {**dashboard, "panels": [{**dashboard["panels"][1], "gridPosition": {}}]}
    assert list(lost(broken, json.loads(encoder.JSONEncoder().encode(models.Dashboard.from_json(broken))))) != []
