"""A few cases: enough for every verdict."""

from __future__ import annotations

import hashlib

from vllm_conformance.case import Case, Evidence
from vllm_core.api import UnsupportedError, is_available, load_entry


def collect(claims, offers, facts):
    yield Case("L0/loads", 0, "loads", "small", f"{__name__}:loads", {"ci": True})
    if any("add" in offer.ops for offer in offers):
        for seed in range(3):
            yield Case(f"L1/add/seed{seed}", 1, "op:add", "small", f"{__name__}:add", {"seed": seed, "ci": seed == 0})
    run = "graphs" if is_available(claims["graphs"]) else "no_graphs"
    yield Case(f"L1/{run}", 1, "capability:graphs", "small", f"{__name__}:{run}", {"ci": True})
    if is_available(claims["peer_copy"]):
        yield Case("L1/peer", 1, "capability:peer_copy", "medium", f"{__name__}:peer", {})
    yield Case("L5/speed", 5, "speed", "small", f"{__name__}:speed", {})


def loads(subject, params):
    assert subject.loaded.manifest is not None
    return Evidence()


def add(subject, params):
    seed = params["seed"]
    assert subject.device.facts == subject.facts
    a, b, out = [1, 2, 3], [seed] * 3, [0, 0, 0]
    load_entry(subject.offers[0].ops["add"])(out, a, b)
    assert out == [1 + seed, 2 + seed, 3 + seed], f"at 0: {out[0]}, expected {1 + seed}"
    return Evidence(seed=seed, digest=hashlib.sha256(bytes(out)).hexdigest(), calls={"kernel": 1})


def graphs(subject, params):
    subject.device.capture(lambda: None)
    return Evidence()


def no_graphs(subject, params):
    device = subject.device
    try:
        device.capture(lambda: None)
    except UnsupportedError as error:
        return Evidence("REFUSED", str(error.found))
    except Exception as error:
        return Evidence("BAD_REFUSAL", f"{type(error).__name__}: {error}")
    return Evidence("UNDERCLAIMED", "capture works")


def peer(subject, params):
    subject.peer(1)
    return Evidence()


def speed(subject, params):
    return Evidence(measured={"adds_per_s": 5.0})
