"""Which devices the workers that share one model run on. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_core.api import DeviceFacts
from vllm_core.errors import PlanError
from vllm_core.registry.plan import Candidate, Needs

ONE_TYPE = "devices of one type: layers are never shared between types"
BEHIND_A_ROUTER = "run one engine per device type, side by side behind a router"


def place(needs: Needs, devices: Sequence[DeviceFacts]) -> tuple[DeviceFacts, ...] | str:
    """One device for each worker, in rank order; or why there are too few.

    Devices come as the user named them, else those with the most memory first. One that several workers may share gets
    its second only when each has its first.
    """
    named = needs.device_ids
    ordered = sorted(devices, key=lambda one: -one.memory_bytes if named is None else named.index(one.id))
    places = [one for turn in range(needs.workers) for one in ordered if one.max_workers > turn]
    if len(places) < needs.workers:
        ids = ", ".join(one.id for one in ordered)
        return f"workers: wanted {needs.workers}, found {len(ordered)} devices ({ids}) for {len(places)} workers"
    return tuple(places[: needs.workers])


def check_ids(needs: Needs, candidates: Sequence[Candidate]) -> None:
    """Device ids that the user named: no more than workers, and all of one type. Raises PlanError."""
    ids = needs.device_ids
    if ids is None:
        return
    if not ids or len(set(ids)) != len(ids) or len(ids) > needs.workers:
        raise PlanError(
            "Wrong number of devices",
            on="device_ids",
            found=", ".join(ids) or "none",
            expected=f"up to {needs.workers} different ids, for tensor_parallel_size {needs.workers}",
            fix="name as many ids as workers, or set --tensor-parallel-size; run one engine per device behind a router",
        )
    owners = {one: [c for c in candidates if any(device.id == one for device in c.devices)] for one in ids}
    if all(owners.values()) and not any(all(c in owner for owner in owners.values()) for c in candidates):
        kinds = "; ".join(f"{one}: {_kind(owner[0], one)}" for one, owner in owners.items())
        raise mixed("device_ids", kinds)


def check_types(needs: Needs, candidates: Sequence[Candidate]) -> None:
    """Enough devices in this host, but not of one type: say so, instead of that each type is too small.

    Raises PlanError.
    """
    if needs.workers == 1 or needs.device_ids is not None:
        return
    sizes = [(one, sum(device.max_workers for device in one.devices)) for one in candidates]
    if sum(size for _, size in sizes) >= needs.workers > max((size for _, size in sizes), default=0):
        found = "; ".join(f"{size} of {_kind(one, one.devices[0].id)}" for one, size in sizes if size)
        raise mixed(f"tensor_parallel_size {needs.workers}", found)


def mixed(on: str, found: str) -> PlanError:
    """The error for workers on devices of several types."""
    return PlanError("Devices of several types", on=on, found=found, expected=ONE_TYPE, fix=BEHIND_A_ROUTER)


def _kind(candidate: Candidate, device_id: str) -> str:
    device = next(one for one in candidate.devices if one.id == device_id)
    return f"{candidate.manifest.name} {device.architecture}"
