"""L1: copies between host, pinned memory and device, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm_conformance.case import Evidence, Subject
from vllm_conformance.cases.runs.expect import dtypes_of, expect, passed, pattern, put, same

SIZES = (1, 63, 64, 4097, 1 << 18)


def copies_keep_bits(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """From plain host memory and back, in all dtypes and odd sizes, NaN payloads included."""
    device, kept = subject.device, []
    for dtype in dtypes_of(subject):
        for size in SIZES:
            host = pattern((size,), dtype, size)
            if dtype.is_floating_point:
                host[0] = float("nan")
            same(put(device, host), host, f"{size} elements of {dtype}")
            kept.append(host)
        device.release("workspace")
    return passed(*kept)


def pinned_copies_keep_bits(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """From pinned memory, on the device, and into pinned memory, each without blocking."""
    device, kept = subject.device, []
    for dtype in dtypes_of(subject):
        for size in SIZES:
            values = pattern((size,), dtype, size + 1)
            source, target = device.pinned((size,), dtype), device.pinned((size,), dtype)
            expect(source.device.type == "cpu", f"pinned memory is on {source.device}")
            expect(tuple(source.shape) == (size,) and source.dtype == dtype, f"pinned {source.dtype} {tuple(source.shape)}")
            source.copy_(values)
            there = device.allocate("workspace", (size,), dtype)
            there.copy_(source, non_blocking=True)
            target.copy_(there, non_blocking=True)
            event = device.event()
            event.record()
            event.wait()
            same(target, values, f"{size} pinned elements of {dtype}")
            kept.append(values)
        device.release("workspace")
    return passed(*kept)


def copies_into_parts_leave_the_rest(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """The engine copies into the beginning of buffers, and reads the beginning of others."""
    device = subject.device
    expected = pattern((4096,), torch.int32, 1)
    whole = put(device, expected)
    for begin, end in ((0, 1), (0, 1000), (17, 1023), (4095, 4096)):
        part = pattern((end - begin,), torch.int32, begin + 2)
        pinned = device.pinned((4096,), torch.int32)
        pinned[begin:end].copy_(part)
        whole[begin:end].copy_(pinned[begin:end], non_blocking=True)
        device.synchronize()
        expected[begin:end] = part
        same(whole, expected, f"after a copy into [{begin}:{end}]")
        same(whole[begin:end], part, f"the part [{begin}:{end}]")
    device.release("workspace")
    return passed(expected)


def device_copies_keep_bits(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """From one tensor of the device to another, whole and in part."""
    device, kept = subject.device, []
    for dtype in dtypes_of(subject):
        values = pattern((129, 64), dtype, 4)
        source, target = put(device, values), device.allocate("workspace", (129, 64), dtype)
        target.copy_(source)
        same(target, values, f"a copy on the device, {dtype}")
        target[:50].copy_(source[79:])
        same(target[:50], values[79:], f"a part copied on the device, {dtype}")
        same(target[50:], values[50:], f"what is beside a part, {dtype}")
        kept.append(values)
        device.release("workspace")
    return passed(*kept)


def an_asynchronous_copy_is_there_after_its_event(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Results are read behind an event, without waiting for what was queued after it."""
    device, size = subject.device, 1 << 18
    first, second = pattern((size,), torch.float32, 1), pattern((size,), torch.float32, 2)
    source = put(device, first)
    target, other = device.pinned((size,), torch.float32), device.pinned((size,), torch.float32)
    target.copy_(source, non_blocking=True)
    event = device.event()
    event.record()
    # Queued later: what the event stands for must not see it.
    source.copy_(put(device, second))
    other.copy_(source, non_blocking=True)
    event.wait()
    expect(event.query(), "an event that was waited for is not reached")
    same(target, first, "what was copied before the event")
    device.synchronize()
    same(other, second, "what was copied after it")
    same(target, first, "what was copied before it, later")
    device.release("workspace")
    return passed(first, second)
