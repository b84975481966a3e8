"""A compiled model: one graph whatever the steps, the tokens of the model that is not compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from vllm_core import SamplingParams
from vllm_core.errors import ConfigError

GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
PROMPTS = [[7], [40, 41], list(range(30, 77)), [11, 12, 13] * 6]

made: list[torch.fx.GraphModule] = []


@torch._dynamo.register_backend
def kept(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """A compiler that compiles nothing: it keeps the graph."""
    made.append(graph)
    return graph.forward


@pytest.fixture
def graphs() -> Iterator[list[torch.fx.GraphModule]]:
    made.clear()
    yield made
    made.clear()


def calls(graph: torch.fx.GraphModule) -> list[str]:
    """Names of the opaque ops, in order."""
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return [name.split(".")[1].rpartition("_")[0] for name in names if name.startswith("vllm_core_")]


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers(name, make_model, tmp_path, engines, run, graphs):
    architecture, changes = MODELS[name]
    model = make_model(tmp_path, architecture, **changes)
    llm = engines(model, compile="kept", max_num_batched_tokens=16)
    assert llm.plan.compiler == "kept"
    assert run(llm, PROMPTS, GREEDY) == [model.greedy(prompt, 10) for prompt in PROMPTS]
    # All rows wanted, some, and a single token.
    assert 1 <= len(graphs) <= 3
    for prompt in PROMPTS:
        assert run(llm, [prompt], GREEDY) == [model.greedy(prompt, 10)]
    assert run(llm, PROMPTS[::-1] * 3, GREEDY) == [model.greedy(prompt, 10) for prompt in PROMPTS[::-1]] * 3
    assert len(graphs) <= 3


def test_windows_and_sandwich_norms(gemma, engines, run, graphs):
    llm = engines(gemma, compile="kept", max_num_batched_tokens=32)
    prompts = [list(range(20, 70)), [9, 8, 7]]
    assert run(llm, prompts, GREEDY) == [gemma.greedy(prompt, 10) for prompt in prompts]
    assert 1 <= len(graphs) <= 4


def test_a_graph_is_the_whole_model(llama, engines, run, graphs):
    run(engines(llama, compile="kept"), PROMPTS, GREEDY)
    assert graphs
    for graph in graphs:
        names = calls(graph)
        assert names[0] == "embedding"
        assert sum(name.endswith("attention") for name in names) == 2
        assert len([name for name in names if "linear" in name]) == 2 * 4


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("options", [{}, {"provider": {"all": "reference"}}], ids=["kernels", "references"])
def test_inductor_makes_the_same_tokens(llama, engines, run, options):
    llm = engines(llama, compile="inductor", **options)
    assert run(llm, PROMPTS, GREEDY) == [llama.greedy(prompt, 10) for prompt in PROMPTS]


def test_a_quantised_table_reaches_its_op(make_model, tmp_path, engines, run, graphs):
    model = make_model(tmp_path, "LlamaForCausalLM", hidden_size=64, tie_word_embeddings=True)
    plain, compiled = (engines(model, quantization="int8", compile=name) for name in (None, "kept"))
    assert run(compiled, PROMPTS, GREEDY) == run(plain, PROMPTS, GREEDY)
    assert graphs
    for graph in graphs:
        assert any("embedding" in str(node.target) and "quantised" in str(node.target) for node in graph.graph.nodes)


def test_two_workers_compile(llama, engines, run):
    llm = engines(llama, tensor_parallel_size=2, compile="eager")
    assert run(llm, PROMPTS[:2], GREEDY) == [llama.greedy(prompt, 10) for prompt in PROMPTS[:2]]


def test_hidden_states_are_those_without(llama, engines, graphs):
    plain, compiled = (engines(llama, runner="pooling", compile=name) for name in (None, "kept"))
    want, found = (
        torch.tensor([out.outputs.embedding for out in llm.embed(PROMPTS, use_tqdm=False)]) for llm in (plain, compiled)
    )
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
    assert 1 <= len(graphs) <= 2


def test_more_engines_than_torch_keeps_graphs_of_a_function(llama, engines, run, graphs):
    for _ in range(torch._dynamo.config.recompile_limit // 2 + 1):
        run(engines(llama, compile="kept"), PROMPTS[:2], GREEDY)
    assert len(graphs) > torch._dynamo.config.recompile_limit


def test_an_unknown_compiler_is_named(llama, engines):
    with pytest.raises(ConfigError, match="--compile inducter") as raised:
        engines(llama, compile="inducter")
    assert "inductor" in raised.value.fix


def test_no_compiler_is_no_name_of_one(llama, engines):
    with pytest.raises(ConfigError, match="compile"):
        engines(llama, compile="")


def test_the_transformers_track_is_not_compiled(llama, engines):
    with pytest.raises(ConfigError, match="track transformers"):
        engines(llama, model_impl="transformers", compile="eager")
