"""Workers on devices: one each, in rank order; too few, too many and mixed ones are refused with what there is."""

from __future__ import annotations

import pytest

from vllm_core.api import DeviceFacts, Unsupported
from vllm_core.errors import PlanError
from vllm_core.registry.explain import from_json, to_json, to_text
from vllm_core.registry.select import plan


def devices(*ids, memory=None, **changes):
    values = {"name": "n", "device_type": "t", "architecture": "fake1", "memory_kind": "discrete", **changes}
    return tuple(DeviceFacts(id=one, **{"memory_bytes": (memory or {}).get(one, 1 << 30), **values}) for one in ids)


def ids(chosen):
    return [one.id for one in chosen.devices]


def test_each_worker_gets_a_device_of_its_own_the_largest_first(needs, candidate):
    here = candidate(devices=devices("a", "b", "c", memory={"b": 3 << 30, "c": 2 << 30}))
    chosen = plan(needs(workers=2), [here], [])
    assert (chosen.tensor_parallel, ids(chosen), chosen.device.id) == (2, ["b", "c"], "b")
    assert [chosen.device_of(rank).id for rank in range(2)] == ["b", "c"]
    assert [chosen.sharers(rank) for rank in range(2)] == [1, 1]
    assert "device    b, c:" in to_text(chosen)
    assert "tensor parallel 2" in to_text(chosen)
    assert from_json(to_json(chosen)) == chosen


def test_one_worker_has_its_device_listed_too(needs, candidate):
    chosen = plan(needs(), [candidate(devices=devices("a", "b"))], [])
    assert (ids(chosen), chosen.tensor_parallel, chosen.sharers(0)) == (["a"], 1, 1)


def test_named_devices_are_ranks_in_their_order(needs, candidate):
    chosen = plan(needs(workers=2, device_ids=("c", "a")), [candidate(devices=devices("a", "b", "c"))], [])
    assert ids(chosen) == ["c", "a"]


def test_a_device_that_several_may_share_gets_its_second_worker_last(needs, candidate):
    here = candidate(devices=devices("a", "b", max_workers=2))
    chosen = plan(needs(workers=3), [here], [])
    assert ids(chosen) == ["a", "b", "a"]
    assert [chosen.sharers(rank) for rank in range(3)] == [2, 1, 2]


@pytest.mark.parametrize(
    ("most", "workers", "mentions"),
    [(1, 3, "workers: wanted 3, found 2 devices (a, b) for 2 workers"), (4, 9, "wanted 9, found 2 devices (a, b) for 8")],
)
def test_more_workers_than_devices_is_refused_with_both_numbers(needs, candidate, most, workers, mentions):
    with pytest.raises(PlanError) as caught:
        plan(needs(workers=workers), [candidate(devices=devices("a", "b", max_workers=most))], [])
    assert mentions in caught.value.found


def test_a_platform_that_does_not_claim_it_is_refused_with_its_words(needs, candidate):
    here = candidate(devices=devices("a", "b"), claims={"parallel.tensor": Unsupported("no links between devices")})
    with pytest.raises(PlanError, match="no links between devices"):
        plan(needs(workers=2, capabilities=frozenset({"parallel.tensor"})), [here], [])


@pytest.mark.parametrize("named", [("a",), ("a", "b"), ("a", "a", "b"), (), ("a", "b", "c")])
def test_ids_are_as_many_as_workers_at_most_and_all_different(needs, candidate, named):
    here = candidate(devices=devices("a", "b", "c"))
    if named == ("a", "b"):
        assert ids(plan(needs(workers=2, device_ids=named), [here], [])) == ["a", "b"]
        return
    with pytest.raises(PlanError) as caught:
        plan(needs(workers=2, device_ids=named), [here], [])
    assert "2" in caught.value.expected if named != ("a",) else "wanted 2, found 1 devices (a)" in caught.value.found


def test_workers_are_never_spread_over_device_types(needs, candidate):
    """vllm#13760, #27239: several types are several engines."""
    two = [candidate("x", devices=devices("x0")), candidate("y", devices=devices("y0", architecture="fake2"))]
    for asked in (needs(workers=2), needs(workers=2, device_ids=("x0", "y0"))):
        with pytest.raises(PlanError) as caught:
            plan(asked, two, [])
        assert "x fake1" in caught.value.found
        assert "y fake2" in caught.value.found
        assert "one engine per device type" in caught.value.fix
        assert "one type" in caught.value.expected


def test_a_type_that_has_enough_devices_is_taken(needs, candidate):
    two = [candidate("x", devices=devices("x0")), candidate("y", devices=devices("y0", "y1"))]
    chosen = plan(needs(workers=2), two, [])
    assert (chosen.platform, ids(chosen)) == ("y", ["y0", "y1"])
