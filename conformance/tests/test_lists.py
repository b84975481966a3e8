"""The must-pass lists: derived from the generators, held in step with them, and right for every platform."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools import conformance_files
from vllm_conformance import lists
from vllm_conformance.case import Case
from vllm_conformance.lists import Entry, conditions_of, derive, from_text, read_lists, to_text, write_lists
from vllm_core.api import CAPABILITIES, OPS
from vllm_core.errors import ConfigError

SERVICES = ["op:x", "op:y", "references"]


def case(id_, ci=False):
    return Case(id_, int(id_[1]), "group", "small", "m:f", {"ci": True} if ci else {})


def some_cases(absent, services):
    """Cases with every kind of condition."""
    yield case("L0/always", ci=True)
    if "a" not in absent:
        yield case("L1/a")
        if "b" not in absent and "op:x" in services:
            yield case("L2/a_and_b_and_x")
        if "references" in services:
            yield case("L3/a_by_references")
    else:
        yield case("L1/no_a")
        if "b" not in absent:
            yield case("L1/no_a_but_b")
        if "op:y" in services:
            yield case("L1/no_a_with_y")


def providers(ops, references):
    return dict.fromkeys(ops, ("kernels", "reference") if references else ("kernels",))


def conditions(derived):
    return {entry.id: entry.conditions for entries in derived.values() for entry in entries}


def test_conditions_are_derived_from_what_comes_and_goes():
    assert conditions(derive(some_cases, ["a", "b"], SERVICES)) == {
        "L0/always": frozenset(),
        "L1/a": {"+a"},
        "L2/a_and_b_and_x": {"+a", "+b", "op:x"},
        "L3/a_by_references": {"+a", "references"},
        "L1/no_a": {"-a"},
        "L1/no_a_but_b": {"-a", "+b"},
        "L1/no_a_with_y": {"-a", "op:y"},
    }


@given(absent=st.sets(st.sampled_from("ab")), ops=st.sets(st.sampled_from("xy"), min_size=1), references=st.booleans())
def test_derived_conditions_ask_for_what_is_generated(absent, ops, references):
    derived = derive(some_cases, ["a", "b"], SERVICES)
    held = conditions_of({name: name in absent for name in "ab"}, providers(ops, references))
    required = {id_ for id_, needed in conditions(derived).items() if needed <= held}
    assert required == {one.id for one in some_cases(absent, held)}


def test_a_list_survives_its_text():
    entries = (Entry("L1/b", frozenset({"+x", "op:y"}), frozenset({"ci"})), Entry("L1/a", frozenset()))
    assert set(from_text(to_text(entries))) == set(entries)


def test_a_subset_is_what_is_marked(tmp_path):
    write_lists({"L0.txt": "[]\nL0/a ci\nL0/b\n"}, tmp_path)
    found = read_lists(tmp_path)[0]
    assert found.required(frozenset()) == ("L0/a", "L0/b")
    assert found.required(frozenset(), "ci") == ("L0/a",)


@pytest.mark.parametrize("name", ["L0.txt", lists.SUMS])
def test_a_missing_file_is_an_error(tmp_path, name):
    write_lists({"L0.txt": "[]\nL0/a\n"}, tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match="not the one that was shipped"):
        read_lists(tmp_path)


def test_the_files_of_the_package_are_what_the_code_gives():
    assert conformance_files.outdated() == []


def test_every_level_has_cases_and_a_subset():
    shipped = read_lists()
    assert sorted(shipped) == [0, 1, 2, 3, 4, 5]
    for level in range(5):
        assert any("ci" in entry.subsets for entry in shipped[level].entries), f"nothing of level {level} is in the subset"
        assert all(entry.id.startswith(f"L{level}/") for entry in shipped[level].entries)


def test_every_capability_and_every_op_is_asked_for():
    found = set().union(*(entry.conditions for items in read_lists().values() for entry in items.entries))
    assert {name for name in CAPABILITIES if f"-{name}" not in found and not CAPABILITIES[name].required} == set()
    private = {"linear_pack", "moe_pack", "kv_bind"}
    assert {op for op in OPS if f"op:{op}" not in found} == private


@settings(max_examples=15, deadline=None)
@given(
    absent=st.sets(st.sampled_from(sorted(CAPABILITIES)), max_size=8),
    without=st.sets(st.sampled_from(sorted(OPS)), max_size=5) | st.just(set(OPS)),
    references=st.booleans(),
)
def test_the_lists_ask_for_what_is_generated_whatever_is_claimed(absent, without, references):
    held = conditions_of({name: name in absent for name in CAPABILITIES}, providers(frozenset(OPS) - without, references))
    required = {id_ for items in read_lists().values() for id_ in items.required(held)}
    assert required == {one.id for one in conformance_files.cases(frozenset(absent), held)}
