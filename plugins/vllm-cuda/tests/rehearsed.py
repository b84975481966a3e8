"""What an engine on an H200 that is not here would have compiled: at its rehearsal, in warm-up, and while it serves.

Prints JSON: the variants of kernels asked for in each, by kernel. Launches are noted by Triton's hook and run nothing; tensors
lie in host memory. A process of its own: Triton's driver is one a process.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from triton.backends.compiler import GPUTarget

from vllm_core import launch
from vllm_core.api import POOLS, Device, DeviceFacts, Eager, MemoryStats
from vllm_core.engine import construct
from vllm_core.engine.binding import BoundOps
from vllm_core.engine.core import EngineCore
from vllm_core.engine.messages import EngineRequest
from vllm_core.registry.snapshot import FORMAT, SavedPlatform, Snapshot, manifest_data
from vllm_core.sampling_params import SamplingParams
from vllm_cuda import platform, plugin, programs
from vllm_triton import ahead
from vllm_triton.offline import OfflineDriver

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 5000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
# Of more rows the head's product is torch's in a form that the host does not have.
OPTIONS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_num_seqs": 32,
    "max_model_len": 700,
    "kv_cache_memory_bytes": 8 << 20,
    "graph_sizes": [1, 2, 4, 8, 16, 24],
    "platform": "cuda",
}
H200 = DeviceFacts(
    id="GPU-0",
    name="NVIDIA H200",
    device_type="cuda",
    architecture="sm_90",
    memory_kind="discrete",
    memory_bytes=140 << 30,
    properties={"index": "0", "multiprocessors": "132"},
)


class _Event:
    def record(self) -> None: ...

    def wait(self) -> None: ...

    def query(self) -> bool:
        return True


class _Graph:
    def replay(self) -> None: ...


class HostDevice(Device):
    """Tensors of the host; what ops launch is noted."""

    facts = H200
    torch_device = "cpu"
    eager = Eager("full")
    asynchronous = True
    stable_addresses = False
    supports_graphs = True

    def __init__(self) -> None:
        self.asked: dict[str, ahead.Rehearsed] = {}
        self.programs: dict[str, dict[programs.Program, Any]] = {}

    def allocate(self, pool: Any, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def adopt(self, pool: Any, host: torch.Tensor) -> torch.Tensor:
        return host

    def release(self, pool: Any) -> int:
        return 0

    def pinned(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def statistics(self) -> MemoryStats:
        return MemoryStats(1 << 40, 1 << 40, dict.fromkeys(POOLS, 0), 0)

    def synchronize(self) -> None: ...

    def event(self) -> _Event:
        return _Event()

    def seed(self, value: int) -> None: ...

    def capture(self, work: Any) -> _Graph:
        work()
        return _Graph()

    def rehearsal(self, providers: frozenset[str]) -> Any:
        return self.noting("rehearsal")

    @contextmanager
    def noting(self, phase: str) -> Iterator[None]:
        with ahead.rehearsal(jobs=0) as self.asked[phase], programs.rehearsal():
            # Kernels in CUDA C++, which are compiled where Triton's are noted alone.
            self.programs[phase] = programs._rehearsed[-1][1]
            yield


def design(folder: Path) -> launch.Blueprint:
    """The decision for an H200, from what `doctor` would have saved of it."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    saved = SavedPlatform(
        manifest=manifest_data(plugin.manifest()),
        distribution="vllm-cuda",
        version="0",
        entry_point="cuda",
        devices=(H200,),
        checks=(),
    )
    probe = folder / "probe.json"
    probe.write_bytes(
        msgspec.json.encode(Snapshot(format=FORMAT, core_version="", host={}, platforms=(saved,), failed=(), steps={}))
    )
    return launch.blueprint({**OPTIONS, "model": str(folder)}, probe=probe)


def serve(core: EngineCore, lengths: list[int], count: int, **params: Any) -> None:
    for number, length in enumerate(lengths):
        core.add(
            EngineRequest(
                request_id=str(number),
                prompt_token_ids=[(7 * number + i) % 5000 for i in range(length)],
                arrival_time=0.0,
                params=SamplingParams(**params),
                max_tokens=count,
            )
        )
    while core.has_work:
        core.step()


def main() -> None:
    OfflineDriver(GPUTarget("cuda", 90, 32)).install()
    platform.start(H200)
    device = HostDevice()
    with tempfile.TemporaryDirectory() as folder:
        made = design(Path(folder))
        real = construct.warm_up

        def noted(*arguments: Any) -> None:
            # The rehearsal's own steps are noted already.
            with device.noting("warm-up"):
                real(*arguments)

        construct.warm_up = noted
        core, _ = construct.build_core(made, device, BoundOps(made.plan.bindings), {})
    with device.noting("serving"):
        serve(core, [128], 3, temperature=0.0)
        serve(core, [1, 2, 3, 5, 17, 31, 33, 63], 4, temperature=0.6)
        serve(core, [30 + 13 * i for i in range(24)], 5, temperature=0.6)
        serve(core, [300, 16, 640], 3, temperature=0.9, top_p=0.9, top_k=20)
        serve(core, [19, 64], 3, temperature=0.7, repetition_penalty=1.2, logprobs=1)
    known = {one.mark for one in device.asked["rehearsal"].asked}
    for phase, found in device.asked.items():
        names = Counter(one.name for one in found.asked if phase == "rehearsal" or one.mark not in known)
        rehearsed = device.programs["rehearsal"] if phase != "rehearsal" else {}
        names.update(one.function for one in device.programs[phase] if one not in rehearsed)
        print(json.dumps({"phase": phase, "asked": len(found.asked), "variants": names}))


if __name__ == "__main__":
    main()
    sys.exit()
