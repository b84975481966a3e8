from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "interpret_ops.py"
LIMIT_S = 600

ROWS = "one_token,gqa,empty"
CODES = "gqa/plain,block_edges/b32/q2/k1,gqa/kv_fp8,gqa/kv_fp8_e5m2,gqa/kv_int8"
STEPS = "one_token,mixed,decode,chunks"
GROUPS = {
    "rows": (
        f"rms_norm,add_rms_norm,layer_norm:{ROWS}",
        f"embedding,embedding_shard,add,gated_activation,activation:{ROWS}",
        f"linear,linear_add,rms_norm_linear,gated_linear,rms_norm_gated_linear:{ROWS}",
    ),
    "cache": (
        # Each of these imports a cache of such codes before, and exports it after.
        f"kv_write:{CODES}",
        "kv_copy:gqa/plain,gqa/kv_int8",
        "kv_export,kv_import:gqa/plain",
        # Heads that differ in their last bit may be rounded to neighbours in fp8.
        "qk_norm_rope_kv_write:gqa/plain,gqa/kv_int8",
    ),
    "fresh": ("qk_norm_rope_attention:one_token,decode/q4/k1/d80/partial/sinks,decode/q2/k1/d32/window/cap",),
    "attention": (
        f"paged_attention:{CODES},gqa/window/cap,gqa/sinks",
        "encoder_attention,pool,gather_rows,rotary_embedding:one_token,gqa",
    ),
    "steps": (f"batch_update,build_step,advance:{STEPS}", "grammar_mask,log_probabilities,soft_cap:one_token,gqa"),
    "samples": ("logit_adjust,sample:one_token,mixed,ties",),
}
SEEDS = {"samples": "1,2", "fresh": "0,1"}
"""Heads have norms at even seeds."""

ALL = tuple(op for groups in GROUPS.values() for group in groups for op in group.partition(":")[0].split(","))


@pytest.mark.parametrize("name", GROUPS)
def test_kernels_compute_what_the_references_do_on_few_rows(name):
    check("float16", SEEDS.get(name, "1"), *GROUPS[name])


@pytest.mark.slow
@pytest.mark.parametrize("op", ALL)
def test_kernels_compute_what_the_references_do_in_every_class(op):
    check("float16,float32", "0", op)


def check(dtypes: str, seeds: str, *groups: str) -> None:
    """Products as on Hopper, which pass on what its own kernel does not take: here, all."""
    # Few rows on many multiprocessors: spans of keys are put together, and one kernel takes heads that are not written yet.
    spread = ["--multiprocessors", "64"] if groups == GROUPS["fresh"] else []
    command = [sys.executable, str(SCRIPT), "--small-tiles", *spread, "vllm_cuda", "sm_90", dtypes, seeds, *groups]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode in (0, 1), done.stderr[-2000:]
    assert re.fullmatch(r"[1-9]\d* cases, 0 differences\n", done.stdout), done.stdout
