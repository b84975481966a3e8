"""Options of the engines that serve one model side by side: the same for all, but for their devices. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm_core.config import EngineConfig
from vllm_core.errors import PlanError


def replica_options(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The options of each of the `data_parallel_size` engines: devices of one platform, as many for each as it has workers.

    Engines that share a device share its memory too. Raises VLLMCoreError where there are too few devices.
    """
    from vllm_core import launch
    from vllm_core.registry import candidates
    from vllm_core.registry.placement import place

    config = EngineConfig.from_options(options)
    count, workers = config.parallel.data_parallel_size, config.parallel.tensor_parallel_size
    own = {name: value for name, value in options.items() if name != "data_parallel_size"}
    if count == 1:
        return [own]
    named = config.platform.device_ids
    plan = launch.blueprint({name: value for name, value in own.items() if name != "device_ids"}).plan
    found, _ = candidates.collect(only=plan.platform, environ=os.environ)
    chosen = next(one for one in found if any(device.id == plan.device.id for device in one.devices))
    devices = [device for device in chosen.devices if named is None or device.id in named]
    needs = launch.needs_of(EngineConfig.from_options({**own, "tensor_parallel_size": 1}))
    places = place(replace(needs, workers=count * workers, device_ids=tuple(named) if named else None), devices)
    if isinstance(places, str):
        raise PlanError(
            "Too few devices for the engines",
            on=f"data_parallel_size {count}, tensor_parallel_size {workers}, platform {plan.platform}",
            found=places,
            expected=f"{count * workers} places",
            fix="lower --data-parallel-size, or make more devices visible",
        )
    ids = [device.id for device in places]
    parts = []
    for index in range(count):
        mine = list(dict.fromkeys(ids[index * workers : (index + 1) * workers]))
        part: dict[str, Any] = {**own, "platform": plan.platform, "device_ids": mine}
        sharers = max(ids.count(one) for one in mine) // workers if workers == 1 else 1
        if sharers > 1 and "device_memory_utilization" not in config.cache.model_fields_set:
            part["device_memory_utilization"] = config.cache.device_memory_utilization / sharers
        parts.append(part)
    return parts
