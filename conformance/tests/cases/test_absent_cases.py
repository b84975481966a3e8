"""What is declared absent: refused rightly, working all the same, or refused in a way that helps nobody."""

from __future__ import annotations

import pytest

from vllm_conformance.cases import absent as planning
from vllm_core.api import CAPABILITIES, OPS, Device, Full, NotImplementedYet, Offer, Unsupported, UnsupportedError
from vllm_core.ops.layouts import kv_layout

KV = ("kv_bind", "kv_write", "paged_attention", "kv_copy", "kv_export", "kv_import")
FLOATS = frozenset({"float32", "bfloat16", "float16"})


@pytest.fixture
def without(subject):
    """Makes a subject that declares a capability absent."""

    def make(name, **changes):
        claims = {**dict.fromkeys(CAPABILITIES, Full()), name: Unsupported("by design")}
        return subject(claims=claims, **changes)

    return make


def refusing(right):
    """The device as `Device` itself makes it: what a subclass does not have is refused."""

    class Refuses(right):
        supports_graphs = False
        capture = Device.capture
        restore = Device.restore
        copy_to_peer = Device.copy_to_peer

    return Refuses


@pytest.mark.parametrize("name", planning.DEVICE)
def test_a_device_that_refuses_is_good(host_device, without, run_case, name):
    evidence = run_case(without(name, device=refusing(host_device)()), "absent:on_device", capability=name)
    assert evidence.outcome == "REFUSED"
    assert "by design" in evidence.detail


@pytest.mark.parametrize("name", ["graphs", "sleep", "peer_copy"])
def test_what_works_although_it_is_declared_absent_is_underclaimed(without, run_case, name):
    assert run_case(without(name), "absent:on_device", capability=name).outcome == "UNDERCLAIMED"


def test_another_exception_is_a_bad_refusal(host_device, without, run_case):
    class Rude(refusing(host_device)):
        def capture(self, work):
            raise NotImplementedError

    evidence = run_case(without("graphs", device=Rude()), "absent:on_device", capability="graphs")
    assert evidence.outcome == "BAD_REFUSAL"
    assert "NotImplementedError instead of UnsupportedError" in evidence.detail


def test_a_wrong_result_is_a_bad_refusal(host_device, without, run_case):
    class Lossy(host_device):
        def copy_to_peer(self, tensor, peer):
            return tensor * 0

    evidence = run_case(without("peer_copy", device=Lossy()), "absent:on_device", capability="peer_copy")
    assert evidence.outcome == "BAD_REFUSAL"
    assert "wrong results" in evidence.detail


def test_a_flag_that_contradicts_the_refusal_is_bad(host_device, without, run_case):
    class Boasts(refusing(host_device)):
        supports_graphs = True

    evidence = run_case(without("graphs", device=Boasts()), "absent:on_device", capability="graphs")
    assert evidence.outcome == "BAD_REFUSAL"
    assert "says the contrary" in evidence.detail


def test_a_device_that_is_gone_after_its_refusal_is_bad(host_device, without, run_case):
    class Breaks(refusing(host_device)):
        broken = False

        def capture(self, work):
            self.broken = True
            return super().capture(work)

        def allocate(self, pool, shape, dtype):
            if self.broken:
                raise RuntimeError("context is lost")
            return super().allocate(pool, shape, dtype)

    evidence = run_case(without("graphs", device=Breaks()), "absent:on_device", capability="graphs")
    assert evidence.outcome == "BAD_REFUSAL"
    assert "context is lost" in evidence.detail


def attention(entry=OPS["paged_attention"].reference, layout=kv_layout, **conditions):
    """An own offer of the family kv."""
    ops = {**{name: OPS[name].reference for name in KV}, "paged_attention": entry}
    return Offer(provider="own", ops=ops, kv_layout=layout, dtypes=FLOATS, kv_dtypes=FLOATS, **conditions)


def polite(out, q, kv, starts, lengths, table, most, longest, scale, window, cap):
    """Refuses windows."""
    if window:
        raise UnsupportedError("No windows", on="attention", found=f"window {window}", expected="0", fix="none")


def test_an_op_that_refuses_is_good(without, run_case):
    subject = without("attention.sliding_window", own=(attention(f"{__name__}:polite"),))
    evidence = run_case(subject, "absent:on_ops", capability="attention.sliding_window")
    assert evidence.outcome == "REFUSED"
    assert "sliding_window" in evidence.detail


def test_an_op_that_works_is_underclaimed(without, run_case):
    subject = without("attention.soft_cap", own=(attention(),))
    assert run_case(subject, "absent:on_ops", capability="attention.soft_cap").outcome == "UNDERCLAIMED"


def test_an_offer_that_accepts_what_the_platform_declares_absent_is_bad(without, run_case):
    subject = without("attention.soft_cap", own=(attention(features=frozenset({"soft_cap"})),))
    evidence = run_case(subject, "absent:on_ops", capability="attention.soft_cap")
    assert evidence.outcome == "BAD_REFUSAL"
    assert "own accepts paged_attention" in evidence.detail


def test_a_kv_dtype_without_a_layout_must_be_refused_and_not_looked_up(without, run_case):
    def looks_up(group, dtype, size):
        return {"float32": 1}[dtype]

    subject = without("kv_dtype.fp8", own=(attention(layout=looks_up),))
    evidence = run_case(subject, "absent:on_ops", capability="kv_dtype.fp8")
    assert evidence.outcome == "BAD_REFUSAL"
    assert "KeyError" in evidence.detail
    # With the reference's layout its ops read fp8, whatever the platform says.
    reads = without("kv_dtype.fp8", own=(attention(),))
    assert run_case(reads, "absent:on_ops", capability="kv_dtype.fp8").outcome == "UNDERCLAIMED"


def test_a_format_is_refused_by_the_offer_alone(without, run_case):
    offer = Offer(provider="own", ops={name: OPS[name].reference for name in ("linear_pack", "linear")})
    evidence = run_case(
        without("quantization.weight_only", own=(offer,)), "absent:on_ops", capability="quantization.weight_only"
    )
    assert evidence.outcome == "REFUSED"
    assert "format: wanted gguf.q4_0, supported plain" in evidence.detail


def test_a_platform_without_an_own_op_has_nothing_to_force(without, run_case):
    evidence = run_case(without("attention.encoder"), "absent:on_ops", capability="attention.encoder")
    assert evidence.outcome == "REFUSED"
    assert "no offer of the platform's own" in evidence.detail


@pytest.mark.parametrize("name", ["sleep", "peer_copy"])
def test_the_planner_refuses_what_the_cpu_platform_lacks(cpu, run_case, name):
    evidence = run_case(cpu, "absent:while_planning", capability=name)
    assert evidence.outcome == "REFUSED"
    assert name.rpartition(".")[2] in evidence.detail


@pytest.mark.parametrize(
    "name",
    ["graphs", "dtype.float16", "kv_dtype.fp8", "attention.soft_cap", "attention.sinks", "attention.encoder", "prefix_caching"],
)
def test_a_plan_that_is_made_is_a_bad_refusal(cpu, run_case, name):
    """These the platform has: so the planner must not refuse, and the case must see that it did not."""
    evidence = run_case(cpu, "absent:while_planning", capability=name)
    assert evidence.outcome == "BAD_REFUSAL"
    assert "a Plan was made" in evidence.detail


def test_every_absent_capability_is_planned_and_forced_where_there_is_a_way():
    claims = dict.fromkeys(CAPABILITIES, NotImplementedYet("later"))
    found = {(case.level, case.params["capability"]) for case in planning.collect(claims, (), None)}
    assert found == {
        *((1, name) for name in planning.DEVICE),
        *((2, name) for name in planning.OPS),
        *((3, name) for name in CAPABILITIES),
    }
    assert not list(planning.collect(dict.fromkeys(CAPABILITIES, Full()), (), None))
