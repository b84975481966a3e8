"""L3: what concerns a whole process: patches, memory that comes back, two workers."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_conformance.case import Evidence, Subject
from vllm_conformance.cases.runs import models
from vllm_conformance.cases.runs.engines import LENGTHS, OPTIONS, denied, engine, prompt_of
from vllm_conformance.cases.runs.expect import first_dtype
from vllm_conformance.cases.runs.teacher import Marks
from vllm_conformance.cases.runs.tokens import marks_of
from vllm_conformance.subject import places_of
from vllm_conformance.watch import watched
from vllm_core.api import POOLS, DeviceFacts, is_available


def nothing_is_patched(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Core, torch and transformers before the plugin is loaded and after a served request, in every engine process."""
    options = {**OPTIONS, "model": str(models.folder_of("llama")), "platform": subject.platform, "dtype": first_dtype(subject)}
    options |= denied(subject, options)
    workers = 2 if is_available(subject.claims["parallel.tensor"]) else 1
    if max(len(subject.all_facts), subject.facts.max_workers) < workers:
        workers = 1
    options["device_ids"] = _ids(places_of(subject, workers))
    command = [sys.executable, "-m", "vllm_conformance.served", json.dumps({**options, "tensor_parallel_size": workers})]
    package = subject.loaded.found.value.partition(":")[0].partition(".")[0]
    seen = watched(command, package, subject.facts.device_type)
    changed = [f"{one.command}: {name}" for one in seen.processes for name in one.changes or ()]
    silent = [one.command for one in seen.processes if one.changes is None]
    if seen.status != 0 or changed or silent or len(seen.processes) < workers + 1:
        said = changed or [f"no answer from {one}" for one in silent] or seen.output.strip().splitlines()[-6:]
        return Evidence("FAIL", f"{len(changed)} names changed; " + "; ".join(said[:6]))
    return Evidence(detail=f"0 names changed, in {len(seen.processes)} processes")


def _ids(places: Sequence[DeviceFacts]) -> list[str]:
    """The devices, each once."""
    return list(dict.fromkeys(facts.id for facts in places))


def memory_comes_back(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """Engines come and go in one process: nothing is counted after them, and the third has as much room as the first."""
    device, prompts = subject.device, [prompt_of(20, 1)]
    for pool in POOLS:
        device.release(pool)
    rooms, marks = [], Marks()
    for _ in range(3):
        with engine(subject, "llama", first_dtype(subject)) as made:
            outputs = made.generate(prompts, 6)
            marks.add(made.name, made.dtype, prompts[0], outputs[0].tokens)
            own = made.engine.device.statistics().own_bytes
            if not own["weights"] or not own["kv"]:
                return Evidence("FAIL", f"an engine runs, and {dict(own)} bytes are counted")
            opened = made.engine.device
            evidence = made.evidence(marks)
        del made
        gc.collect()  # what ops of the engine have allocated for themselves goes with it
        left = {pool: size for pool, size in opened.statistics().own_bytes.items() if size}
        if left:
            return Evidence("FAIL", f"bytes are counted after the engine's end: {left}")
        rooms.append(opened.statistics().available_bytes)
    # Other processes may share a host's memory, and a device's; a leak of weights and KV each time would be more.
    if subject.facts.memory_kind == "discrete" and rooms[0] - rooms[-1] > 2 * (32 << 20):
        return Evidence("FAIL", f"{rooms[0]} bytes were available after the first engine, {rooms[-1]} after the third")
    return evidence


def two_workers(subject: Subject, params: Mapping[str, Any]) -> Evidence:
    """One model over two workers: the same tokens as the reference."""
    devices = _ids(places_of(subject, 2))
    prompts = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]
    with engine(subject, params["model"], first_dtype(subject), tensor_parallel_size=2, device_ids=devices) as made:
        outputs = made.generate(prompts, 12)
        return made.evidence(marks_of(made, prompts, outputs))
