"""Serves a request with an engine in a process of its own, then has every process looked at.

A command for `vllm_conformance.watch.watched`; its argument is the engine's options, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from vllm_conformance import watch

PROMPT = (1, 2, 3, 4, 5)


async def serve(options: dict[str, Any]) -> None:
    """Start an engine, generate a few tokens, look, stop."""
    from vllm_core import AsyncLLM, SamplingParams

    llm = AsyncLLM(**options)
    await llm.start()
    try:
        async for _ in llm.generate(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True), "1"):
            pass
        await asyncio.to_thread(watch.compare)
    finally:
        llm.shutdown()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
