"""Memory of this rank that the other ranks of a host write to.

It is mapped once, before any step is captured, and kernels know it by its addresses alone: no tensor of a step is shared, so
that nothing has to be registered with the peers after a capture, and memory of steps may move (sleep).

CUDA driver API, "Unified Addressing" and "Memory Management" (inter-process handles).
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from functools import cache

import torch

from vllm_cuda.driver import Driver, DriverError
from vllm_triton.ops.reduce import EMPTY, Mailboxes, mailbox_bytes

log = logging.getLogger("vllm_core")

HANDLE_BYTES = 64

CHECK_BYTES = 1 << 20
"""Of the first copy between two GPUs, which is compared: some hosts report access and lose what is written."""

GRACE_S = 5.0
"""How long mailboxes stay when their group is closed: a step that was being launched while a peer died still comes."""

_LAZY_PEER_ACCESS = 1


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


@cache
def why_not_direct(here: torch.device, there: torch.device) -> str:
    """Why copies from one GPU to the other go through the host; empty where they go directly. Looked at once a pair."""
    if here == there:
        return ""
    if not torch.cuda.can_device_access_peer(there, here):
        return f"the driver reports no access between {here} and {there}"
    sent = torch.randint(0, 256, (CHECK_BYTES,), dtype=torch.uint8)
    wrong = changed(sent, sent.to(here).to(there).cpu())
    if wrong:
        reason = f"{wrong} of {CHECK_BYTES} bytes arrived changed from {here} at {there}"
        log.warning("Copies between GPUs go through the host: %s", reason)
        return reason
    return ""


def changed(sent: torch.Tensor, arrived: torch.Tensor) -> int:
    """How many elements differ."""
    return int((sent != arrived).sum())


def open_mailboxes(
    rank: int, world_size: int, exchange: Callable[[bytes], list[bytes]]
) -> tuple[Mailboxes, Callable[[], None]]:
    """Allocate this rank's memory and map that of the others.

    ``exchange`` gives every rank's bytes, in the order of ranks. Also returns what ends a wait that will never be answered.
    Raises DriverError where a peer's memory cannot be mapped.
    """
    driver, device = Driver(), torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize(device)  # the device's context is now this thread's
    area = mailbox_bytes(world_size)
    mine = ctypes.c_uint64()
    driver.call("cuMemAlloc_v2", ctypes.byref(mine), ctypes.c_size_t(area))
    driver.call("cuMemsetD32_v2", mine, ctypes.c_uint(EMPTY & 0xFFFFFFFF), ctypes.c_size_t(area // 4))
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

    def give_back() -> None:
        time.sleep(GRACE_S)
        try:
            torch.cuda.set_device(device)
            torch.cuda.synchronize(device)
            for other, base in enumerate(bases):
                if other != rank:
                    driver.call("cuIpcCloseMemHandle", ctypes.c_uint64(base))
            driver.call("cuMemFree_v2", mine)
        except (DriverError, RuntimeError) as error:
            # The process or its device ends, and the memory with it.
            log.debug("Mailboxes of rank %d were not given back: %s", boxes.rank, error)

    def end() -> None:
        stop.fill_(1)
        # Whoever calls may be what the device waits for.
        threading.Thread(target=give_back, name="mailboxes", daemon=True).start()

    boxes = Mailboxes(rank=rank, world_size=world_size, bases=torch.tensor(bases, dtype=torch.int64, device=device), stop=stop)
    return boxes, end
