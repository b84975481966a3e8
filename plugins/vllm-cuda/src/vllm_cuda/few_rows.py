"""The product of few rows of `kernels/few_rows.cu`: its source for a tile, its launch, and the rehearsal of launches."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib import resources

import torch
from torch import Tensor

from vllm_cuda.launch import Kernel, TensorMap, tensor_map
from vllm_cuda.nvrtc import compiled
from vllm_cuda.tiles import DEPTH, GATED, Form

log = logging.getLogger(__name__)

COMPILERS = 8
"""Most forms that a rehearsal compiles at once."""

_rehearsed: list[tuple[ThreadPoolExecutor, dict[Form, Future[bytes]]]] = []


def source_of(form: Form) -> str:
    """The kernel's text, after what it is written in, and the matrix instruction of its tile."""
    folder = resources.files("vllm_cuda").joinpath("kernels")
    common, text = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("hopper.cuh", "few_rows.cu"))
    return "\n".join((common, _multiply(form.tile.rows), text))


def options_of(form: Form) -> tuple[str, ...]:
    """Compiler options of a form."""
    tile = form.tile
    values = {
        "ROWS": tile.rows,
        "BANDS": form.bands,
        "CLUSTER": tile.cluster,
        "STAGES": tile.stages,
        "X_STAGES": tile.x_stages,
        "EPILOGUE": form.epilogue,
        "KIND": form.kind,
        "BIAS": int(form.bias),
        "WIDE_OUT": int(form.wide_out),
    }
    return ("--gpu-architecture=sm_90a", "--std=c++17", *(f"-D{name}={value}" for name, value in values.items()))


def _multiply(rows: int) -> str:
    """``multiply``: sum [64, rows] += a [64, 16] @ b [rows, 16].T, both in shared memory."""
    count = rows // 2
    registers = ", ".join(f"%{index}" for index in range(count))
    operands = ", ".join(f'"+f"(sum[{index}])' for index in range(count))
    return (
        f"__device__ __forceinline__ void multiply(float (&sum)[{count}], u64 a, u64 b) {{\n"
        f'asm volatile("wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16 {{{registers}}}, %{count}, %{count + 1}, '
        f'1, 1, 1, 0, 0;" : {operands} : "l"(a), "l"(b));\n}}\n'
    )


def _binary(form: Form) -> bytes:
    return compiled(source_of(form), options_of(form))


@cache
def _kernel_of(form: Form, device: int) -> Kernel:
    with torch.cuda.device(device):
        return Kernel(_binary(form), "few_rows", form.shared_bytes)


@contextmanager
def rehearsal() -> Iterator[None]:
    """Launch nothing inside; on leaving, what would have been launched is compiled, or fails again where it is launched."""
    forms: dict[Form, Future[bytes]] = {}
    with ThreadPoolExecutor(COMPILERS) as pool:
        _rehearsed.append((pool, forms))
        try:
            yield
        finally:
            _rehearsed.pop()
    for form, future in forms.items():
        error = future.exception()
        if error is not None:
            log.info("not compiled ahead: %s: %s", form, error)


@lru_cache(maxsize=4096)
def _map_of(address: int, rows: int, columns: int, stride: int, box_rows: int) -> TensorMap:
    return tensor_map(address, rows, columns, stride, box_rows, DEPTH)


def launch(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, form: Form, multiprocessors: int) -> None:
    """Queue it on the current stream: out [T,N] from x [T,K] and weight [N,K], or [2N,K] where gated, all contiguous.

    T is 1 to 64 per band. Rows of x and of the weight begin at multiples of 16 bytes; N is even. The weight must not be
    written by the kernel before: it is read before that one has ended.
    """
    if _rehearsed:
        pool, forms = _rehearsed[-1]
        if form not in forms:
            forms[form] = pool.submit(_binary, form)
        return
    count, columns = x.shape
    tile, halves = form.tile, 2 if form.epilogue == GATED else 1
    rows, box_rows, x_rows = weight.shape[0] // halves, tile.rows // halves, -(-count // 8) * 8
    tiles = -(-rows // box_rows)
    _kernel_of(form, x.get_device()).launch(
        tiles * tile.cluster if tile.cluster > 1 else min(tiles, multiprocessors),
        form.threads,
        tile.cluster,
        torch.cuda.current_stream(x.device).cuda_stream,
        _map_of(weight.data_ptr(), weight.shape[0], columns, columns, box_rows),
        _map_of(x.data_ptr(), count, columns, columns, x_rows),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_void_p(None if bias is None else bias.data_ptr()),
        ctypes.c_int(count),
        ctypes.c_int(rows),
        ctypes.c_int(-(-columns // DEPTH)),
        ctypes.c_int(tiles),
        ctypes.c_int(x_rows),
    )
