from __future__ import annotations

import io
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from vllm_core.api.ops import family_of
from vllm_core.registry.demotion import demote
from vllm_core.registry.explain import MAX_LINES, from_json, to_json, to_tables, to_text
from vllm_core.registry.plan import Failed
from vllm_core.registry.select import plan


@pytest.fixture
def full(needs, candidate, offer):
    """A plan with everything in it: groups, rejections, notes, a demotion."""
    offers = (offer("fast", ops=family_of("kv_write")), offer("old", op_versions={"rms_norm": 0}))
    failed = [Failed(distribution=f"d{i}", entry_point="e", stage="import", cause="c", fix="f") for i in range(6)]
    made = plan(needs(windows=(None, 8, 16)), [candidate(offers=offers), candidate("zero", devices=())], failed)
    return demote(made, "kv_write", "kv.0.full", "RuntimeError: boom")


def test_json_reads_back_as_the_same_plan(full):
    assert from_json(to_json(full)) == full


def test_json_that_is_no_plan_is_refused():
    with pytest.raises(msgspec.ValidationError):
        from_json(b'{"platform": "x"}')


def test_the_summary_has_twelve_lines_at_most(full):
    assert len(to_text(full).splitlines()) <= MAX_LINES == 12


@pytest.mark.parametrize("width", [40, 100])
def test_no_line_is_longer_than_the_width(full, width):
    assert max(map(len, to_text(full, width).splitlines())) <= width


def test_the_summary_names_every_decision(full):
    text = to_text(full, 1000)
    for part in (
        "LlamaForCausalLM",
        "vllm-fake 1.0",
        "beta",
        "dev-0",
        "float32",
        "reference",
        "blocks of 16",
        "window 8",
        "boom",
    ):
        assert part in text
    assert "3 more" in text


def test_a_note_of_several_lines_stays_one_line(full):
    noted = replace(full, notes=("a\nb",))
    assert "note      a b" in to_text(noted)


def test_ops_that_run_by_reference_are_listed(needs, candidate, offer):
    text = to_text(plan(needs(), [candidate(offers=(offer("fast"),))], []), 1000)
    assert "by reference or host: add_rms_norm" in text
    assert "fast 1 (kernel)" in text


def test_the_tables_have_every_binding_reason_and_rejection(full):
    console = Console(width=250, record=True, file=io.StringIO())
    console.print(to_tables(full))
    text = console.export_text()
    for part in ("paged_attention", "kv.2.window", "block_size", "version of rms_norm", "d5:e", "fast -> reference"):
        assert part in text


def test_brackets_in_a_reason_are_not_markup(full):
    console = Console(width=250, record=True, file=io.StringIO())
    console.print(to_tables(replace(full, reasons={"x": "[bold]kept[/bold]"})))
    assert "[bold]kept[/bold]" in console.export_text()
