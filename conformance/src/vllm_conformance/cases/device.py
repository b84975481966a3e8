"""L1: memory, copies, order of work, graphs, peers and groups of a `Device`. Planning; imports no torch.

What a claim covers is yielded where it is available; what has no claim, everywhere. The functions are in
`runs/{facts,memory,copies,order,graphs,peers,groups}.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vllm_conformance.case import Case, Size
from vllm_core.api import DeviceFacts, Offer, Support, is_available

RUNS = "vllm_conformance.cases.runs"


@dataclass(frozen=True, slots=True)
class _Row:
    """One case: ``L1/<subject>/<name>``, run by ``<module>:<name>``; yielded where all claims are available."""

    module: str
    name: str
    claims: tuple[str, ...] = ()
    size: Size = "small"


_ROWS = (
    _Row("facts", "device_is_what_was_probed"),
    _Row("facts", "flags_are_what_is_claimed"),
    _Row("facts", "seeds_repeat"),
    _Row("memory", "allocations_are_zero_filled"),
    _Row("memory", "reused_memory_is_zero_filled"),
    _Row("memory", "adopted_values_are_kept"),
    _Row("memory", "statistics_count_by_pool"),
    _Row("memory", "pools_do_not_mix"),
    _Row("memory", "many_small_allocations_come_back"),
    _Row("memory", "too_much_is_refused"),
    _Row("memory", "full_memory_is_refused_and_recovers", (), "medium"),
    _Row("copies", "copies_keep_bits"),
    _Row("copies", "pinned_copies_keep_bits"),
    _Row("copies", "copies_into_parts_leave_the_rest"),
    _Row("copies", "device_copies_keep_bits"),
    _Row("copies", "an_asynchronous_copy_is_there_after_its_event"),
    _Row("order", "work_runs_in_the_order_of_its_calls"),
    _Row("order", "events_are_reached_in_order"),
    _Row("order", "synchronize_waits_for_everything"),
    _Row("order", "an_event_can_be_recorded_again"),
    _Row("order", "buffers_in_rotation_are_not_mixed_up"),
    _Row("graphs", "a_graph_replays_what_was_captured", ("graphs",)),
    _Row("graphs", "a_graph_reads_new_contents", ("graphs",)),
    _Row("graphs", "graphs_can_be_interleaved", ("graphs",)),
    _Row("graphs", "replays_keep_their_place_in_the_order", ("graphs",)),
    _Row("graphs", "a_capture_that_raises_leaves_the_device_usable", ("graphs",)),
    _Row("graphs", "many_graphs_can_be_kept", ("graphs",)),
    _Row("peers", "devices_do_not_mix", ("peer_copy",), "medium"),
    _Row("peers", "peer_copies_keep_bits", ("peer_copy",), "medium"),
    _Row("groups", "collectives", ("parallel.tensor",), "large"),
)
_SLEEPING = ("weights", "kv")
_SUBJECT = {"graphs": "capability:graphs", "peers": "capability:peer_copy", "groups": "capability:parallel.tensor"}


def collect(claims: Mapping[str, Support], offers: Sequence[Offer], facts: DeviceFacts) -> Iterator[Case]:
    """Cases of the device; those of a capability where it is claimed."""
    for row in _ROWS:
        if all(is_available(claims[name]) for name in row.claims):
            yield _case(row.module, row.name, row.size, {"ci": True})
    for pool in _SLEEPING if is_available(claims["sleep"]) else ():
        yield _case("memory", "a_released_pool_comes_back", "small", {"pool": pool, "ci": True}, f"/{pool}")


def _case(module: str, name: str, size: Size, params: Mapping[str, object], suffix: str = "") -> Case:
    sleeping = name == "a_released_pool_comes_back"
    group = "capability:sleep" if sleeping else _SUBJECT.get(module, f"device:{module}")
    return Case(f"L1/{module}/{name}{suffix}", 1, group, size, f"{RUNS}.{module}:{name}", params)
