"""Models with scaled rotary embeddings against transformers, short and beyond the length they were trained for."""

from __future__ import annotations

import random

import pytest
import torch

HALF = 6
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 10 for i in range(HALF)],
    "long_factor": [1.0 + 2 * i for i in range(HALF)],
    "original_max_position_embeddings": 32,
}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
# name: parameters, max_position_embeddings, longest sequence of the engine, tokens
CASES = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, 128, 128, 90),
    "dynamic-short": ({"rope_type": "dynamic", "factor": 2.0}, 128, 128, 90),
    "dynamic-long": ({"rope_type": "dynamic", "factor": 2.0}, 48, 90, 90),
    "llama3": ({"rope_type": "llama3", **LLAMA3}, 128, 128, 90),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128, 128, 90),
    "longrope-short": (LONGROPE, 128, 32, 30),
    "longrope-long": (LONGROPE, 128, 128, 90),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name, reference, build):
    parameters, positions, longest, count = CASES[name]
    case = reference(
        "LlamaForCausalLM",
        num_hidden_layers=2,
        max_position_embeddings=positions,
        rope_parameters={"rope_theta": 1000.0, **parameters},
    )
    tokens = random.Random(3).choices(range(3, 67), k=count)
    sequences = build(case.config, case.weights(), max_model_len=longest)
    got = torch.cat([sequences.logits([(0, tokens[i : i + 13])])[0] for i in range(0, count, 13)])
    torch.testing.assert_close(got, case.logits(tokens), atol=1e-4, rtol=1e-4)


def test_layers_with_one_rotary_embedding_share_a_table(reference, build):
    case = reference("Gemma3ForCausalLM", head_dim=16, sliding_window_pattern=2, num_hidden_layers=3)
    layers = build(case.config, case.weights()).model._layers
    assert layers[0]._table is layers[2]._table
    assert layers[0]._table is not layers[1]._table


def test_tables_reach_one_position_beyond_the_longest_sequence(llama_config, build):
    """A step in flight when a sequence ends still runs at the position after its last."""
    model = build(llama_config, max_model_len=50).model
    assert model._layers[0]._table.shape == (51, 2, 6)
