"""Exchanged modules within steps: how many ops they call, and of which rows."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import AutoConfig

from vllm_core.models import catalog
from vllm_core.models.build import build_model

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROMPT = [5, 6, 7, 8, 9]


def config_of(kind, architecture):
    return {**AutoConfig.for_model(kind, **SIZES).to_dict(), "architectures": [architecture]}


def counting(ops):
    """Reference ops that count their calls, those of fused ops once."""
    calls, get = Counter(), ops.get

    def counted(op, role):
        found = get(op, role)

        def call(*arguments):
            calls[op] += 1
            return found(*arguments)

        return call

    ops.get = counted
    return calls


def test_a_step_calls_the_ops_that_the_agnostic_track_calls(track):
    """No code of transformers is left between them: Qwen3 as it is, five ops a layer."""
    made = []

    class Counted(track.reference_ops):
        def __init__(self):
            super().__init__()
            made.append(counting(self))

    config = config_of("qwen3", "Qwen3ForCausalLM")
    runner = track.rewired(config, None, ops=Counted())
    made[0].clear()
    runner.step([(runner.sequence(PROMPT), 5)])
    agnostic_ops = Counted()
    spec = catalog.describe(config, dtype="float32", pooling=None)
    model = build_model(spec, track.host_device(), agnostic_ops, max_tokens=64, max_model_len=64)
    model.load_dummy(0)
    made[1].clear()
    other = track.runner(model, spec, agnostic_ops)
    other.step([(other.sequence(PROMPT), 5)])
    assert made[0] == made[1]
    assert sum(made[0].values()) == 5 * 3 + 3, "an embedding, a norm and a head beside the layers"


@pytest.mark.parametrize("wanted", [[1, 4], [4], []])
@pytest.mark.parametrize(("kind", "architecture"), [("llama", "LlamaForCausalLM"), ("gemma", "GemmaForCausalLM")])
def test_of_the_last_layer_only_wanted_rows_come_back(track, kind, architecture, wanted):
    """Gemma's body keeps its own code, which scales embeddings; Llama's does not."""
    runner = track.rewired(config_of(kind, architecture), None)
    assert (runner.model._stack is None) == (kind == "gemma")
    whole = runner.step([(runner.sequence(PROMPT), 5)]).clone()
    rows = torch.tensor(wanted, dtype=torch.int64)
    sequence = runner.sequence(PROMPT)
    some = runner.model.forward(runner._inputs([(sequence, 5)]), runner.kv, rows)
    torch.testing.assert_close(some, whole[rows], atol=1e-5, rtol=0)
    runner.step([(sequence, 5)])
    torch.testing.assert_close(sequence.logits[0][-1], runner_logits(runner, whole[-1:])[0], atol=1e-5, rtol=0)


def runner_logits(runner, rows):
    out = torch.empty(len(rows), runner.spec.vocab_size)
    runner.model.logits(out, rows)
    return out


def test_dummy_weights_keep_to_their_bound(track):
    runner = track.rewired(config_of("llama", "LlamaForCausalLM"), None, bound=1e-3)
    weight = runner.model._stack._embedding
    assert 0.9e-3 < float(weight.abs().max()) <= 1e-3
