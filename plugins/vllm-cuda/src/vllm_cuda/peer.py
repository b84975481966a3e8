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
from collections.abc import Callable, Mapping
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
    Raises DriverError, on all ranks, where one has no memory for it; and where a peer's cannot be mapped.
    """
    driver, device = Driver(), torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize(device)  # the device's context is now this thread's
    bases = _bases(driver, rank, _offered(driver, mailbox_bytes(world_size)), exchange)
    stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def give_back() -> None:
        time.sleep(GRACE_S)
        try:
            torch.cuda.set_device(device)
            torch.cuda.synchronize(device)
            others = {other: base for other, base in enumerate(bases) if other != rank}
            _free(driver, rank, {**others, rank: bases[rank]})
        except (DriverError, RuntimeError) as error:
            # The process or its device ends, and the memory with it.
            log.debug("Mailboxes of rank %d were not given back: %s", boxes.rank, error)

    def end() -> None:
        stop.fill_(1)
        # Whoever calls may be what the device waits for.
        threading.Thread(target=give_back, name="mailboxes", daemon=True).start()

    boxes = Mailboxes(rank=rank, world_size=world_size, bases=torch.tensor(bases, dtype=torch.int64, device=device), stop=stop)
    return boxes, end


def _offered(driver: Driver, size_bytes: int) -> tuple[int, bytes] | DriverError:
    """Empty mailboxes: their address, and the handle by which other processes map them; or why there are none."""
    base, handle = ctypes.c_uint64(), _IpcHandle()
    try:
        driver.call("cuMemAlloc_v2", ctypes.byref(base), ctypes.c_size_t(size_bytes))
        try:
            driver.call("cuMemsetD32_v2", base, ctypes.c_uint(EMPTY & 0xFFFFFFFF), ctypes.c_size_t(size_bytes // 4))
            torch.cuda.synchronize()
            driver.call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        except DriverError:
            driver.call("cuMemFree_v2", base)
            raise
    except DriverError as error:
        return error
    return base.value, ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)


def _bases(
    driver: Driver, rank: int, mine: tuple[int, bytes] | DriverError, exchange: Callable[[bytes], list[bytes]]
) -> list[int]:
    """Addresses of all ranks' mailboxes. A rank that has none says so: the others wait for what it sends."""
    if isinstance(mine, DriverError):
        exchange(b"")
        raise mine
    bases, handles = {rank: mine[0]}, exchange(mine[1])
    without = [other for other, theirs in enumerate(handles) if not theirs]
    if without:
        # Every rank sees this, and none has mapped anything.
        _free(driver, rank, bases)
        raise DriverError(f"rank {without[0]} has no memory for mailboxes")
    try:
        for other, theirs in enumerate(handles):
            if other != rank:
                base, handle = ctypes.c_uint64(), _IpcHandle.from_buffer_copy(theirs)
                driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(base), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
                bases[other] = base.value
    except DriverError:
        # This rank's own stays: the others may have mapped it, and write to it.
        _free(driver, rank, {other: base for other, base in bases.items() if other != rank})
        raise
    return [bases[other] for other in range(len(handles))]


def _free(driver: Driver, rank: int, bases: Mapping[int, int]) -> None:
    """Give back mailboxes by rank: this one's are freed, the others' unmapped."""
    for other, base in bases.items():
        driver.call("cuMemFree_v2" if other == rank else "cuIpcCloseMemHandle", ctypes.c_uint64(base))
