"""What every vendor's `torch.<device>` module has: devices, memory, streams, events, graphs, seeds, on the simulated device."""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from vllm_simulator import extension
from vllm_simulator.settings import Settings

LOG = "SIMULATOR_LOG"
"""Variable with a file's name: each process appends how often it launched which op, as a line of JSON."""


def open_device(settings: Settings, key: str, kind: str, when_lost: str) -> ModuleType:
    """Load the compiled device and set it up as torch's ``kind``, with the failures that were ordered."""
    native = extension.load(key)
    native.install(kind, settings.devices, settings.memory_bytes, settings.blocking, when_lost)
    for fault in settings.faults:
        if fault.kind == "oom":
            native.fail_allocation(fault.number)
        else:
            native.fail_launch(fault.kind, fault.op, fault.number)
    if LOG in os.environ:
        atexit.register(_write_log, native, Path(os.environ[LOG]))
    return native


def _write_log(native: ModuleType, path: Path) -> None:
    if native.counts():
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"ops": native.counts()}, sort_keys=True) + "\n")


class DeviceApi:
    """The functions of one vendor's module, by name (`functions`); ``kind`` is the device type: npu, cuda or xpu."""

    def __init__(self, native: ModuleType, settings: Settings, kind: str) -> None:
        self.native, self.settings, self.kind = native, settings, kind

    def index(self, device: Any = None) -> int:
        """The number of a device given as nothing, a number, a string or a torch.device."""
        if device is None:
            return int(self.native.current_device())
        if isinstance(device, int):
            return device
        found = torch.device(device).index
        return int(self.native.current_device()) if found is None else found

    def properties(self, device: Any = None) -> SimpleNamespace:
        """What the chip's data say, and the simulated memory."""
        chip = self.settings.data
        fields: dict[str, Any] = {"name": chip.name, "total_memory": self.settings.memory_bytes, **chip.properties}
        fields["uuid"] = f"00000000-0000-0000-0000-0000000000{self.index(device):02x}"
        return SimpleNamespace(**fields)

    def memory(self, which: int) -> Callable[..., int]:
        """Bytes in use (0), their peak (1), or of the whole device (2), as a function of the device."""
        return lambda device=None: int(self.native.memory_now(self.index(device))[which])

    def free_and_total(self, device: Any = None) -> tuple[int, int]:
        """Bytes not in use, and all."""
        used, _, total = self.native.memory_now(self.index(device))
        return total - used, total

    def statistics(self, device: Any = None) -> dict[str, int]:
        """The statistics of torch's allocators that a simulated one has; it keeps nothing back, so reserved is allocated."""
        used, peak, _ = self.native.memory_now(self.index(device))
        names = ("allocated_bytes", "reserved_bytes", "active_bytes")
        return {f"{name}.all.{kind}": value for name in names for kind, value in (("current", used), ("peak", peak))}

    def current_stream(self, device: Any = None) -> torch.Stream:
        """The stream that work goes to."""
        index = self.index(device)
        return self._stream(index, self.native.current_stream(index))

    def default_stream(self, device: Any = None) -> torch.Stream:
        """The stream that a device starts with."""
        return self._stream(self.index(device), 0)

    def _stream(self, index: int, number: int) -> torch.Stream:
        make: Any = torch.Stream
        stream: torch.Stream = make(stream_id=number, device_index=index, device_type=self.native.device_type())
        return stream

    def set_stream(self, stream: torch.Stream) -> None:
        """Let work go to another stream."""
        self.native.set_stream(stream.device_index, stream.stream_id)

    def seed(self, value: int, device: Any = None) -> None:
        """Seed the generator of a device, after the work that was queued before."""
        self.native.synchronize(self.index(device))
        self.native.default_generator(self.index(device)).manual_seed(value)

    def seed_all(self, value: int) -> None:
        """Seed all devices' generators."""
        for index in range(self.settings.devices):
            self.seed(value, index)

    @contextmanager
    def on_device(self, device: Any) -> Iterator[None]:
        """Make a device current for a while."""
        before = self.index()
        self.native.set_device(self.index(device))
        try:
            yield
        finally:
            self.native.set_device(before)

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        """Make a stream current for a while."""
        before = self.current_stream() if stream is None else self.current_stream(stream.device_index)
        self.set_stream(before if stream is None else stream)
        try:
            yield
        finally:
            self.set_stream(before)

    def functions(self) -> dict[str, Any]:
        """All of them, by the names that the vendors share."""
        native, kind = self.native, self.kind

        index = self.index

        # Classes, as the vendors' are: libraries name them in annotations.
        class Stream:
            """Makes a stream of the device."""

            def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Any:
                return torch.Stream(device=f"{kind}:{index(device)}")

        class Event:
            """Makes an event of the current device."""

            def __new__(cls, enable_timing: bool = False, blocking: bool = False, **_: Any) -> Any:
                return torch.Event(device=f"{kind}:{index()}", enable_timing=enable_timing)

        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "init": lambda: None,
            "_lazy_init": lambda: None,
            "_is_in_bad_fork": lambda: False,
            "device_count": native.device_count,
            "current_device": native.current_device,
            "set_device": lambda device: native.set_device(self.index(device)),
            "device": self.on_device,
            "get_device_name": lambda device=None: self.settings.data.name,
            "get_device_properties": self.properties,
            "synchronize": lambda device=None: native.synchronize(self.index(device)),
            "empty_cache": lambda: None,
            "mem_get_info": self.free_and_total,
            "memory_stats": self.statistics,
            "memory_allocated": self.memory(0),
            "max_memory_allocated": self.memory(1),
            "memory_reserved": self.memory(0),
            "reset_peak_memory_stats": lambda device=None: native.reset_peak(self.index(device)),
            "manual_seed": self.seed,
            "manual_seed_all": self.seed_all,
            "default_generators": tuple(native.default_generator(index) for index in range(self.settings.devices)),
            "current_stream": self.current_stream,
            "default_stream": self.default_stream,
            "set_stream": self.set_stream,
            "stream": self.on_stream,
            "Stream": Stream,
            "Event": Event,
            "OutOfMemoryError": torch.OutOfMemoryError,
            "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        }


def graph_type(native: ModuleType) -> type:
    """A class like torch.cuda.CUDAGraph: it records launches instead of running them, and repeats them."""

    class Graph:
        """Work captured once."""

        def __init__(self, keep_graph: bool = False) -> None:
            self._graph: Any = None

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            """Record from here on."""
            native.begin_capture(native.current_device())

        def capture_end(self) -> None:
            """Stop recording."""
            self._graph = native.end_capture()

        def replay(self) -> None:
            """Launch what was recorded. Raises RuntimeError for a graph that holds nothing."""
            if self._graph is None:
                raise RuntimeError("the graph was not captured")
            self._graph.replay()

        def reset(self) -> None:
            """Let go of what was recorded."""
            self._graph = None

        def pool(self) -> tuple[int, int]:
            """A handle of its memory."""
            return (0, 1)

    return Graph


def graph_functions(native: ModuleType, name: str) -> dict[str, Any]:
    """Graphs under the vendor's name for them."""
    graph = graph_type(native)

    @contextmanager
    def capturing(one: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
        one.capture_begin(pool=pool, capture_error_mode=capture_error_mode)
        try:
            yield
        finally:
            one.capture_end()

    return {
        name: graph,
        "graph": capturing,
        "graph_pool_handle": lambda: (0, 1),
        "is_current_stream_capturing": native.is_capturing,
    }
