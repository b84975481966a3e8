"""Launch a kernel again and again, on a driver that starts nothing, with tensors that say they are on a device: prints JSON.

A process of its own: Triton's driver is one a process.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from vllm_triton.kernels import norm
from vllm_triton.offline import OfflineDriver
from vllm_triton.ops.launch import Launch


class There(torch.Tensor):
    """Memory of the host that says it is a device's; of so many bytes as `num_bytes` says."""

    num_bytes = 0

    def get_device(self) -> int:
        return 0

    def untyped_storage(self) -> Any:
        return self

    def nbytes(self) -> int:  # type: ignore[override]
        return self.num_bytes

    size = nbytes  # type: ignore[assignment]


class Driver(OfflineDriver):
    """One that keeps the last launch, as Triton hands it over."""

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, stream: int, function: Any, packed: Any, *rest: Any) -> None:
            values = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in rest[3:]]
            self.last = {"programs": [x, y, z], "values": values, "hash": metadata.hash}

        return launch


def tensor(rows: int, dtype: torch.dtype = torch.float16, skip: int = 0) -> torch.Tensor:
    whole = torch.zeros(rows * 256 + skip, dtype=dtype)
    return whole[skip:].view(rows, 256).as_subclass(There)


def launch_of(row: int = 256) -> Launch:
    rows = {"out_outer": row, "out_inner": 0, "x_outer": row, "x_inner": 0}
    return Launch(norm.rms_norm, eps=1e-6, inner=1, SIZE=256, BLOCK=256, PDL=False, num_warps=1, **rows)


def main() -> None:
    driver = Driver(GPUTarget("cuda", 80, 32))
    driver.install()
    asked: list[int] = []
    norm.rms_norm.add_pre_run_hook(lambda *arguments, **options: asked.append(1))
    weight, launch = tensor(1, torch.float32)[0], launch_of()

    def go(one: Launch, out: torch.Tensor, x: torch.Tensor) -> dict[str, Any]:
        asked.clear()
        one.start((3, 1, 1), out, x, weight)
        return {**driver.last, "asked": bool(asked)}

    half, wide, odd = tensor(3), tensor(3, torch.float32), tensor(3, skip=1)
    answer: dict[str, Any] = {"first": go(launch, half, half), "second": go(launch, half, half)}
    answer |= {"dtype": go(launch, wide, wide), "alignment": go(launch, half, odd), "back": go(launch, half, half)}
    answer["strides"] = go(launch_of(255), half, half)
    triton.knobs.runtime.jit_cache_hook = lambda **event: None
    answer["hooked"] = go(launch, half, half)
    triton.knobs.runtime.jit_cache_hook = None
    here = [one.as_subclass(torch.Tensor) for one in (half, half, weight)]
    answer["host"] = []
    for _ in range(2):
        asked.clear()
        launch.start((3, 1, 1), *here)
        answer["host"].append(bool(asked))
    norm.rms_norm.device_caches.clear()
    Driver(GPUTarget("hip", "gfx942", 64)).install()
    other, answer["sized"] = launch_of(), []
    for num_bytes in (0, 0, 0, 1 << 31, 1 << 31, 0):
        There.num_bytes = num_bytes
        asked.clear()
        other.start((3, 1, 1), half, half, weight)
        answer["sized"].append(bool(asked))
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
