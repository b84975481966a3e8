from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("interpreted.py")
LIMIT_S = 600

ROWS = "one_token,gqa,empty"
KV = "gqa/plain,block_edges/b32/q2/k1,gqa/kv_fp8,gqa/kv_fp8_e5m2,gqa/kv_int8"
STEPS = "one_token,mixed,decode,chunks"
GROUPS = {
    "norms": ("rms_norm,add_rms_norm,layer_norm", ROWS),
    "rows": ("embedding,embedding_shard,add,gated_activation,activation", ROWS),
    "products": ("linear,linear_add,rms_norm_linear,gated_linear,rms_norm_gated_linear", ROWS),
    "cache": ("kv_write,kv_copy,kv_export,kv_import", KV),
    # Heads that differ in their last bit may be rounded to neighbours in fp8.
    "fused": ("qk_norm_rope_kv_write", "gqa/plain,gqa/kv_int8"),
    "attention": ("paged_attention", f"{KV},gqa/window/cap"),
    "encoders": ("encoder_attention,pool,gather_rows,rotary_embedding", "one_token,gqa"),
    "steps": ("batch_update,build_step,advance", STEPS),
    "logits": ("logit_adjust", "one_token,mixed,ties"),
    "tails": ("grammar_mask,log_probabilities,soft_cap", "one_token,gqa"),
    "samples": ("sample", "one_token,mixed,ties"),
}
ALL = (*",".join(ops for ops, _ in GROUPS.values()).split(","),)


@pytest.mark.parametrize("group", GROUPS)
def test_kernels_compute_what_the_references_do_on_few_rows(group):
    ops, shapes = GROUPS[group]
    check(run(ops, "float16", "1,2" if group in ("logits", "samples") else "1", shapes))


@pytest.mark.slow
@pytest.mark.parametrize("op", ALL)
def test_kernels_compute_what_the_references_do_in_every_class(op):
    check(run(op, "float16,float32", "0"))


def check(result: str) -> None:
    assert re.fullmatch(r"[1-9]\d* cases, 0 differences\n", result), result


def run(*arguments: str) -> str:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
