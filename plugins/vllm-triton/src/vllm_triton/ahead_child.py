"""A process that compiles kernels into Triton's cache: ``python -m vllm_triton.ahead_child TARGET LAUNCHER``.

Reads ``[module, kernel, data of JITFunction.preload]``, a line of JSON each, and answers each with a line: what went wrong, or
an empty string. Ends with its input, and so with its parent. Needs no device, and imports no torch.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any

from triton.backends.compiler import GPUTarget

from vllm_triton.ahead import settle_keys
from vllm_triton.offline import OfflineDriver


def compile_one(launcher: str, module: str, name: str, data: str) -> str:
    """Compile a specialisation; why it could not be, or nothing."""
    try:
        compiled = getattr(import_module(module), name).preload(data)
        build_launcher(launcher, compiled)
    except Exception as error:  # noqa: BLE001 - compilers raise anything; the launch that follows will raise it too
        return f"{type(error).__name__}: {error}"[:500]
    return ""


def build_launcher(entry: str, compiled: Any) -> None:
    """Have the code built that starts the kernel, in versions of Triton where that is compiled for each signature."""
    module, _, name = entry.partition(":")
    if module and hasattr(found := import_module(module), "make_launcher"):
        getattr(found, name)(compiled.src, compiled.metadata)


def main(target: str, launcher: str) -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print is no answer
    backend, architecture, warp_size = json.loads(target)
    OfflineDriver(GPUTarget(backend, architecture, warp_size)).install()
    settle_keys()
    for line in sys.stdin:
        print(json.dumps(compile_one(launcher, *json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
