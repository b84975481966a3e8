"""What the vendors' own runtimes answer for each chip that can be posed as. Plain data, from public documentation.

NPU: CANN "get_soc_version" and `npu-smi info`; HIP: LLVM's AMDGPU user guide and the products' data sheets; XPU: Intel's
data sheets. Memory is the simulator's, not the chip's: see `vllm_simulator.settings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

POSES = ("npu", "hip", "xpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One chip: `properties` are the fields of the vendor's device properties, beside name and memory."""

    pose: str
    name: str
    properties: Mapping[str, Any] = field(default_factory=dict)


def _hip(name: str, arch: str, **more: Any) -> Chip:
    known = {"gcnArchName": arch, "warp_size": 64, "shared_memory_per_block": 65536, "is_integrated": False, **more}
    return Chip(pose="hip", name=name, properties=MappingProxyType(known))


def _xpu(name: str, **more: Any) -> Chip:
    known = {
        "type": "gpu",
        "vendor": "Intel(R) Corporation",
        "platform_name": "Intel(R) oneAPI Unified Runtime over Level-Zero",
        "driver_version": "1.6.33578+11",
        "version": "Intel(R) oneAPI",
        "max_work_group_size": 1024,
        "has_fp16": True,
        "has_fp64": True,
        "has_atomic64": True,
        "is_integrated": False,
        "local_mem_size": 65536,
        **more,
    }
    return Chip(pose="xpu", name=name, properties=MappingProxyType(known))


CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        "910B3": Chip(
            pose="npu",
            name="Ascend910B3",
            properties={"soc_version": 223, "smi_name": "910B3", "cube_core_num": 20, "vector_core_num": 40},
        ),
        "910C": Chip(
            pose="npu",
            name="Ascend910_9391",
            properties={"soc_version": 251, "smi_name": "Ascend910", "cube_core_num": 24, "vector_core_num": 48},
        ),
        "gfx90a": _hip(
            "AMD Instinct MI250X", "gfx90a:sramecc+:xnack-", major=9, minor=0, multi_processor_count=110, L2_cache_size=8 << 20
        ),
        "gfx942": _hip(
            "AMD Instinct MI300X", "gfx942:sramecc+:xnack-", major=9, minor=4, multi_processor_count=304, L2_cache_size=4 << 20
        ),
        "gfx950": _hip(
            "AMD Instinct MI350X",
            "gfx950:sramecc+:xnack-",
            major=9,
            minor=5,
            multi_processor_count=256,
            L2_cache_size=4 << 20,
            shared_memory_per_block=163840,
        ),
        "gfx1100": _hip(
            "AMD Radeon RX 7900 XTX",
            "gfx1100",
            major=11,
            minor=0,
            multi_processor_count=48,
            warp_size=32,
            L2_cache_size=6 << 20,
        ),
        "gfx1201": _hip(
            "AMD Radeon RX 9070 XT", "gfx1201", major=12, minor=0, multi_processor_count=32, warp_size=32, L2_cache_size=8 << 20
        ),
        "pvc": _xpu(
            "Intel(R) Data Center GPU Max 1550",
            device_id=0x0BD5,
            gpu_eu_count=1024,
            gpu_subslice_count=128,
            max_compute_units=1024,
            sub_group_sizes=[16, 32],
            local_mem_size=131072,
        ),
        "bmg": _xpu(
            "Intel(R) Arc(TM) B580 Graphics",
            device_id=0xE20B,
            gpu_eu_count=160,
            gpu_subslice_count=20,
            max_compute_units=160,
            sub_group_sizes=[16, 32],
            local_mem_size=131072,
        ),
        "dg2": _xpu(
            "Intel(R) Arc(TM) A770 Graphics",
            device_id=0x56A0,
            gpu_eu_count=512,
            gpu_subslice_count=32,
            max_compute_units=512,
            sub_group_sizes=[8, 16, 32],
            has_fp64=False,
        ),
        "lnl": _xpu(
            "Intel(R) Arc(TM) Graphics",
            device_id=0x64A0,
            gpu_eu_count=64,
            gpu_subslice_count=8,
            max_compute_units=64,
            sub_group_sizes=[16, 32],
            is_integrated=True,
            local_mem_size=131072,
        ),
    }
)
"""All chips by the name that `Settings.chip` takes."""

DEFAULT_CHIP: Mapping[str, str] = MappingProxyType({"npu": "910B3", "hip": "gfx942", "xpu": "pvc"})
