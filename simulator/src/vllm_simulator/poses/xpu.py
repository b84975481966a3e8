"""`torch.xpu` of torch's XPU build."""

from __future__ import annotations

from pathlib import Path

import torch

from vllm_simulator.poses.collectives import group_type
from vllm_simulator.poses.device_api import DeviceApi, open_device
from vllm_simulator.settings import Settings

LOST = "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"


def become(package: str) -> None:
    """Make torch's module what an XPU build has. ``package`` lies beside settings.json."""
    settings = Settings.read(Path(package).parent / "settings.json")
    native = open_device(settings, "XPU", "xpu", LOST)
    api = DeviceApi(native, settings, "xpu")
    fields = settings.data.properties
    more = {
        "get_device_capability": lambda device=None: dict(fields),
        "is_bf16_supported": lambda including_emulation=True: True,
        "_queued_calls": [],
    }
    for name, value in {**api.functions(), **more}.items():
        setattr(torch.xpu, name, value)
    torch.version.xpu = "20250301"
    # torch's own class for the vendor's collectives, which other builds of torch lack.
    vars(torch.distributed)["ProcessGroupXCCL"] = group_type(native, "xccl")
    if settings.interpret:
        from vllm_simulator import kernels

        kernels.install(native, "xpu")
