"""L1: two devices of one type in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm_conformance.case import Evidence, Subject
from vllm_conformance.cases.runs.expect import dtypes_of, expect, passed, pattern, put, same
from vllm_core.api import Device


def devices_do_not_mix(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Each has its own memory, counts its own bytes, and keeps its values whatever the other does."""
    first, second = subject.device, subject.peer(1)
    expect(first.torch_device != second.torch_device, f"both are {first.torch_device}")
    expect(first.facts.id != second.facts.id, f"both have the id {first.facts.id}")
    values = [pattern((1 << 16,), torch.float32, n) for n in range(2)]
    before = second.statistics().own_bytes["workspace"]
    mine = put(first, values[0])
    grown = second.statistics().own_bytes["workspace"] - before
    expect(grown == 0, f"an allocation on {first.torch_device} counts {grown} bytes on {second.torch_device}")
    theirs = put(second, values[1])
    for device, tensor, value in ((first, mine, values[0]), (second, theirs, values[1])):
        where = torch.device(device.torch_device)
        expect(tensor.device == where, f"a tensor of {where} is on {tensor.device}")
        same(tensor, value, f"a tensor of {where}")
    second.release("workspace")
    same(mine, values[0], "a tensor of the first device after a release on the second")
    second.synchronize()
    _events(first, second)
    for device in (first, second):
        device.release("workspace")
    return passed(*values)


def _events(first: Device, second: Device) -> None:
    """An event of one device does not stand for the other's work."""
    for device in (second, first):
        value = pattern((1 << 14,), torch.float32, 3)
        target = device.pinned((1 << 14,), torch.float32)
        target.copy_(put(device, value), non_blocking=True)
        event = device.event()
        event.record()
        event.wait()
        same(target, value, f"a copy behind an event of {device.torch_device}")


def peer_copies_keep_bits(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Both ways, all dtypes, whole tensors and rows of them; the source stays what it was."""
    devices, kept = (subject.device, subject.peer(1)), []
    for source, target in (devices, devices[::-1]):
        for dtype in dtypes_of(subject):
            value = pattern((77, 130), dtype, 6)
            here = put(source, value)
            for what, tensor, expected in (("whole", here, value), ("rows", here[5:40], value[5:40])):
                there = source.copy_to_peer(tensor, target)
                name = f"{what} {dtype} from {source.torch_device} to {target.torch_device}"
                expect(there.device == torch.device(target.torch_device), f"{name} is on {there.device}")
                target.synchronize()
                same(there, expected, name)
            same(here, value, f"the source of {dtype}")
            kept.append(value)
        for device in devices:
            device.release("workspace")
    return passed(*kept)
