"""Where checkpoints keep experts: names of each layout, stacked tensors taken apart, what does not fit refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from vllm_core.errors import ModelConfigError, WeightsError
from vllm_core.layers.experts import canonical, each_expert
from vllm_core.layers.weights import WeightLoader
from vllm_core.models import catalog
from vllm_core.ops import quant

COUNT, HIDDEN, INNER = 4, 32, 64
NAME = "model.layers.3.mlp.experts"


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def apart(weights) -> Mapping[str, torch.Tensor]:
    return dict(each_expert(weights, COUNT))


def test_names_of_mixtral_are_those_of_other_models() -> None:
    layer = "model.layers.3.block_sparse_moe"
    assert canonical(f"{layer}.gate.weight") == "model.layers.3.mlp.gate.weight"
    assert canonical(f"{layer}.experts.12.w1.weight") == f"{NAME}.12.gate_proj.weight"
    assert canonical(f"{layer}.experts.12.w3.weight") == f"{NAME}.12.up_proj.weight"
    assert canonical(f"{layer}.experts.12.w2.weight") == f"{NAME}.12.down_proj.weight"
    for same in ("model.norm.weight", "layers.0.mlp.gate_proj.weight", f"{layer}.experts.1.w4.weight"):
        assert canonical(same) == same


def test_stacked_experts_are_taken_apart_gates_before_ups() -> None:
    both, down = numbers(COUNT, 2 * INNER, HIDDEN), numbers(COUNT, HIDDEN, INNER)
    found = apart([(f"{NAME}.gate_up_proj", both), (f"{NAME}.down_proj", down), ("model.norm.weight", numbers(3))])
    assert len(found) == 3 * COUNT + 1
    for expert in range(COUNT):
        assert torch.equal(found[f"{NAME}.{expert}.gate_proj.weight"], both[expert, :INNER])
        assert torch.equal(found[f"{NAME}.{expert}.up_proj.weight"], both[expert, INNER:])
        assert torch.equal(found[f"{NAME}.{expert}.down_proj.weight"], down[expert])


@pytest.mark.parametrize("format_", ["q8_0", "q4_1", "int8_channel", "int4_group"])
def test_packed_stacks_are_taken_apart_by_rows(format_) -> None:
    whole = numbers(COUNT * INNER, HIDDEN)
    found = apart([(f"{NAME}.up_proj.weight", quant.quantize(whole, format_))])
    expected = quant.quantize(whole, format_)
    for expert, rows in enumerate(quant.dequantize(expected).chunk(COUNT)):
        one = found[f"{NAME}.{expert}.up_proj.weight"]
        assert one.shape == (INNER, HIDDEN)
        assert torch.equal(quant.dequantize(one), rows)


@pytest.mark.parametrize(
    ("tensor", "says"),
    [(numbers(COUNT + 1, HIDDEN, INNER), "does not have"), (numbers(COUNT - 1, HIDDEN, INNER), "missing"),
     (numbers(COUNT, INNER, HIDDEN), "shape"), (numbers(COUNT, 5), "shape"),
     (quant.quantize(numbers(COUNT * HIDDEN + 2, INNER), "q8_0"), "shape")],
)  # fmt: skip
def test_stacks_that_do_not_fit_the_model_are_refused(tensor, says) -> None:
    loader = WeightLoader("M", prefix="model.", ignored=())
    names = [f"layers.3.mlp.experts.{expert}.down_proj.weight" for expert in range(COUNT)]
    loader.expect(dict.fromkeys(names, (HIDDEN, INNER)), torch.float32, lambda weight: None)
    with pytest.raises(WeightsError, match=says):
        loader.load(each_expert([(f"{NAME}.down_proj", tensor)], COUNT))


def test_configs_that_no_router_could_follow_are_refused() -> None:
    sizes = {"vocab_size": 67, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"architectures": ["MixtralForCausalLM"], **sizes, "max_position_embeddings": 64, "num_local_experts": 2}
    with pytest.raises(ModelConfigError, match="num_experts_per_tok") as caught:
        catalog.describe({**config, "num_experts_per_tok": 3}, dtype="float32")
    assert "at most num_local_experts (2)" in str(caught.value)
