"""All layers of a dense decoder by `kernels/flat.cu`: its source for a form, and its launch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from torch import Tensor

from vllm_cuda.decode import LOG2E
from vllm_cuda.flat_tiles import WORD_BYTES, WORDS_BYTES, Form
from vllm_cuda.launch import stream_of
from vllm_cuda.programs import Program, defined, kernel_of
from vllm_triton.ops.launch import Scratch

FILES = ("chip.cuh", "hopper.cuh", "flat_words.cuh", "flat.cuh", "flat_attend.cuh", "flat.cu")

_WORDS = Scratch(WORDS_BYTES, zero=True)
_EPOCH = Scratch(WORD_BYTES, zero=True)


class _Given(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("layers", "residual", "cos_sin", "positions", "seq_lens", "block_table", "slots")
        ),
        *((name, ctypes.c_void_p) for name in ("qkv", "middle", "inner", "attended", "out", "parts", "epoch")),
        ("block_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("count", "table_stride")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """A step's: int32 positions and lengths [S], int32 block table [S,B], int64 slots [S]."""

    positions: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slots: Tensor


@lru_cache(maxsize=256)
def program_of(form: Form) -> Program:
    """What is compiled for a form."""
    values = defined(
        H=form.hidden,
        INNER=form.inner,
        HQ=form.heads,
        HK=form.kv_heads,
        D=form.head_size,
        LAYERS=form.layers,
        NORM=form.norm,
        TPB=form.tokens_per_block,
        ROWS=form.rows,
        GRID=form.programs,
        WARPS=form.work.warps,
        BRINGERS=form.work.bringers,
        FLYING=form.work.flying * form.work.bringers,
        STAGES=form.stages,
        SPAN=form.work.span,
        DEEP=form.work.deep,
        SHARED=form.shared_bytes,
    )
    return Program("flat", FILES, ("--gpu-architecture=sm_90a", "--std=c++17", *values), form.shared_bytes)


def given_of(
    residual: Tensor,
    layers: Tensor,
    cos_sin: Tensor,
    rows: Rows,
    block_stride: int,
    eps: float,
    scale: float,
    form: Form,
    told: int,
    epoch: int,
) -> ctypes.Structure:
    """What the kernel is given; ``told`` and ``epoch`` are addresses of `Form.words` words of 8 bytes and of one."""
    return _Given(
        *(one.data_ptr() for one in (layers, residual, cos_sin, rows.positions, rows.seq_lens, rows.block_table, rows.slots)),
        *(told + WORD_BYTES * before for before in accumulate(form.words[:-1], initial=0)),
        epoch,
        block_stride,
        len(residual),
        rows.block_table.stride(0),
        eps,
        scale * LOG2E,
    )


def launch(
    residual: Tensor, layers: Tensor, cos_sin: Tensor, rows: Rows, block_stride: int, eps: float, scale: float, form: Form
) -> None:
    """Queue it on the current stream: residual [S,H], contiguous bfloat16, S at most ``form.rows``.

    layers, int64 [layers, 9], are addresses: weights of q, k and v, of the output, of gate and up, of down; norms of the input,
    of the MLP's, of q and k; the layer's blocks, ``block_stride`` elements apart.
    """
    kernel = kernel_of(program_of(form), residual.get_device())
    if kernel is None:
        return
    memory = _WORDS.get(residual.device).data_ptr(), _EPOCH.get(residual.device).data_ptr()
    given = given_of(residual, layers, cos_sin, rows, block_stride, eps, scale, form, *memory)
    stream = stream_of(residual.get_device())
    kernel.launch(form.programs, form.threads, 1, stream, given, dependent=False, together=True)
