"""How a model uses its device and its ops."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from vllm_core.api.ops import OPS
from vllm_core.models.null import TOKEN

GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 71,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": 8,
    "sliding_window_pattern": 3,
}
BERT = {
    "architectures": ["BertModel"],
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 71,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 71,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = MIXTRAL | {"num_experts": 4, "moe_intermediate_size": 30, "mlp_only_layers": [1]}
QWEN3_MOE["architectures"] = ["Qwen3MoeForCausalLM"]
NULL = {"architectures": ["NullForCausalLM"]}


def calls_of_a_step(build, config, **options) -> list[str]:
    sequences = build(config, **options)
    sequences.step([(0, [3, 4, 5])])
    build.ops.calls.clear()
    sequences.step([(0, [6])])
    return list(build.ops.calls)


def test_a_llama_layer_takes_five_calls(build, llama_config):
    calls = Counter(calls_of_a_step(build, {**llama_config, "num_hidden_layers": 5}))
    assert calls == {
        "embedding": 1,
        "rms_norm_linear": 5,
        "qk_norm_rope_attention": 5,
        "linear_add": 2 * 5,
        "rms_norm_gated_linear": 5,
        "rms_norm": 1,
    }


def test_a_gemma_layer_takes_nine_calls(build):
    assert len(calls_of_a_step(build, GEMMA)) == 2 + 9 * 3


def test_a_layer_with_experts_takes_eight_calls_and_plans_no_dense_one(build):
    calls = Counter(calls_of_a_step(build, MIXTRAL))
    assert sum(calls.values()) == 2 + 8 * 3
    assert calls["moe_route"] == calls["moe"] == calls["linear"] == 3
    planned = {site.op for site in build(MIXTRAL).spec.call_sites("float32")}
    assert {"moe_pack", "moe"} <= planned
    assert not {"gated_activation", "gated_linear", "rms_norm_gated_linear"} & planned
    mixed = {site.op for site in build(QWEN3_MOE).spec.call_sites("float32")}
    assert {"moe", "rms_norm_gated_linear", "gated_activation"} <= mixed


def test_experts_are_packed_once_with_all_their_readers(build):
    experts = build(QWEN3_MOE).model._layers[2]._sparse.packed
    assert experts.gate_up.shape == (4 * 2 * 30, 48)
    assert experts.down.shape == (4 * 48, 30)
    assert experts.readers[0] == "layers.2.mlp.experts.0.gate_proj"
    assert len(experts.readers) == 3 * 4


def test_every_call_site_of_a_layer_is_in_the_specification(build, llama_config):
    """The planner binds the specification's call sites: a layer that asked for another would fail at start."""
    for config in (llama_config, GEMMA, BERT, MIXTRAL, QWEN3_MOE):
        sequences = build(config)
        known = {(site.op, site.role) for site in sequences.spec.call_sites("float32")}
        assert build.ops.sites <= known


def test_a_step_fetches_no_call_site_and_allocates_nothing_from_the_device(build, llama_config):
    sequences = build(llama_config)
    fetched, allocated = set(build.ops.sites), dict(build.device.allocated)
    build.ops.sites.clear()
    sequences.step([(0, [3, 4, 5]), (1, [7])])
    assert not build.ops.sites
    assert fetched
    assert build.device.allocated == allocated


@pytest.mark.parametrize("name", ["llama", "gemma", "mixtral", "qwen3_moe"])
def test_the_last_layer_goes_on_with_the_wanted_rows_alone(build, llama_config, name):
    """Whatever is left out of it, the next step finds all keys."""
    config = {"llama": llama_config, "gemma": GEMMA, "mixtral": MIXTRAL, "qwen3_moe": QWEN3_MOE}[name]
    first, second = [(0, [3, 4, 5, 9, 2]), (1, [7, 1, 8])], [(0, [6]), (1, [2])]
    whole, few, none = build(config), build(config), build(config)
    everything = torch.cat(whole.step(first))
    assert torch.allclose(few.step_of(first, [4, 7]), everything[[4, 7]], rtol=1e-5, atol=1e-6)
    assert none.step_of(first, []).shape == (0, everything.shape[1])
    after = torch.cat(whole.step(second))
    for other in (few, none):
        assert torch.allclose(torch.cat(other.step(second)), after, rtol=1e-5, atol=1e-6)


def test_weights_and_workspace_are_counted_in_their_pools(build, llama_config):
    sequences = build(llama_config)
    spec, allocated = sequences.spec, build.device.allocated
    per_layer = 48 * (4 + 2 * 2) * 12 + 48 * 48 + 3 * 48 * 71 + 2 * 48
    table = 129 * 12
    assert allocated["weights"] == 4 * (2 * 67 * 48 + 2 * per_layer + 48 + table)
    width = 3 * 48 + (4 + 2 * 2) * 12 + 48 + 3 * spec.intermediate_size
    width += 48 + 4 * 12  # of rows with which the last layer goes on
    assert allocated["workspace"] == 4 * 256 * width
    assert set(allocated) == {"weights", "workspace"}


def test_a_tied_embedding_is_held_once_and_packed_with_both_readers(build, llama_config):
    sequences = build({**llama_config, "tie_word_embeddings": True})
    head, untied = sequences.model._head.packed, build(llama_config).model._head.packed
    assert head.readers == ("embed_tokens", "lm_head")
    assert head.weight is sequences.model._embedding.weight
    assert untied.readers == ("lm_head",)


def test_merged_weights_are_packed_with_all_their_readers(build, llama_config):
    layer = build(llama_config).model._layers[1]
    assert layer.qkv.packed.readers == tuple(f"layers.1.self_attn.{p}_proj" for p in "qkv")
    assert layer.gate_up.packed.readers == ("layers.1.mlp.gate_proj", "layers.1.mlp.up_proj")


def test_a_pooling_decoder_has_no_head(build, llama_config):
    sequences = build(llama_config, pooling="last")
    assert "lm_head" not in str(build.ops.calls)
    with pytest.raises(AssertionError, match="no head"):
        sequences.model.logits(torch.empty(1, 67), torch.empty(1, 48))


def test_many_different_steps_keep_a_bounded_number_of_views(build, llama_config, monkeypatch):
    from vllm_core.layers import workspace

    monkeypatch.setattr(workspace, "MAX_CACHED_VIEWS", 3)
    sequences = build(llama_config)
    for count in range(1, 9):
        sequences.step([(count, list(range(3, 3 + count)))])
    assert len(sequences.model._workspace._views) <= 3


def test_hidden_states_are_the_same_through_reused_views(build, llama_config):
    first = build(llama_config).step([(0, [3, 4, 5])])[0]
    again = build(llama_config)
    again.step([(1, [9, 8])])
    again.step([(2, [9, 8, 7])])
    torch.testing.assert_close(again.step([(0, [3, 4, 5])])[0], first, atol=0, rtol=0)


def test_the_null_model_always_says_one_token_and_reads_no_weights(build):
    def no_weights():
        raise AssertionError("weights were read")
        yield

    sequences = build(NULL, no_weights())
    logits = sequences.logits([(0, [1, 2, 3]), (1, [4])])
    assert [int(row.argmax()) for part in logits for row in part] == [TOKEN] * 4
    assert build.ops.calls == []


def test_the_null_model_uses_block_tables_and_the_tail_like_a_real_one(build, llama_config):
    sites = {(s.op, s.role) for s in build(NULL).spec.call_sites("float32")}
    real = {(s.op, s.role) for s in build(llama_config).spec.call_sites("float32")}
    assert real - sites == {("rotary_embedding", "attention"), ("decode_layers", "kv.0.full")}
    assert sites <= real
    assert [g.kind for g in build(NULL).spec.kv_groups()] == ["full"]


def test_all_ops_that_models_use_are_registered(build):
    build(GEMMA)
    assert {op for op, _ in build.ops.sites} <= set(OPS)
