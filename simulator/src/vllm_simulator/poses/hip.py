"""`torch.cuda` of torch's HIP build, with the chip's architecture and wave size as data."""

from __future__ import annotations

from pathlib import Path

import torch

from vllm_simulator.poses.collectives import group_type
from vllm_simulator.poses.device_api import DeviceApi, graph_functions, open_device
from vllm_simulator.settings import Settings

HIP_VERSION = "7.0.51831"
LOST = "HIP error: the device was lost: unspecified launch failure (hipErrorLaunchFailure)"


def become(package: str) -> None:
    """Make torch's module what a HIP build has. ``package`` lies beside settings.json."""
    settings = Settings.read(Path(package).parent / "settings.json")
    native = open_device(settings, "CUDA", "cuda", LOST)
    api = DeviceApi(native, settings, "cuda")
    properties = settings.data.properties
    more = {
        **graph_functions(native, "CUDAGraph"),
        "get_device_capability": lambda device=None: (properties["major"], properties["minor"]),
        "get_arch_list": lambda: [properties["gcnArchName"].partition(":")[0]],
        "is_bf16_supported": lambda including_emulation=True: True,
        "_queued_calls": [],
    }
    for name, value in {**api.functions(), **more}.items():
        setattr(torch.cuda, name, value)
    torch.version.hip, torch.version.cuda = HIP_VERSION, None
    # torch's own class for the vendor's collectives, which other builds of torch lack.
    vars(torch.distributed)["ProcessGroupNCCL"] = group_type(native, "rccl")
    if settings.interpret:
        from vllm_simulator import kernels

        kernels.install(native, "cuda")
