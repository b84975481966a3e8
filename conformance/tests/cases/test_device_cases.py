"""L1: a right device passes every case, and for each case a device that is wrong in one thing fails it, saying what."""

from __future__ import annotations

import math

import pytest
import torch

from vllm_conformance.cases import device as planning
from vllm_core.api import CAPABILITIES, Full, MemoryBudgetError, Unsupported, UnsupportedError

LOCAL = [row for row in planning._ROWS if row.module not in ("groups", "peers")]


@pytest.mark.parametrize("row", LOCAL, ids=lambda row: row.name)
def test_a_right_device_passes(row, subject, run_case):
    evidence = run_case(subject(), f"{row.module}:{row.name}")
    assert (evidence.outcome, evidence.detail) == ("PASS", "")


@pytest.mark.parametrize("pool", ["weights", "kv"])
def test_a_pool_that_comes_back_passes(subject, run_case, pool):
    assert run_case(subject(), "memory:a_released_pool_comes_back", pool=pool).outcome == "PASS"


def test_the_same_device_gives_the_same_digest(subject, run_case):
    assert run_case(subject(), "copies:copies_keep_bits").digest == run_case(subject(), "copies:copies_keep_bits").digest != ""


class WrongCopies(torch.Tensor):
    """A tensor of the device into which nothing arrives that another one of the device, or the host, is copied from."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_ and cls.loses(args[0], args[1]):
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


class FromDevice(WrongCopies):
    """Copies from the device to plain host memory are lost."""

    @staticmethod
    def loses(target, source):
        return isinstance(source, WrongCopies) and not isinstance(target, WrongCopies)


class OnDevice(WrongCopies):
    """Copies on the device are lost."""

    @staticmethod
    def loses(target, source):
        return isinstance(source, WrongCopies) and isinstance(target, WrongCopies)


class ToDevice(WrongCopies):
    """Copies to the device are lost."""

    @staticmethod
    def loses(target, source):
        return isinstance(target, WrongCopies) and not isinstance(source, WrongCopies)


def wrong_devices(right):
    """Devices that are wrong in one thing, by name."""

    class Dirty(right):
        def allocate(self, pool, shape, dtype):
            return super().allocate(pool, shape, dtype).fill_(1)

    class Remembers(right):
        kept = None

        def allocate(self, pool, shape, dtype):
            self.kept = (
                super().allocate(pool, shape, dtype) if self.kept is None or self.kept.shape != tuple(shape) else self.kept
            )
            return self.kept

    class Crooked(right):
        def allocate(self, pool, shape, dtype):
            wide = super().allocate(pool, (math.prod(shape) + 3,), dtype)
            return wide[3:].view(tuple(shape))

    class Aliases(right):
        memory = torch.zeros(1 << 20)

        def allocate(self, pool, shape, dtype):
            plain = super().allocate(pool, shape, dtype)
            return self.memory[: plain.numel()].view(tuple(shape)).zero_() if dtype is torch.float32 else plain

    class Uncounted(right):
        def adopt(self, pool, host):
            return host.contiguous()

    class WrongPool(right):
        def count(self, pool, size):
            super().count("workspace", size)

    class Never(right):
        def release(self, pool):
            return self.own[pool]

    class Unlimited(right):
        def allocate(self, pool, shape, dtype):
            return super().allocate(pool, (min(shape[0], 1 << 20), *shape[1:]), dtype)

    class Raw(right):
        def allocate(self, pool, shape, dtype):
            try:
                return super().allocate(pool, shape, dtype)
            except MemoryBudgetError as error:
                raise RuntimeError("out of memory") from error

    class Elsewhere(right):
        torch_device = "meta"

    class Seedless(right):
        def seed(self, value):
            return None

    class NoGraphs(right):
        supports_graphs = False

    class Moves(right):
        def allocate(self, pool, shape, dtype):
            return super().allocate(pool, shape, dtype).as_subclass(Moving)

    def copying(kind):
        class Copies(right):
            def allocate(self, pool, shape, dtype):
                return super().allocate(pool, shape, dtype).as_subclass(kind)

        return Copies

    class Pending(right):
        def event(self):
            event = super().event()
            event.query = lambda: False
            return event

    class Forgets(right):
        def capture(self, work):
            graph = super().capture(work)
            graph.replay = lambda: None
            return graph

    class Shares(right):
        first = None

        def capture(self, work):
            self.first = self.first or super().capture(work)
            return self.first

    class Swallows(right):
        def capture(self, work):
            try:
                return super().capture(work)
            except KeyError:
                return None

    return {
        **{name: kind for name, kind in locals().items() if isinstance(kind, type)},
        "FromDevice": copying(FromDevice),
        "OnDevice": copying(OnDevice),
        "ToDevice": copying(ToDevice),
    }


class Moving(torch.Tensor):
    """A tensor whose address changes."""

    asked = 0

    def data_ptr(self):
        Moving.asked += 64
        return super().data_ptr() + Moving.asked


WRONG = (
    ("Elsewhere", "facts:device_is_what_was_probed", "tensors are on cpu"),
    ("NoGraphs", "facts:flags_are_what_is_claimed", "supports_graphs is False"),
    ("Seedless", "facts:seeds_repeat", "one seed gave two"),
    ("Dirty", "memory:allocations_are_zero_filled", "bytes differ"),
    ("Crooked", "memory:allocations_are_zero_filled", "not aligned"),
    ("Remembers", "memory:reused_memory_is_zero_filled", "after a release"),
    ("Uncounted", "memory:adopted_values_are_kept", "count 0 bytes"),
    ("WrongPool", "memory:statistics_count_by_pool", "are counted as 0"),
    ("Never", "memory:statistics_count_by_pool", "after its release"),
    ("Aliases", "memory:pools_do_not_mix", "before weights is released"),
    ("Never", "memory:many_small_allocations_come_back", "are counted after the release"),
    ("Unlimited", "memory:too_much_is_refused", "were given"),
    ("Raw", "memory:too_much_is_refused", "out of memory"),
    ("Unlimited", "memory:full_memory_is_refused_and_recovers", "were given"),
    ("ToDevice", "copies:copies_keep_bits", "bytes differ"),
    ("FromDevice", "copies:pinned_copies_keep_bits", "pinned elements"),
    ("ToDevice", "copies:copies_into_parts_leave_the_rest", "after a copy into"),
    ("OnDevice", "copies:device_copies_keep_bits", "a copy on the device"),
    ("FromDevice", "copies:an_asynchronous_copy_is_there_after_its_event", "before the event"),
    ("Pending", "copies:an_asynchronous_copy_is_there_after_its_event", "is not reached"),
    ("OnDevice", "order:work_runs_in_the_order_of_its_calls", "from buffer to buffer"),
    ("Pending", "order:events_are_reached_in_order", "not reached"),
    ("FromDevice", "order:events_are_reached_in_order", "behind event"),
    ("Pending", "order:synchronize_waits_for_everything", "not reached after synchronize"),
    ("FromDevice", "order:an_event_can_be_recorded_again", "turn 0"),
    ("OnDevice", "order:buffers_in_rotation_are_not_mixed_up", "turn 1"),
    ("Forgets", "graphs:a_graph_replays_what_was_captured", "replay 0"),
    ("Forgets", "graphs:a_graph_reads_new_contents", "contents of seed"),
    ("Shares", "graphs:graphs_can_be_interleaved", "second graph"),
    ("Forgets", "graphs:replays_keep_their_place_in_the_order", "replay 0 of 8"),
    ("Swallows", "graphs:a_capture_that_raises_leaves_the_device_usable", "was lost"),
    ("Shares", "graphs:many_graphs_can_be_kept", "of 24"),
)


@pytest.mark.parametrize(("name", "case", "says"), WRONG, ids=[f"{case.partition(':')[2]}-{name}" for name, case, _ in WRONG])
def test_a_device_that_is_wrong_in_one_thing_fails(host_device, subject, run_case, name, case, says):
    evidence = run_case(subject(device=wrong_devices(host_device)[name]()), case)
    assert evidence.outcome == "FAIL"
    assert says in evidence.detail


def test_every_case_has_a_device_that_fails_it():
    assert {case for _, case, _ in WRONG} == {f"{row.module}:{row.name}" for row in LOCAL}


def test_a_pool_that_comes_back_elsewhere_fails(host_device, subject, run_case):
    device = wrong_devices(host_device)["Moves"]()
    evidence = run_case(subject(device=device), "memory:a_released_pool_comes_back", pool="kv")
    assert evidence.outcome == "FAIL"
    assert "became" in evidence.detail


def test_a_pool_that_is_refused_although_it_is_claimed_fails(host_device, subject, run_case):
    class NoRestore(host_device):
        def restore(self, pool):
            raise UnsupportedError("No restore", on=pool, found="none", expected="one", fix="none")

    assert run_case(subject(device=NoRestore()), "memory:a_released_pool_comes_back", pool="kv").outcome == "FAIL"


def collected(**changes):
    claims = {**dict.fromkeys(CAPABILITIES, Full()), **changes}
    return {case.id for case in planning.collect(claims, (), None)}


@pytest.mark.parametrize(
    ("claim", "part"),
    [("graphs", "L1/graphs/"), ("peer_copy", "L1/peers/"), ("parallel.tensor", "L1/groups/"), ("sleep", "_back/")],
)
def test_cases_of_a_capability_are_there_where_it_is_claimed(claim, part):
    with_it, without = collected(), collected(**{claim: Unsupported("by design")})
    gone = with_it - without
    assert gone
    assert all(part in one for one in gone)
    assert without < with_it
