"""The vendors' process groups (RCCL, XCCL, HCCL, with NCCL's interface) over torch's gloo, between processes of this host.

A collective runs as soon as it is launched, after what was queued before it: another process waits for it, which a device that
works when somebody waits would never hear of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, distributed

TIMEOUT = timedelta(minutes=5)


class _Options:
    """What a caller may set; the time limit counts."""

    def __init__(self) -> None:
        self._timeout = TIMEOUT


def group_type(native: ModuleType, library: str) -> type:
    """A class like torch.distributed.ProcessGroupNCCL; ``library`` goes before the name of what is launched."""

    class Group:
        """Ranks of one group."""

        Options = _Options

        def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
            gloo: Any = distributed.ProcessGroupGloo
            given = options if isinstance(options, _Options) else _Options()
            self._host = gloo(store, rank, size, given._timeout)

        def rank(self) -> int:
            """Of this process."""
            return int(self._host.rank())

        def size(self) -> int:
            """Number of ranks."""
            return int(self._host.size())

        def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> Any:
            """Sum of one tensor over the ranks, in place. Raises RuntimeError for another reduction."""
            (x,) = tensors
            if options is not None and options.reduceOp != distributed.ReduceOp.SUM:
                raise RuntimeError("a reduction other than the sum is not simulated")
            if not x.is_contiguous():
                raise RuntimeError("Tensors must be contiguous")

            host = self._host

            def work(x: Tensor) -> None:
                host.allreduce([x]).wait()

            return self._launch("allreduce", work, x)

        def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: Any = None) -> Any:
            """One tensor of each rank, in each of them."""
            (parts,), (x,), host = outputs, inputs, self._host

            def work(x: Tensor, *parts: Tensor) -> None:
                host.allgather([list(parts)], [x]).wait()

            return self._launch("allgather", work, x, *parts)

        def abort(self) -> None:
            """End: gloo's threads end with its group's last reference, which work under way may have."""
            self._host = None

        def _launch(self, name: str, work: Callable[..., None], *tensors: Tensor) -> Any:
            def body() -> None:
                work(*map(native.memory, tensors))

            native.launch(tensors[0].device.index, f"{library}::{name}", body, True)
            return SimpleNamespace(wait=lambda: True)

    return Group
