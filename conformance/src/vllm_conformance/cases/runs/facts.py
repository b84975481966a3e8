"""L1: what a device says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm_conformance.case import Evidence, Subject
from vllm_conformance.cases.runs.expect import expect, passed
from vllm_core.api import Device, Eager, is_available


def device_is_what_was_probed(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """A Device of the facts that it was opened with, whose name torch understands."""
    device, facts = subject.device, subject.facts
    expect(isinstance(device, Device), f"create_device returned {type(device).__name__}")
    expect(device.facts == facts, f"facts {device.facts}, probed as {facts}")
    manifest = subject.loaded.manifest
    assert manifest is not None, "a platform has a manifest"
    expect(facts.device_type == manifest.device_type, f"device type {facts.device_type}, manifest {manifest.device_type}")
    tensor = device.allocate("workspace", (1,), torch.int32)
    expect(tensor.device == torch.device(device.torch_device), f"tensors are on {tensor.device}, not {device.torch_device}")
    device.release("workspace")
    return passed()


def flags_are_what_is_claimed(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """`supports_graphs` follows the claim; `eager` is one of its three kinds, and names ops that exist."""
    device = subject.device
    graphs = is_available(subject.claims["graphs"])
    expect(device.supports_graphs == graphs, f"supports_graphs is {device.supports_graphs}, the claim says {graphs}")
    for name in ("asynchronous", "stable_addresses", "supports_graphs"):
        expect(isinstance(getattr(device, name), bool), f"{name} is {getattr(device, name)!r}")
    expect(isinstance(device.eager, Eager), f"eager is {device.eager!r}")
    full, probed = device.eager.kind == "full", subject.facts.properties.get("eager", "full") == "full"
    expect(full == probed, f"eager is {device.eager.kind!r}, but the probe's property says {'' if probed else 'not '}full")
    return passed()


def seeds_repeat(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Seeding is possible, and where torch's own random numbers run on the device they depend on the seed alone."""
    device = subject.device
    for value in (0, 1, 2**31 - 1, 2**63 - 1):
        device.seed(value)
    if device.eager.kind != "full":
        return passed()
    drawn = []
    for value in (1, 1, 2):
        device.seed(value)
        drawn.append(device.allocate("workspace", (256,), torch.float32).uniform_().to("cpu"))
    device.release("workspace")
    expect(torch.equal(drawn[0], drawn[1]), "one seed gave two series of numbers")
    expect(not torch.equal(drawn[0], drawn[2]), "two seeds gave one series of numbers")
    expect(bool(((drawn[0] >= 0) & (drawn[0] < 1)).all()), "numbers of [0, 1) lie outside")
    return passed(drawn[0], seed=1)
