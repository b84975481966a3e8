"""Peers, groups of two ranks, and numbers that are only reported."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vllm_conformance.case import MissingDeviceError
from vllm_conformance.cases import speed
from vllm_conformance.cases.runs import groups, peers, rank, whole
from vllm_core.api import OPS

WRONG_SUM = """
from vllm_cpu.ops import comm
def all_reduce(x, group):
    comm.all_reduce(x, group)
    x[:, -1] += 1
"""


class Named(torch.Tensor):
    """A host tensor that says it lies on another device."""

    @property
    def device(self):
        return torch.device("meta")


def second(right, **changes):
    """A device beside the right one: host memory, under another name."""

    class Second(right):
        torch_device = "meta"

        def allocate(self, pool, shape, dtype):
            return super().allocate(pool, shape, dtype).as_subclass(Named)

        def copy_to_peer(self, tensor, peer):
            return tensor.as_subclass(torch.Tensor).clone()

    device = Second()
    device.facts = replace(device.facts, id="1")
    for name, value in changes.items():
        setattr(device, name, value)
    return device


def first(right):
    """The device whose copies reach the second."""

    class First(right):
        def copy_to_peer(self, tensor, peer):
            return tensor.clone().as_subclass(Named)

    return First()


def test_two_devices_that_are_apart_pass(host_device, subject, run_case):
    pair = subject(device=first(host_device), peers=(second(host_device),))
    assert run_case(pair, "peers:devices_do_not_mix").outcome == "PASS"
    assert run_case(pair, "peers:peer_copies_keep_bits").outcome == "PASS"


def test_two_devices_of_one_name_fail(host_device, subject, run_case):
    evidence = run_case(subject(peers=(host_device(),)), "peers:devices_do_not_mix")
    assert evidence.outcome == "FAIL"
    assert "both are cpu" in evidence.detail


def test_bytes_that_are_counted_on_the_other_device_fail(host_device, subject, run_case):
    here = first(host_device)
    there = second(host_device, own=here.own)
    evidence = run_case(subject(device=here, peers=(there,)), "peers:devices_do_not_mix")
    assert evidence.outcome == "FAIL"
    assert "on meta" in evidence.detail


def test_a_peer_copy_that_loses_values_fails(host_device, subject, run_case):
    here = first(host_device)
    here.copy_to_peer = lambda tensor, peer: (tensor * 0).as_subclass(Named)
    evidence = run_case(subject(device=here, peers=(second(host_device),)), "peers:peer_copies_keep_bits")
    assert evidence.outcome == "FAIL"
    assert "bytes differ" in evidence.detail


def test_a_missing_second_device_is_missing_and_not_wrong(subject):
    with pytest.raises(MissingDeviceError):
        peers.devices_do_not_mix(subject(), {})


@pytest.mark.parametrize("case", [whole.two_workers, groups.collectives])
def test_a_device_that_no_two_workers_may_share_is_missing_a_second(host_device, subject, case):
    """FAIL, it said once on a machine with one GPU."""
    alone = first(host_device)
    alone.facts = replace(alone.facts, max_workers=1)
    with pytest.raises(MissingDeviceError):
        case(subject(device=alone), {"model": "llama"})


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
def test_what_a_rank_expects_is_what_one_process_computes(op):
    inputs = [torch.arange(8.0).view(2, 4) * (rank + 1) for rank in range(2)]
    found = [rank._expected(op, inputs, number) for number in range(2)]
    if op == "all_gather":
        assert all(torch.equal(one, torch.cat(inputs, 1)) for one in found)
    elif op == "all_reduce":
        assert all(torch.equal(one, inputs[0] * 3) for one in found)
    else:
        assert torch.equal(torch.cat(found), inputs[0] * 3)


def test_collectives_of_the_cpu_platform_pass(cpu, run_case):
    evidence = run_case(cpu, "groups:collectives")
    assert (evidence.outcome, evidence.detail) == ("PASS", "")
    assert sum(evidence.calls.values()) == 6


def test_a_wrong_sum_fails_on_both_ranks(kernels, run_case):
    ops = ("all_gather", "reduce_scatter")
    body = WRONG_SUM + "all_gather, reduce_scatter = comm.all_gather, comm.reduce_scatter\n"
    evidence = run_case(kernels(body, {"all_reduce": "all_reduce", **{op: op for op in ops}}), "groups:collectives")
    assert evidence.outcome == "FAIL"
    assert "rank 0: all_reduce" in evidence.detail
    assert "rank 1: all_reduce" in evidence.detail
    assert "all_gather" not in evidence.detail


def test_a_rank_that_fails_is_named_with_what_it_said(kernels, run_case):
    body = "def all_reduce(x, group):\n    raise RuntimeError('link is down')\n"
    evidence = run_case(kernels(body, {"all_reduce": "all_reduce"}), "groups:collectives")
    assert evidence.outcome == "FAIL"
    assert "link is down" in evidence.detail


def test_numbers_are_reported_with_their_units(cpu, run_case):
    evidence = run_case(cpu, "speed:engine_speed")
    assert evidence.outcome == "PASS"
    assert {"start_s", "single_stream_tokens_per_s", "batch_tokens_per_s", "prefill_tokens_per_s", "step_s"} <= set(
        evidence.measured
    )
    assert all(value > 0 for value in evidence.measured.values())
    assert all(name.endswith(("_s", "_per_s", "_s_per_step")) for name in evidence.measured)
    assert sum(evidence.calls.values()) > 0


def test_speed_has_no_place_in_the_fixed_subset():
    assert not any(case.params for case in speed.collect({}, (), None))


def test_the_collectives_are_ops():
    from vllm_conformance.cases.runs.groups import COLLECTIVES

    assert set(COLLECTIVES) <= set(OPS)
