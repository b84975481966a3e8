"""Run the kernels as SPIR-V on Intel's OpenCL runtime for processors, against core's references: prints what differs.

    spirv_on_cpu.py OP,OP... DTYPE,DTYPE... [CLASS,CLASS...]    classes of shapes, `all` of the op's if left out

Intel's Triton compiles them for a GPU without DPAS; the runtime of the distribution intel-opencl-rt makes x86 code of the
modules and runs it on the tensors' own memory. Tiles are smaller than a chip's: without DPAS a product is unrolled, and a
program's lanes share what is left. It needs triton-xpu, pyopencl and intel-opencl-rt (`nox -s
xpu-kernels`).
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from triton.backends.compiler import GPUTarget

from vllm_core.api import DeviceFacts, load_entry
from vllm_core.ops.check import Provider, mismatches
from vllm_core.ops.inputs import SHAPE_CLASSES
from vllm_triton import tuning
from vllm_triton.offers import kv_layout
from vllm_triton.offline import OfflineDriver
from vllm_xpu.backends import offers as backend
from vllm_xpu.backends.families import family_of
from vllm_xpu.machine_code import device_facts, register_backend

ARCHITECTURE, LANES = "pvc", 32
CAPABILITY, EXTENSION, EXECUTION_MODE = 17, 10, 16
KERNEL_ATTRIBUTES = 5892
"""SPIR-V capability and extension SPV_INTEL_kernel_attributes: hints for a GPU, which this runtime refuses."""
MODES = range(5893, 5897)
TILES = {
    "extend": tuning.Extend(16, 16, 8, 1),
    "extend_wide": tuning.Extend(16, 16, 8, 1),
    "decode": tuning.Decode(16, 8, 1, 4),
    "one_row": lambda rows, columns: tuning.OneRow(4, 64, 1),
    "few_rows": lambda count, rows, columns, gated: tuning.FewRows(16, 16, 16, 1, 1, 1, 0),
    "grouped": lambda mean, rows, columns, gated: tuning.Grouped(16, 16, 16, 1, 1),
}
"""With these a module is built in a minute at most, and not in a quarter of an hour."""
SCALARS = {"i1": np.int8, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "fp32": np.float32}
"""Scalar arguments by Triton's names of types."""


def portable(module: bytes) -> bytes:
    """The module without what only GPUs know (SPIR-V specification, "Physical Layout": an instruction's length comes first)."""
    words = struct.unpack(f"<{len(module) // 4}I", module)
    kept = list(words[:5])
    for instruction in _instructions(words[5:]):
        operation, first = instruction[0] & 0xFFFF, instruction[1] if len(instruction) > 1 else 0
        text = struct.pack(f"<{len(instruction) - 1}I", *instruction[1:])
        drop = (
            (operation == CAPABILITY and first == KERNEL_ATTRIBUTES)
            or (operation == EXTENSION and text.startswith(b"SPV_INTEL_kernel_attributes"))
            or (operation == EXECUTION_MODE and instruction[2] in MODES)
        )
        kept += [] if drop else instruction
    return struct.pack(f"<{len(kept)}I", *kept)


def _instructions(words: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    at = 0
    while at < len(words):
        length = words[at] >> 16
        yield words[at : at + length]
        at += length


def open_runtime() -> Any:
    """pyopencl, made to find the runtime of intel-opencl-rt and no other."""
    files = metadata.distribution("intel-opencl-rt").files or ()
    library = next(Path(str(one.locate())).resolve() for one in files if one.name == "libintelocl.so")
    folder = tempfile.mkdtemp(prefix="vllm-xpu-icd-")
    Path(folder, "intel.icd").write_text(f"{library}\n")
    os.environ["OCL_ICD_VENDORS"] = folder
    import pyopencl

    return pyopencl


class Processor(OfflineDriver):
    """A device of Triton's that runs what it is given."""

    def __init__(self, target: GPUTarget) -> None:
        super().__init__(target, 64 << 10)
        self._cl = open_runtime()
        (device,) = self._cl.get_platforms()[0].get_devices()
        assert device.type & self._cl.device_type.CPU
        capabilities = device.svm_capabilities
        assert capabilities & self._cl.device_svm_capabilities.FINE_GRAIN_SYSTEM, "kernels read the tensors' own memory"
        self._context = self._cl.Context([device])
        self._queue = self._cl.CommandQueue(self._context)
        self._kernels: list[Any] = []
        self.utils.load_binary = self._load  # type: ignore[method-assign]
        self.ran: dict[str, int] = {}

    def _load(self, name: str, binary: bytes, shared: int, *rest: object) -> tuple[int, ...]:
        program = self._cl.Program(self._context, portable(binary)).build()
        self._kernels.append((self._cl.Kernel(program, name), shared))
        return (1, len(self._kernels) - 1, 0, 0)

    def launcher_cls(self, source: Any, compiled: Any) -> Any:
        """A launcher that runs it, and waits."""
        kinds = [source.signature[name] for name in source.fn.arg_names]
        items = int(compiled.num_warps) * int(compiled.threads_per_warp)
        name = source.fn.__name__

        def launch(x: int, y: int, z: int, stream: object, function: int, *rest: Any) -> None:
            kernel, shared = self._kernels[function]
            given = [(kind, value) for kind, value in zip(kinds, rest[-len(kinds) :], strict=True) if kind != "constexpr"]
            for place, (kind, value) in enumerate(given):
                kernel.set_arg(place, self._argument(kind, value))
            for place in range(len(given), kernel.num_args):
                kernel.set_arg(place, self._cl.LocalMemory(max(shared, 16)))
            self._cl.enqueue_nd_range_kernel(self._queue, kernel, (x * items, y, z), (items, 1, 1))
            self._queue.finish()
            self.ran[name] = self.ran.get(name, 0) + 1

        return launch

    def _argument(self, kind: str, value: Any) -> Any:
        if kind.startswith("*"):
            left = value.untyped_storage().nbytes() - value.storage_offset() * value.element_size()
            return self._cl.SVM((ctypes.c_char * left).from_address(value.data_ptr()))
        return SCALARS[kind](value)


def main(ops: list[str], dtypes: list[str], classes: list[str]) -> int:
    """Returns the exit status: 1 where something differs."""
    register_backend()
    plain = {"has_subgroup_matrix_multiply_accumulate": False, "has_subgroup_2d_block_io": False}
    target = {**device_facts(ARCHITECTURE), **plain, "has_bfloat16_conversions": False}
    driver = Processor(GPUTarget("xpu", target, LANES))
    driver.install()
    family = family_of(ARCHITECTURE)
    assert family is not None
    tuning.use(replace(family.tuning, **TILES), 4)
    facts = DeviceFacts(id="0", name="", device_type="xpu", architecture=ARCHITECTURE, memory_kind="discrete", memory_bytes=1)
    mine = [one for one in backend.offers(facts) if one.provider == backend.PROVIDER]
    provider = Provider({name: load_entry(entry) for one in mine for name, entry in one.ops.items()}, kv_layout)
    chosen = {op: SHAPE_CLASSES[op] if classes == ["all"] else classes for op in ops}
    cases = [(op, dtype, 0, shape) for op in ops for dtype in dtypes for shape in chosen[op]]
    wrong = [(case, line) for case in cases for line in mismatches(case[0], provider, case[1], case[2], case[3])]
    for case, line in wrong:
        print(*case, line)
    print(
        f"{len(cases)} cases, {len(wrong)} differences, {sum(driver.ran.values())} launches of {', '.join(sorted(driver.ran))}"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    names, kinds, classes = (*sys.argv[1:], "all")[:3]
    sys.exit(main(names.split(","), kinds.split(","), classes.split(",")))
