"""The process of one worker beside the leading one: ``python -m vllm_core.worker_main``, started by `WorkerGroup`.

Standard input is its channel: what it is to load comes first, then steps, until it is told to stop or the leader is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence

from vllm_core.engine import wire
from vllm_core.engine.memory import GroupMemory, KVBudget
from vllm_core.engine.parallel import channel as frames
from vllm_core.engine.parallel.channel import Channel, Start
from vllm_core.errors import VLLMCoreError

log = logging.getLogger("vllm_core.worker")


def run(start: Start, channel: Channel) -> None:
    """Build this worker's part of the engine and follow the leader. Raises what fails."""
    from vllm_core import launch
    from vllm_core.engine.binding import BoundOps
    from vllm_core.engine.construct import Part, build_program, shard_of, steps_in_flight
    from vllm_core.engine.parallel.program import follow
    from vllm_core.ops import comm
    from vllm_core.registry.load import open_platform

    design = launch.from_bytes(start.design)
    plan, rank = design.plan, start.rank
    device = launch.open_device(open_platform(plan), plan, rank)
    ops = BoundOps(plan.bindings, device.bind)

    def agree(budget: KVBudget, groups: Sequence[GroupMemory]) -> KVBudget:
        channel.send(frames.BUDGET, frames.encode(budget))
        return frames.decode_budget(channel.expect(frames.AGREED))

    with launch.attributed(ops):
        channel.send(frames.JOINING)
        communicator = device.communicator(rank, plan.tensor_parallel, start.rendezvous)
        try:
            part = Part(shard_of(communicator), plan.sharers(rank), agree)
            program, _ = build_program(design, device, ops, {}, part)
            channel.send(frames.READY)
            follow(program, channel, depth=steps_in_flight(design.config, device))
            device.synchronize()
            program.close()
        finally:
            comm.leave(communicator)


def _exit_with_leader(channel: Channel) -> None:
    """The channel ends when the leader does, however it ended; the main thread may be waiting for it in a collective."""
    channel.wait_for_end()
    os._exit(0)


def main() -> int:
    """Run the process; returns its exit status."""
    channel = Channel(socket.socket(fileno=os.dup(0)))
    threading.Thread(target=_exit_with_leader, args=(channel,), daemon=True).start()
    threading.Thread(target=channel.beat_for_ever, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the leader.
    try:
        start = frames.decode_start(channel.expect(frames.START))
        form = f"%(levelname)s %(name)s rank {start.rank}: %(message)s"
        logging.basicConfig(level=os.environ.get("VLLM_CORE_LOG_LEVEL", "INFO"), format=form)
        run(start, channel)
    except EOFError:
        return 0
    except Exception as error:  # the leader gets the cause, whatever it is
        level = logging.DEBUG if isinstance(error, VLLMCoreError) else logging.ERROR
        log.log(level, "worker failed", exc_info=error)
        channel.send(frames.FAILED, frames.encode(wire.Failure.of(error)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
