"""Loading: any order gives the same model; what does not fit is named."""

from __future__ import annotations

import random
from itertools import islice

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_core.errors import WeightsError
from vllm_core.layers.weights import WeightLoader

ARCHITECTURES = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM", "BertModel"]
PROMPT = [(0, [5, 6, 7, 8, 9]), (1, [10, 11])]


@pytest.fixture(scope="module")
def llama(reference):
    return reference("LlamaForCausalLM", num_hidden_layers=2)


def failing(build, case, weights) -> WeightsError:
    with pytest.raises(WeightsError) as caught:
        build(case.config, weights)
    return caught.value


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_in_any_order_give_the_same_model(architecture, reference, build):
    changes = {} if architecture != "BertModel" else {"num_key_value_heads": 4}
    case = reference(architecture, head_dim=12, num_hidden_layers=2, **changes)
    wanted = torch.cat(build(case.config, case.weights()).step(PROMPT))
    for seed in range(4):
        weights = case.weights()
        random.Random(seed).shuffle(weights)
        assert torch.equal(torch.cat(build(case.config, weights).step(PROMPT)), wanted)


def test_the_prefix_of_the_causal_model_may_be_missing(llama, build):
    wanted = torch.cat(build(llama.config, llama.weights()).step(PROMPT))
    bare = [(name.removeprefix("model."), tensor) for name, tensor in llama.weights()]
    assert torch.equal(torch.cat(build(llama.config, bare).step(PROMPT)), wanted)


def test_weights_of_another_dtype_are_cast(llama, build):
    half = [(name, tensor.bfloat16()) for name, tensor in llama.weights()]
    rounded = [(name, tensor.bfloat16().float()) for name, tensor in llama.weights()]
    wanted = torch.cat(build(llama.config, rounded).step(PROMPT))
    assert torch.equal(torch.cat(build(llama.config, half).step(PROMPT)), wanted)


def test_norm_weights_stay_float32_in_a_bfloat16_model(llama, build):
    model = build(llama.config, llama.weights(), dtype="bfloat16").model
    assert model._layers[0].input_norm.value.dtype == torch.float32
    assert model._layers[0].qkv.packed.weight.dtype == torch.bfloat16
    assert torch.equal(model._layers[0].input_norm.value, llama.model.model.layers[0].input_layernorm.weight)


@pytest.mark.parametrize("index", range(0, 21, 4))
def test_a_missing_tensor_is_named(index, llama, build):
    weights = llama.weights()
    name, _ = weights.pop(index)
    error = failing(build, llama, weights)
    assert name.removeprefix("model.") in error.on
    assert error.found == "missing"


def test_many_missing_tensors_are_counted(llama, build):
    error = failing(build, llama, [])
    assert "and 18 more" in error.on
    assert error.expected == "21 tensors"


def test_a_tensor_of_a_wrong_shape_is_named_with_both_shapes(llama, build):
    weights = dict(llama.weights())
    weights["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(23, 48)
    error = failing(build, llama, weights.items())
    assert error.on == "model.layers.1.self_attn.k_proj.weight of LlamaForCausalLM"
    assert error.found == "shape (23, 48)"
    assert error.expected == "shape (24, 48)"


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "extra"])
def test_a_tensor_that_the_architecture_does_not_have_is_named(name, llama, build):
    error = failing(build, llama, [*llama.weights(), (name, torch.zeros(48))])
    assert error.on.startswith(name)
    assert "--model-impl transformers" in error.fix


def test_a_repeated_tensor_is_an_error(llama, build):
    weights = llama.weights()
    assert "second" in failing(build, llama, [*weights, weights[3]]).found


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"])
def test_buffers_of_old_checkpoints_are_ignored(name, llama, build):
    build(llama.config, [*llama.weights(), (name, torch.zeros(3))])


def test_a_head_is_ignored_where_the_embeddings_are_tied_and_required_where_not(llama, build):
    tied = {**llama.config, "tie_word_embeddings": True}
    build(tied, llama.weights())
    without = [(n, t) for n, t in llama.weights() if n != "lm_head.weight"]
    build(tied, without)
    assert failing(build, llama, without).on.startswith("lm_head.weight")


def test_a_pooling_model_ignores_the_head(llama, build):
    build(llama.config, llama.weights(), pooling="last")


def test_the_pooler_of_bert_is_ignored_and_the_prefix_optional(reference, build):
    case = reference("BertModel", num_key_value_heads=4)
    assert any(name.startswith("pooler.") for name, _ in case.weights())
    wanted = torch.cat(build(case.config, case.weights()).step(PROMPT))
    prefixed = [(f"bert.{name}", tensor) for name, tensor in case.weights()]
    assert torch.equal(torch.cat(build(case.config, prefixed).step(PROMPT)), wanted)


def test_dummy_weights_depend_on_seed_and_name_alone(build, llama_config):
    first, same, other = (build(llama_config, seed=seed) for seed in (1, 1, 2))
    wanted = torch.cat(first.step(PROMPT))
    assert torch.equal(torch.cat(same.step(PROMPT)), wanted)
    assert not torch.equal(torch.cat(other.step(PROMPT)), wanted)
    deeper = build({**llama_config, "num_hidden_layers": 3}, seed=1).model
    assert torch.equal(deeper._layers[1].out.packed.weight, first.model._layers[1].out.packed.weight)
    assert not torch.equal(deeper._layers[1].out.packed.weight, first.model._layers[0].out.packed.weight)


def test_dummy_weights_are_laid_out_where_their_numbers_were_put():
    loader, put = WeightLoader("a model", prefix="", ignored=()), []
    loader.expect({"a": (3, 5)}, torch.bfloat16, lambda tensor: None)
    loader.expect({"b": (7,)}, torch.bfloat16, lambda tensor: None)

    def place(numbers: torch.Tensor) -> torch.Tensor:
        put.append(len(numbers))
        return numbers.to("meta")

    there = dict(loader.dummy(0, 1e-3, place))
    assert len(put) == 1
    assert {(name, tensor.device.type, tuple(tensor.shape)) for name, tensor in there.items()} == {
        ("a", "meta", (3, 5)),
        ("b", "meta", (7,)),
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dummy_models_of_every_architecture_give_finite_states(architecture, reference, build):
    config = reference(architecture, head_dim=12).config
    assert torch.cat(build(config).step(PROMPT)).isfinite().all()


def test_a_loader_holds_no_more_than_the_unfinished_merges():
    """Parts of two merged tensors interleaved: each is handed over, and let go, with its last part."""
    taken = {}
    loader = WeightLoader("m", prefix="", ignored=())
    for layer in "ab":
        loader.expect(
            {f"{layer}.q": (2, 3), f"{layer}.k": (1, 3)}, torch.float32, lambda t, layer=layer: taken.update({layer: t})
        )
    stream = iter(
        [("a.k", torch.full((1, 3), 2.0)), ("b.q", torch.ones(2, 3)), ("a.q", torch.ones(2, 3)), ("b.k", torch.zeros(1, 3))]
    )

    def watched():
        yield from islice(stream, 3)
        assert set(taken) == {"a"}
        assert not loader._targets["a.q"].parts
        yield from stream

    loader.load(watched())
    assert torch.equal(taken["a"], torch.tensor([[1.0] * 3, [1.0] * 3, [2.0] * 3]))
    assert torch.equal(taken["b"], torch.tensor([[1.0] * 3, [1.0] * 3, [0.0] * 3]))


def test_a_single_tensor_of_the_right_dtype_is_adopted_without_a_copy():
    taken = []
    loader = WeightLoader("m", prefix="", ignored=())
    loader.expect({"w": (2, 3)}, torch.float32, taken.append)
    tensor = torch.ones(2, 3)
    loader.load([("w", tensor)])
    assert taken[0].data_ptr() == tensor.data_ptr()


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5), order=st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_merged_tensors_are_stacked_in_the_registered_order(sizes, order):
    taken = []
    loader = WeightLoader("m", prefix="p.", ignored=())
    parts = {f"t{i}": torch.full((n, 2), float(i)) for i, n in enumerate(sizes)}
    loader.expect({name: tuple(t.shape) for name, t in parts.items()}, torch.float32, taken.append)
    stream = [(order.choice(["p.", ""]) + name, tensor) for name, tensor in parts.items()]
    order.shuffle(stream)
    loader.load(stream)
    assert torch.equal(taken[0], torch.cat(list(parts.values())))
