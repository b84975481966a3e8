"""A model shared by several workers computes what one worker computes, and every worker has the same logits."""

from __future__ import annotations

import pytest
import torch

from vllm_core.errors import ConfigError, WeightsError
from vllm_core.layers.shard import COLUMNS, ROWS, Cut, Shard
from vllm_core.models import catalog

SIZES = {
    "vocab_size": 67,  # divided by nothing: the last worker's rows end in zeros
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GEMMA = {"head_dim": 16, "sliding_window": 6, "sliding_window_pattern": 2, "final_logit_softcapping": 3.0}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 24}
MODELS = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama-one-kv-head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 9}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 24, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3ForCausalLM", GEMMA),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**EXPERTS, "mlp_only_layers": [0]}),
}
BERT = {
    "architectures": ["BertModel"],
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
PROMPTS = ([(7 * i + 3) % 67 for i in range(23)], [66, 0, 33])


def config_of(name):
    architecture, changes = MODELS[name]
    return {"architectures": [architecture], **SIZES, **changes}


def script(sequences):
    """Two prompts in one step, in another order a decode step each."""
    first = sequences.logits([(0, PROMPTS[0]), (1, PROMPTS[1])])
    return [*first, *sequences.logits([(1, [5]), (0, [9])])]


def close(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_workers_together_compute_what_one_computes(build, build_workers, name, count):
    """With 4 workers and 2 KV heads, each head is kept by two of them."""
    alone = script(build(config_of(name)))
    outcomes = build_workers(config_of(name), count).run(script)
    close(outcomes[0], alone)
    for other in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0], other, strict=True))


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (5, 5)])
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}])
def test_heads_that_workers_cannot_share_equally_are_filled_up_with_zeros(build, build_workers, heads, kv_heads, changes):
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16}
    config = {**config_of("llama"), **sizes, **changes}
    outcomes = build_workers(config, 2).run(script)
    close(outcomes[0], script(build(config)))
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    part = catalog.describe(config, dtype="float32").shard(2)
    assert 2 * part.num_kv_heads == kv_heads + 1
    assert part.num_heads == part.num_kv_heads * heads // kv_heads


@pytest.mark.parametrize(("heads", "count"), [(4, 2), (4, 4), (3, 2)])
def test_an_encoder_is_shared_too(build, build_workers, heads, count):
    rows, config = [(0, PROMPTS[0]), (1, PROMPTS[1])], {**BERT, "num_attention_heads": heads}
    alone = build(config, pooling="mean").step(rows)
    for outcome in build_workers(config, count, pooling="mean").run(lambda one: one.step(rows)):
        close(outcome, alone)


@pytest.mark.parametrize("name", ["llama-biases", "gemma3"])
def test_a_worker_given_only_what_it_wants_is_the_same_worker(build, build_workers, name):
    builder = build(config_of(name))
    whole = dict(builder.model._loader.dummy(0))

    def parts(model):
        for tensor_name, tensor in whole.items():
            cut = model.wanted(f"model.{tensor_name}", tuple(tensor.shape))
            yield tensor_name, tensor if cut is None else cut.take(tensor)

    close(build_workers(config_of(name), 2, parts).run(script)[0], script(builder))


def test_a_worker_keeps_its_part_alone(build, build_workers):
    def size(sequences):
        return sum(t.numel() for layer in sequences.model._layers for t in (layer.qkv.packed.weight, layer.down.packed.weight))

    config = config_of("llama")
    halves = build_workers(config, 2).parts
    assert [2 * size(half) for half in halves] == [size(build(config))] * 2
    assert [half.model._embedding.weight.shape for half in halves] == [(34, 48)] * 2


def test_what_is_summed_is_summed_once_per_sublayer(build_workers):
    """Two per layer and the embedding; logits are gathered. More would be time on every token."""
    workers = build_workers(config_of("llama"), 2)
    workers.run(lambda one: one.logits([(0, [1, 2, 3])]))
    calls = workers.parts[0].ops.calls
    assert [calls.count(op) for op in ("all_reduce_add_rms_norm", "all_reduce", "all_gather")] == [4, 1, 1]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "inner", "count"), [(9, 3, 35, 2), (12, 3, 72, 4), (8, 8, 36, 8), (4, 2, 72, 8), (12, 4, 72, 6)]
)
def test_sizes_that_do_not_divide_are_refused_with_all_of_them(heads, kv_heads, inner, count):
    config = {**config_of("llama"), "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": inner}
    spec = catalog.describe({**config, "head_dim": 16}, dtype="float32")
    with pytest.raises(ConfigError) as caught:
        spec.shard(count)
    assert f"{heads} attention heads, {kv_heads} KV heads, {inner} inner features" in caught.value.found
    assert str(count) in caught.value.on
    for fitting in map(int, caught.value.fix.removeprefix("--tensor-parallel-size ").split(", ")):
        spec.shard(fitting)


def test_a_wrong_shape_is_found_before_the_tensor_is_cut(build):
    model = build(config_of("llama")).model
    with pytest.raises(WeightsError, match=r"shape \(68, 48\)"):
        model.wanted("model.embed_tokens.weight", (68, 48))
    assert model.wanted("model.nobody.weight", (1,)) is None


def test_cuts_behind_the_end_are_zeros():
    whole = torch.arange(10.0).view(5, 2)
    assert Cut(ROWS, 3, 6).take(whole).tolist() == [[6, 7], [8, 9], [0, 0]]
    assert Cut(ROWS, 6, 9).take(whole).tolist() == [[0, 0]] * 3
    assert Cut(COLUMNS, 1, 2).take(whole).tolist() == [[1], [3], [5], [7], [9]]
    assert Cut(COLUMNS, 1, 2).shape((5, 2)) == (5, 1)


def test_a_cut_does_not_keep_the_whole_alive():
    whole = torch.zeros(1000, 8)
    assert Cut(ROWS, 0, 10).take(whole).untyped_storage().nbytes() == 10 * 8 * 4


def test_one_worker_cuts_nothing():
    assert Shard().part(10) is None
    assert Shard().is_first
