"""`torch_npu`: the device type npu, the module `torch.npu`, and the vendor's ops with the schemas of the published wheel."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

# The real package does the same: its own import must not lead back to it.
_autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch  # noqa: E402
from torch.utils.backend_registration import (  # noqa: E402
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

if _autoload is None:
    del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
else:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = _autoload

from vllm_simulator.installation import TORCH_NPU_VERSION  # noqa: E402
from vllm_simulator.npu import dispatch, formats, graphs  # noqa: E402
from vllm_simulator.poses.collectives import group_type  # noqa: E402
from vllm_simulator.poses.device_api import DeviceApi, open_device  # noqa: E402
from vllm_simulator.settings import Settings  # noqa: E402

LOST = "NPU function error: aclrtSynchronizeStream, error code is 507046: device task abort, the device is lost"


def become(name: str, package: str) -> None:
    """Fill the module ``name``, which stands for torch_npu, and register the device. ``package`` lies beside settings.json."""
    settings = Settings.read(Path(package).parent / "settings.json")
    native = open_device(settings, "PrivateUse1", "npu", LOST)
    rename_privateuse1_backend("npu")
    npu = ModuleType("torch_npu.npu")
    api = DeviceApi(native, settings, "npu")
    functions: dict[str, Any] = {
        **api.functions(),
        **graphs.functions(native),
        "get_soc_version": lambda: settings.data.properties["soc_version"],
        "is_bf16_supported": lambda: True,
    }
    for one, value in functions.items():
        setattr(npu, one, value)
    register: Any = torch._register_device_module
    register("npu", npu)
    sys.modules["torch_npu.npu"] = npu
    generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    module = sys.modules[name]
    ops = dispatch.register(native)
    public = {"__version__": TORCH_NPU_VERSION, "npu": npu, **ops, **formats.functions(native)}
    for one, value in public.items():
        setattr(module, one, value)
    collectives = SimpleNamespace(ProcessGroupHCCL=group_type(native, "hccl"))
    vars(module)["_C"] = SimpleNamespace(_distributed_c10d=collectives)
