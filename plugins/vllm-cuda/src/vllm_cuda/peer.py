"""Memory of this rank that the other ranks of a host write to: for sums so small that latency is all.

CUDA driver API, "Unified Addressing" and "Memory Management" (inter-process handles).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from vllm_cuda.driver import Driver
from vllm_triton.ops.reduce import EMPTY, Mailboxes, mailbox_bytes

HANDLE_BYTES = 64
SLOT_BYTES = 1 << 20
"""Most bytes of a sum that goes this way: beyond, bandwidth decides, and NCCL uses more of it."""

_LAZY_PEER_ACCESS = 1


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


def open_mailboxes(
    rank: int, world_size: int, exchange: Callable[[bytes], list[bytes]]
) -> tuple[dict[int, Mailboxes], Callable[[], None]]:
    """Allocate this rank's memory and map that of the others: mailboxes by bytes of an element.

    ``exchange`` gives every rank's bytes, in the order of ranks. Also returns what ends a wait that will never be answered.
    Raises DriverError where a peer's memory cannot be mapped.
    """
    driver, device = Driver(), torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize(device)  # the device's context is now this thread's
    area = mailbox_bytes(world_size, SLOT_BYTES)
    mine = ctypes.c_uint64()
    driver.call("cuMemAlloc_v2", ctypes.byref(mine), ctypes.c_size_t(area * len(EMPTY)))
    for index, word in enumerate(EMPTY.values()):
        at = ctypes.c_uint64(mine.value + index * area)
        driver.call("cuMemsetD32_v2", at, ctypes.c_uint(word & 0xFFFFFFFF), ctypes.c_size_t(area // 4))
    torch.cuda.synchronize(device)
    handle = _IpcHandle()
    driver.call("cuIpcGetMemHandle", ctypes.byref(handle), mine)
    bases = []
    for other, theirs in enumerate(exchange(ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES))):
        base = mine
        if other != rank:
            ctypes.memmove(ctypes.byref(handle), theirs, HANDLE_BYTES)
            base = ctypes.c_uint64()
            driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(base), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
        bases.append(base.value)
    stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    boxes = {
        item_bytes: Mailboxes(
            rank=rank,
            world_size=world_size,
            slot_bytes=SLOT_BYTES,
            item_bytes=item_bytes,
            bases=torch.tensor([base + index * area for base in bases], dtype=torch.int64, device=device),
            stop=stop,
        )
        for index, item_bytes in enumerate(EMPTY)
    }

    def end() -> None:
        stop.fill_(1)

    return boxes, end
