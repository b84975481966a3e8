"""The step program: it compiles nothing itself, but hands each step to the device's process as bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterable
from multiprocessing import Pipe
from typing import Any

import msgspec
import numpy as np
import torch

from vllm_core.api import HostLogprobs, ProgramBudget, StepDelta, StepHandle, StepKey, StepProgram, StepResult, UnsupportedError
from vllm_toy_static import platform
from vllm_toy_static.device import StaticDevice
from vllm_toy_static.wire import Array, Message, Reserve, Result, Run, Weight, receive, send


class Handle:
    """A step in flight. Answers come in the order of the steps."""

    def __init__(self, program: StaticProgram) -> None:
        self._program = program
        self._result: StepResult | None = None

    def ready(self) -> bool:
        """Whether the answer is here."""
        return self._result is not None or (self._program.waiting[0] is self and self._program.connection.poll())

    def result(self) -> StepResult:
        """Wait for the answer. Raises RuntimeError with what the device said."""
        while self._result is None:
            self._program.take()
        return self._result

    def answer(self, found: Result) -> None:
        """Take the device's answer."""
        if found.tokens is None or found.nonfinite is None:
            raise RuntimeError(f"the device failed: {found.error}")
        tokens = found.tokens.array()
        counts = np.ones(len(tokens), dtype=np.int32)
        sampled, prompt = (None if one is None else _logprobs(one) for one in (found.logprobs, found.prompt_logprobs))
        self._result = StepResult(tokens, counts, found.nonfinite.array(), sampled, prompt)


class StaticProgram(StepProgram):
    """Weights, KV cache and state of one model, in a process of their own."""

    def __init__(self, spec: Any, device: StaticDevice, budget: ProgramBudget) -> None:
        rope = spec.layers[0].rope
        if rope is None or rope.kind != "default" or spec.qkv_bias or spec.out_bias or spec.mlp_bias:
            raise UnsupportedError(
                "Model cannot be compiled",
                on=spec.architecture,
                found="scaled positions or biases",
                expected="a plain Llama",
                fix="choose another platform",
            )
        self._device, self._budget = device, budget
        self.waiting: deque[Handle] = deque()
        self.connection, theirs = Pipe()
        command = [sys.executable, "-m", "vllm_toy_static.remote", str(theirs.fileno()), msgspec.json.encode(spec).decode()]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
        theirs.close()
        device.wait = self._wait

    def _send(self, message: Message) -> None:
        try:
            send(self.connection, message)
        except OSError as error:
            raise self._gone() from error

    def _gone(self) -> RuntimeError:
        return RuntimeError(f"the device's process ended with code {self._process.wait()}")

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send each tensor; the device keeps float32."""
        for name, tensor in weights:
            array = Array.of(tensor.float().numpy())
            self._device.count("weights", len(array.data))
            self._send(Weight(name, array))

    def reserve(self, num_blocks: tuple[int, ...], max_model_len: int) -> None:
        """Let the device make room."""
        (blocks,), (group,), (layout,) = num_blocks, self._budget.kv_groups, self._budget.kv_layouts
        self._device.count("kv", blocks * layout.block_bytes * len(group.layers))
        self._send(Reserve(self._budget.num_slots, blocks, layout.tokens_per_block, max_model_len))

    def prepare(self, key: StepKey) -> Run:
        """The smallest compiled size that holds the step, as the message that asks for it; its arrays follow."""
        rows, tokens = platform.size_for(key.slots, key.tokens)
        return Run(rows, tokens, key.features)

    def run(self, executable: Any, delta: StepDelta) -> StepHandle:
        """Send the difference; the answer is read when somebody waits for it."""
        masks = {row: Array.of(mask) for row, mask in sorted(delta.mask_rows.items())}
        filled = msgspec.structs.replace(
            executable, packed=Array.of(delta.packed), num_logprobs=delta.num_logprobs, masks=masks
        )
        self._send(filled)
        self.waiting.append(Handle(self))
        return self.waiting[-1]

    def take(self) -> None:
        """Give the next answer to the oldest step."""
        try:
            found = receive(self.connection)
        except (EOFError, OSError) as error:
            raise self._gone() from error
        assert isinstance(found, Result), "the device answers with results"
        self.waiting.popleft().answer(found)

    def _wait(self) -> None:
        while self.waiting:
            self.take()

    def close(self) -> None:
        """The device's process ends with its connection."""
        self.connection.close()
        self._process.wait()


def _logprobs(arrays: tuple[Array, ...]) -> HostLogprobs:
    return HostLogprobs(*(one.array() for one in arrays))


def create(*, spec: Any, device: StaticDevice, bound: Any, budget: ProgramBudget) -> StaticProgram:
    """Entry of the offer; ``bound`` has nothing, since the compiled step has its own code."""
    return StaticProgram(spec, device, budget)
