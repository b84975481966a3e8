"""The scheduler and its parts run in a process that has neither torch nor pydantic."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PARTS = ["request", "blocks", "prefix", "kvtables", "queue", "packing", "results", "scheduler"]

RUN = """
import json, sys
import vllm_core.engine.{part}
print(json.dumps(sorted(name.split(".")[0] for name in sys.modules)))
"""

STEP = """
import json, sys
import numpy as np
from vllm_core.api import KVGroupSpec, StepResult
from vllm_core.engine.messages import EngineRequest
from vllm_core.engine.scheduler import GroupLimits, Scheduler, SchedulerLimits
from vllm_core.sampling_params import SamplingParams

spec = KVGroupSpec(index=0, kind="full", layers=(0,), num_kv_heads=1, head_size=8)
limits = SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=8, max_model_len=32)
scheduler = Scheduler(limits, [GroupLimits(spec=spec, tokens_per_block=4, num_blocks=9)])
params = SamplingParams(temperature=0.0)
scheduler.add(EngineRequest(request_id="a", prompt_token_ids=[1, 2, 3], arrival_time=0.0, params=params, max_tokens=2))
while scheduler.has_work:
    step = scheduler.schedule()
    one = np.ones((1, 1), dtype=np.int32)
    scheduler.complete(step, StepResult(tokens=one, counts=one[0], nonfinite=np.zeros(1, dtype=bool)))
assert scheduler.stats().finished == {"length": 1}
print(json.dumps(sorted(name.split(".")[0] for name in sys.modules)))
"""


def modules_after(code: str) -> set[str]:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(json.loads(result.stdout))


@pytest.mark.parametrize("part", PARTS)
def test_importing_a_part_of_the_scheduler_loads_nothing_heavy(part):
    modules = modules_after(RUN.format(part=part))
    assert modules & {"torch", "pydantic", "transformers"} == set()


def test_scheduling_and_completing_loads_nothing_heavy():
    modules = modules_after(STEP)
    assert modules & {"torch", "pydantic", "transformers"} == set()
