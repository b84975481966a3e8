"""The attention function at transformers' border, and the comparison of modules with the plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AttentionInterface

from vllm_core.errors import ModelConfigError
from vllm_core.models import transformers_track
from vllm_core.models.transformers_track import attention
from vllm_core.models.transformers_track.model import _accepted_extras, _check


class Recorder:
    """A step that remembers its call and answers with the values."""

    calls = 0

    def attend(self, module, q, k, v, masks):
        self.seen = (q, k, v, masks)
        return v


@pytest.fixture
def tensors():
    """Query, key and value as transformers has them: [1, heads, 5 tokens, 8]."""
    return [torch.randn(1, heads, 5, 8) for heads in (4, 2, 2)]


@pytest.fixture
def spec():
    config = {
        "model_type": "olmo2",
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    return transformers_track.describe(config, dtype="float32", path="here")


def test_tensors_reach_the_step_by_token_and_contiguous(tensors):
    step = Recorder()
    out, weights = attention.attention_forward(nn.Module(), *tensors, None, scaling=0.5, vllm_core_step=step)
    q, k, v, *_ = step.seen
    assert [tuple(t.shape) for t in (q, k, v)] == [(5, 4, 8), (5, 2, 8), (5, 2, 8)]
    assert all(t.is_contiguous() for t in (q, k, v))
    assert torch.equal(q[3, 1], tensors[0][0, 1, 3])
    assert out.shape == (1, 5, 2, 8)
    assert torch.equal(out[0, 3, 1], tensors[2][0, 1, 3])
    assert weights is None


def test_arguments_left_out_mean_plain_attention(tensors):
    step = Recorder()
    attention.attention_forward(nn.Module(), *tensors, None, vllm_core_step=step)
    assert step.seen[3] == attention.Masks(8**-0.5, 0, 0.0, None)


def test_window_cap_and_scale_are_the_model_s(tensors):
    step = Recorder()
    options = {"scaling": 0.1, "sliding_window": 7, "softcap": 30.0, "dropout": 0.0, "position_ids": None}
    attention.attention_forward(nn.Module(), *tensors, None, vllm_core_step=step, **options)
    assert step.seen[3] == attention.Masks(0.1, 7, 30.0)


def test_sinks_reach_the_step_in_float32(tensors):
    step, sinks = Recorder(), torch.randn(4)
    attention.attention_forward(nn.Module(), *tensors, None, s_aux=sinks, vllm_core_step=step)
    assert step.seen[3].sinks is sinks, "what is float32 already is not copied in each step"
    attention.attention_forward(nn.Module(), *tensors, None, s_aux=sinks.bfloat16(), vllm_core_step=step)
    assert torch.equal(step.seen[3].sinks, sinks.bfloat16().float())


@pytest.mark.parametrize(
    ("mask", "options", "why"),
    [
        (None, {"vllm_core_step": None}, "keyword arguments"),
        (torch.zeros(1, 1, 5, 5), {}, "mask or bias"),
        (None, {"position_bias": torch.zeros(1)}, "mask or bias"),
    ],
)
def test_attention_that_the_op_cannot_express_is_refused(tensors, mask, options, why):
    with pytest.raises(ModelConfigError, match=why):
        attention.attention_forward(nn.Module(), *tensors, mask, **{"vllm_core_step": Recorder(), **options})


def test_registering_twice_changes_nothing():
    attention.register()
    before = dict(AttentionInterface().items())
    attention.register()
    assert dict(AttentionInterface().items()) == before
    assert before[attention.NAME] is attention.attention_forward


class Attention(nn.Module):
    """What transformers' attention modules have in common."""

    def __init__(self, layer_idx, is_causal=True):
        super().__init__()
        self.layer_idx, self.is_causal = layer_idx, is_causal


def test_one_causal_attention_in_each_layer_is_accepted(spec):
    _check(spec, nn.ModuleList([Attention(0), Attention(1)]))


@pytest.mark.parametrize(
    ("modules", "why"),
    [
        ([Attention(0)], r"layers \[0\]"),
        ([Attention(0), Attention(0)], r"layers \[0, 0\]"),
        ([Attention(0), Attention(1), Attention(2)], r"layers \[0, 1, 2\]"),
        ([Attention(0), Attention(1, is_causal=False)], "bidirectional"),
        ([Attention(0), Attention(1), nn.Conv1d(4, 4, 3)], "convolutions"),
    ],
)
def test_other_modules_than_planned_are_refused(spec, modules, why):
    with pytest.raises(ModelConfigError, match=why):
        _check(spec, nn.ModuleList(modules))


def test_model_that_takes_no_positions_is_refused(spec):
    class Body(nn.Module):
        def get_decoder(self):
            return self

        def forward(self, input_ids, use_cache=None):
            return input_ids

    with pytest.raises(ModelConfigError, match="position_ids"):
        _accepted_extras(spec, Body())


@pytest.mark.parametrize(
    ("options", "why"), [({"sliding_window": 7}, "window 7"), ({"s_aux": torch.zeros(4)}, "attention sinks")]
)
def test_encoder_steps_refuse_windows_and_sinks(spec, tensors, options, why):
    step = attention.EncoderStep(spec, call=None, inputs=None)
    with pytest.raises(ModelConfigError, match=why):
        attention.attention_forward(nn.Module(), *tensors, None, vllm_core_step=step, **options)
