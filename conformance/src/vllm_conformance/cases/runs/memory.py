"""L1: memory by pool. Every case gives back what it took."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vllm_conformance.case import Evidence, Subject
from vllm_conformance.cases.runs.expect import dtypes_of, expect, passed, pattern, put, same
from vllm_core.api import POOLS, Device, MemoryBudgetError, Pool

ALIGNMENT = 64
SHAPES = ((1,), (7, 3), (64, 65), (3, 1, 129))


def allocations_are_zero_filled(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Of every pool and dtype: shape, dtype, contiguity, alignment, zeros."""
    device = subject.device
    for pool in POOLS:
        for dtype in dtypes_of(subject):
            for shape in SHAPES:
                tensor = device.allocate(pool, shape, dtype)
                what = f"pool {pool}, {dtype} {shape}"
                expect(tuple(tensor.shape) == shape and tensor.dtype == dtype, f"{what}: {tensor.dtype} {tuple(tensor.shape)}")
                expect(tensor.is_contiguous(), f"{what}: not contiguous")
                expect(tensor.data_ptr() % ALIGNMENT == 0, f"{what}: address {tensor.data_ptr():#x} is not aligned to 64 bytes")
                same(tensor, torch.zeros(shape, dtype=dtype), what)
        device.release(pool)
    return passed()


def reused_memory_is_zero_filled(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """What was written before a release does not come back."""
    device = subject.device
    for pool in POOLS:
        for _ in range(3):
            tensor = device.allocate(pool, (1 << 16,), torch.int32)
            same(tensor, torch.zeros(1 << 16, dtype=torch.int32), f"pool {pool} after a release")
            tensor.copy_(torch.full((1 << 16,), -1, dtype=torch.int32))
            device.synchronize()
            del tensor
            device.release(pool)
    return passed()


def adopted_values_are_kept(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Weights: contiguous or not, large or empty, counted in their pool."""
    device = subject.device
    kept: list[Tensor] = []  # a freed tensor may no longer be counted
    for dtype in dtypes_of(subject):
        for host in (pattern((33, 65), dtype, 1), pattern((65, 33), dtype, 2).t(), pattern((40, 40), dtype, 3)[::2, 3:]):
            before = device.statistics().own_bytes["weights"]
            there = device.adopt("weights", host)
            same(there, host.contiguous(), f"adopted {dtype} {tuple(host.shape)}")
            expect(there.is_contiguous(), f"adopted {dtype} {tuple(host.shape)} is not contiguous")
            grown = device.statistics().own_bytes["weights"] - before
            expect(grown >= host.numel() * host.element_size(), f"{host.numel()} elements of {dtype} count {grown} bytes")
            kept.append(there)
    evidence = passed(*kept)
    kept.clear()
    device.release("weights")
    return evidence


def statistics_count_by_pool(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Bytes asked for are counted, in their pool alone, until it is released; totals bound them."""
    device, size = subject.device, 1 << 20
    for pool in POOLS:
        device.release(pool)
    start = device.statistics()
    expect(set(start.own_bytes) == set(POOLS), f"own_bytes has {sorted(start.own_bytes)}, the pools are {sorted(POOLS)}")
    expect(start.total_bytes > 0, f"total_bytes is {start.total_bytes}")
    expect(0 <= start.available_bytes <= start.total_bytes, f"{start.available_bytes} of {start.total_bytes} bytes available")
    for pool in POOLS:
        before = device.statistics().own_bytes
        held = device.allocate(pool, (size,), torch.uint8)
        stats = device.statistics()
        grown = {name: stats.own_bytes[name] - before[name] for name in POOLS}
        expect(size <= grown[pool] <= 4 * size, f"{size} bytes in {pool} are counted as {grown[pool]}")
        others = [name for name in POOLS if name != pool and grown[name]]
        expect(not others, f"an allocation in {pool} is counted in {', '.join(others)}")
        expect(stats.peak_own_bytes >= sum(stats.own_bytes.values()), f"peak {stats.peak_own_bytes} is below what is held")
        del held
    for pool in POOLS:
        held_bytes = device.statistics().own_bytes[pool]
        released = device.release(pool)
        expect(released == held_bytes, f"release({pool!r}) says {released}, {held_bytes} were counted")
        left = device.statistics().own_bytes[pool]
        expect(left == 0, f"{left} bytes are counted in {pool} after its release")
    expect(device.release("graph") == 0, "releasing an empty pool frees something")
    return passed()


def pools_do_not_mix(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Tensors of all pools keep their values, whatever is allocated and released beside them."""
    device = subject.device
    values = {pool: pattern((257, 31), torch.float32, seed) for seed, pool in enumerate(POOLS)}
    held = {pool: device.allocate(pool, (257, 31), torch.float32) for pool in POOLS}
    for pool in POOLS:
        held[pool].copy_(values[pool])
    for gone in POOLS:
        for pool in held:
            same(held[pool], values[pool], f"pool {pool} before {gone} is released")
        del held[gone]
        device.release(gone)
        device.allocate(gone, (1 << 14,), torch.int32).copy_(torch.full((1 << 14,), 7, dtype=torch.int32))
    for pool in POOLS:
        device.release(pool)
    return passed(*values.values())


def many_small_allocations_come_back(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """A few thousand small tensors, several times: nothing is lost and none lies on another."""
    device, count = subject.device, 1500
    for _ in range(3):
        tensors = [device.allocate("state", (n % 37 + 1,), torch.int32) for n in range(count)]
        for n in range(0, count, 50):
            tensors[n].copy_(torch.full((n % 37 + 1,), n + 1, dtype=torch.int32))
        for n in range(0, count, 25):
            value = n + 1 if n % 50 == 0 else 0
            same(tensors[n], torch.full((n % 37 + 1,), value, dtype=torch.int32), f"small tensor {n}")
        tensors.clear()
        device.release("state")
        left = device.statistics().own_bytes["state"]
        expect(left == 0, f"{left} bytes are counted after the release")
    return passed()


def too_much_is_refused(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """More than there is raises MemoryBudgetError with the numbers, counts nothing, and disturbs nobody."""
    device = subject.device
    neighbour, values = put(device, pattern((1000,), torch.float32)), pattern((1000,), torch.float32)
    before = device.statistics().own_bytes["kv"]
    for factor in (2, 64):
        size = device.statistics().total_bytes * factor
        _refuse(device, "kv", size)
    expect(device.statistics().own_bytes["kv"] == before, "a refused allocation is counted")
    same(neighbour, values, "a tensor beside a refused allocation")
    _works(device)
    device.release("workspace")
    return passed(values)


def full_memory_is_refused_and_recovers(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Most of what is available can be had, but not twice; and again after its release.

    Memory shared with the host is spared, and so is a rest: other cases may run on the device meanwhile.
    """
    device = subject.device
    if subject.facts.memory_kind != "discrete":
        return too_much_is_refused(subject, params)
    size = device.statistics().available_bytes * 7 // 10
    for _ in range(3):
        most = device.allocate("kv", (size,), torch.uint8)
        _refuse(device, "kv", size)
        _works(device)
        del most
        device.release("kv")
    return passed()


def a_released_pool_comes_back(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """`sleep`: release, restore, write and read; at the old addresses where that is promised."""
    device, pool = subject.device, params["pool"]
    device.release(pool)
    values = [pattern((50 + n, 64), torch.float32, n) for n in range(4)]
    tensors = [device.allocate(pool, tuple(value.shape), torch.float32) for value in values]
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
    device.synchronize()
    addresses = [tensor.data_ptr() for tensor in tensors]
    own = device.statistics().own_bytes[pool]
    released = device.release(pool)
    expect(released >= sum(math.prod(value.shape) * 4 for value in values), f"release says {released} bytes")
    expect(device.statistics().own_bytes[pool] < own, "a released pool is counted as before")
    _works(device)
    device.restore(pool)
    if device.stable_addresses:
        now = [tensor.data_ptr() for tensor in tensors]
        expect(now == addresses, f"addresses {addresses[0]:#x}... became {now[0]:#x}...")
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value + 1)
        same(tensor, value + 1, f"a restored tensor of {pool}")
    expect(device.offload(pool) >= released, "offload gives less back than release")
    _works(device)
    device.restore(pool)
    device.restore(pool)
    for tensor, value in zip(tensors, values, strict=True):
        same(tensor, value + 1, f"a tensor of {pool} that was on the host")
    tensors.clear()
    device.release(pool)
    return passed(*values)


def _refuse(device: Device, pool: Pool, size: int) -> None:
    try:
        device.allocate(pool, (size,), torch.uint8)
    except MemoryBudgetError as error:
        expect(
            bool(error.found and error.expected and error.fix), "the refusal does not say what was found, expected, and to do"
        )
    else:
        raise AssertionError(f"{size} bytes were given, the device has {device.statistics().total_bytes}")


def _works(device: Device) -> None:
    """A small tensor can be had, written and read."""
    value = pattern((100,), torch.float32, 9)
    same(put(device, value), value, "a small tensor after a refusal")
    device.release("workspace")
