"""A transformers model shared by several workers computes what transformers computes, as far as its class plans for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoConfig

from vllm_core.errors import ConfigError
from vllm_core.layers.shard import COLUMNS, ROWS
from vllm_core.models import transformers_track

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = {
    "starcoder2": {},  # biases, of which the summed ones are added once
    "gpt_neox": {"num_key_value_heads": 4, "rotary_pct": 0.25},  # queries, keys and values of a head side by side
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6, "attn_logit_softcapping": 5.0},
    "glm": {"head_dim": 8},  # an MLP that is not shared
    "mixtral": EXPERTS,  # experts that are not shared
    "granite": {"tie_word_embeddings": True},
    "granite_swa": {"sliding_window": 6},  # sinks, of each head one
}
PROMPT = [(7 * i + 3) % 96 + 3 for i in range(19)]


def config_of(kind, **changes):
    config = AutoConfig.for_model(kind, **{**SIZES, **SHARED.get(kind, {}), **changes})
    return {**config.to_dict(), "architectures": None}


def all_at_once(runners):
    """A prompt, then the same prompt token by token, on every worker at the same time; logits of each."""

    def run(runner):
        whole, pieces = runner.sequence(PROMPT), runner.sequence(PROMPT)
        runner.step([(whole, len(PROMPT))])
        for _ in PROMPT:
            runner.step([(pieces, 1)])
        return torch.cat(whole.logits), torch.cat(pieces.logits)

    with ThreadPoolExecutor(len(runners)) as pool:
        return list(pool.map(run, runners))


@pytest.mark.parametrize("kind", SHARED)
def test_two_workers_compute_what_transformers_computes(track, shards, tmp_path, kind):
    model = track.eager_model(AutoConfig.for_model(kind, **{**SIZES, **SHARED[kind]}))
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    weights = track.checkpoint(model, tmp_path)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    outcomes = all_at_once([track.rewired(config, weights, shard=shard) for shard in shards(2)])
    for whole, pieces in outcomes:
        torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(pieces, expected, atol=1e-4, rtol=0)
    (first, _), (second, _) = outcomes
    assert torch.equal(first, second), "each worker samples for itself"


def test_a_worker_keeps_its_part_alone(track, shards):
    config = config_of("starcoder2")
    runner = track.rewired(config, None, shard=shards(2)[0])
    layer = runner.model._body.layers[0]
    widths = {name: (one.out_features, one.in_features) for name, one in layer.named_modules() if hasattr(one, "out_features")}
    assert widths == {
        "self_attn.q_proj": (16, 32),
        "self_attn.k_proj": (8, 32),
        "self_attn.v_proj": (8, 32),
        "self_attn.o_proj": (32, 16),
        "mlp.c_fc": (24, 32),
        "mlp.c_proj": (32, 24),
    }
    assert [group.num_kv_heads for group in runner.spec.kv_groups()] == [1]


@pytest.mark.parametrize(
    ("kind", "changes", "workers"),
    [
        ("olmo2", {}, 2),  # norms over all heads
        ("phi3", {}, 2),  # queries, keys and values in one layer, one after the other
        ("gpt2", {}, 2),  # no plan at all
        ("starcoder2", {}, 4),  # fewer KV heads than workers
        ("starcoder2", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36}, 2),
    ],
)
def test_what_cannot_be_shared_is_refused_while_planning(kind, changes, workers):
    spec = transformers_track.describe(config_of(kind, **changes), dtype="float32", path="here")
    with pytest.raises(ConfigError, match=f"tensor_parallel_size {workers}") as caught:
        spec.shard(workers)
    assert "--tensor-parallel-size" in caught.value.fix


def test_the_plan_of_the_class_says_what_is_cut():
    spec = transformers_track.describe(config_of("glm"), dtype="float32", path="here")
    assert dict(spec.shared_layers) == {
        "layers.*.self_attn.q_proj": ROWS,
        "layers.*.self_attn.k_proj": ROWS,
        "layers.*.self_attn.v_proj": ROWS,
        "layers.*.self_attn.o_proj": COLUMNS,
    }
    assert {op for op, role in spec.shard(2)._shared_sites() if role == "comm"} >= {"all_reduce", "all_gather"}
    assert spec._shared_sites() == ()
