"""Which modules a trial recognises, and that what it does not know is left as transformers wrote it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from vllm_core.models import transformers_track
from vllm_core.models.transformers_track import recognise, recognise_attention, trial
from vllm_core.models.transformers_track.findings import NOTHING, Findings

SIZES = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MHA = {"num_key_value_heads": 4}


def describe(kind, **changes):
    config = AutoConfig.for_model(kind, **{**SIZES, **changes})
    return transformers_track.describe({**config.to_dict(), "architectures": None}, dtype="float32", path="here")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("qwen2", {}),  # biases
        ("qwen3", {"head_dim": 16}),  # norms on q and k
        ("phi3", {}),  # queries, keys and values in one layer, gate and up in another
        ("smollm3", {"no_rope_layers": [1, 0]}),  # a layer without rotary embedding
        ("helium", {"head_dim": 16}),  # neighbours rotated together
        ("glm", {"head_dim": 16}),  # half of each head rotated
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    ],
)
def test_pre_norm_decoders_are_run_as_a_whole(kind, changes):
    found = describe(kind, **changes).findings
    assert [form.attention.layer for form in found.layers] == [0, 1]
    assert found.chain is not None
    assert found.narrows
    assert (found.head, found.waits, found.failure) == ("lm_head", "", "")


def test_each_layer_is_rotated_as_it_is():
    layers = describe("smollm3", no_rope_layers=[1, 0]).findings.layers
    assert [form.attention.rotary is not None for form in layers] == [True, False]
    assert all(form.attention.rotary.interleaved for form in describe("helium", head_dim=16).findings.layers)
    assert describe("glm", head_dim=16).findings.layers[0].attention.rotary.fraction == 0.5


@pytest.mark.parametrize(
    ("kind", "changes", "counts"),
    [  # attentions, MLPs, norms
        ("gemma2", {"head_dim": 16}, (2, 2, 9)),  # four norms a layer
        ("cohere2", {}, (2, 2, 0)),  # both sub-layers read one layer norm
        ("gpt_neox", MHA, (2, 0, 0)),  # queries, keys and values of a head side by side, no gate
        ("olmo2", {}, (0, 2, 9)),  # norms over all heads
        ("granite", {"residual_multiplier": 0.5}, (2, 2, 5)),  # the sum is not plain
    ],
)
def test_parts_of_other_decoders_are_exchanged_one_by_one(kind, changes, counts):
    found = describe(kind, **changes).findings
    assert (len(found.attentions), len(found.mlps), len(found.norms)) == counts
    assert (found.layers, found.chain) == ((), None)


GPT_OSS = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}


def test_sinks_are_the_parameter_that_attention_is_given():
    spec = describe("gpt_oss", **GPT_OSS)
    assert [(form.sinks, form.rotary.pairs) for form in spec.findings.attentions] == [("sinks", "once")] * 2
    assert [layer.sinks for layer in spec.layers] == [True, True]
    features = {site.role: site.features for site in spec.call_sites("float32") if site.op == "qk_norm_rope_attention"}
    assert features == {"kv.0.full": {"sinks"}, "kv.1.window": {"sinks", "sliding_window"}}
    assert not any(layer.sinks for layer in describe("gemma2", head_dim=16).layers)


def test_layers_with_sinks_are_run_as_a_whole_where_nothing_else_is_foreign():
    spec = describe("granite_swa", sliding_window=6)
    assert [form.attention.sinks for form in spec.findings.layers] == ["sinks", "sinks"]
    assert spec.findings.chain is not None


def test_rows_of_heads_side_by_side_are_put_in_order():
    assert describe("gpt_neox", **MHA).findings.attentions[0].order == "groups"
    rows = recognise_attention.order_rows("groups", 4, 2, 3)
    q, k, v = (part.tolist() for part in rows.split([12, 6, 6]))
    assert (q[:6], q[6:]) == (list(range(6)), list(range(12, 18)))
    assert (k, v) == ([6, 7, 8, 18, 19, 20], [9, 10, 11, 21, 22, 23])


def test_limits_on_activations_show():
    """OLMo's `clip_qkv` changes nothing at numbers of usual size."""
    assert len(describe("olmo", **MHA).findings.attentions) == 2
    assert not describe("olmo", **MHA, clip_qkv=8.0).findings.attentions


def test_scaled_logits_keep_their_head():
    assert describe("granite").findings.head
    assert not describe("granite", logits_scaling=2.0).findings.head
    assert not describe("gemma2", head_dim=16).findings.head, "its logits are capped"


def test_planned_ops_are_those_of_what_was_found():
    def ops(kind, **changes):
        return {site.op for site in describe(kind, **changes).call_sites("float32")}

    assert {"rms_norm_linear", "linear_add", "rms_norm_gated_linear", "embedding", "rotary_embedding"} <= ops("llama")
    assert "decode_layers" not in ops("llama"), "the class goes from layer to layer"
    assert not ops("gpt_neox", **MHA) & {"gated_linear", "linear_add", "embedding", "add_rms_norm"}
    features = {site.op: site.features for site in describe("helium", head_dim=16).call_sites("float32")}
    assert features["qk_norm_rope_kv_write"] == features["rotary_embedding"] == {"interleaved"}


def test_workers_that_share_a_model_exchange_nothing():
    part = describe("llama").shard(2)
    assert part.findings == NOTHING
    assert "shared by workers" in part.notes()[0]


def test_class_that_does_not_run_small_is_left_as_it_is_with_the_reason():
    found = describe("gptj", rotary_dim=64).findings
    assert found == Findings(failure=found.failure)
    assert "RuntimeError" in found.failure
    assert found.failure in found.lines(2)[0]


def small_model(kind="llama"):
    return trial.small_model(AutoConfig.for_model(kind, **SIZES), headless=False, seed=0, gain=1.0)


def recognised(model):
    """Findings of a model that was changed; one record is enough where nothing is clamped."""
    spec = describe("llama")
    return recognise.recognise([trial.run(model, [0, 3, 4, 9], waits=True)], spec, headless=False)


class Asking(nn.Module):
    """Asks the device, then does what it did, and a little more."""

    def __init__(self, inner, ask):
        super().__init__()
        self.inner, self.ask = inner, ask

    def forward(self, x):
        self.ask(x)
        return self.inner(x) * 2


ASKS = {
    "item": lambda x: x.sum().item(),
    "is_nonzero": lambda x: bool(x.sum() > 0),
    "nonzero": torch.nonzero,
    "index": lambda x: x[x > 0],
    "resolve_conj": lambda x: x.tolist(),
}


@pytest.mark.parametrize("op", ASKS)
def test_code_that_waits_for_the_device_is_not_captured_and_named(op):
    model = small_model()
    model.model.norm = Asking(model.model.norm, ASKS[op])
    found = recognised(model)
    assert found.waits == f"model.norm calls {op}"
    assert "no step is captured" in found.lines(2)[1]


def test_waiting_in_what_is_exchanged_does_not_count():
    """Rotary embeddings that change with the longest position ask for it in each step."""
    model = small_model()
    model.model.norm = Asking(model.model.norm, lambda x: None)  # so that the body's own code stays
    rotary = model.model.rotary_emb
    rotary.forward = lambda x, position_ids, call=rotary.forward: call(x, position_ids * bool(position_ids.max() > 0))
    found = recognised(model)
    assert found.silent == ("model.rotary_emb",)
    assert (found.chain, found.waits) == (None, "")


def test_modules_with_more_parameters_than_the_form_are_left():
    model = small_model()
    model.model.layers[0].self_attn.indexer = nn.Linear(4, 4)
    model.model.layers[1].mlp.router = nn.Linear(4, 4)
    found = recognised(model)
    assert [form.layer for form in found.attentions] == [1]
    assert (found.mlps[0].path, len(found.mlps), found.layers) == ("model.layers.0.mlp", 1, ())


def test_rotary_module_that_somebody_else_reads_stays():
    class Reads(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, hidden, position_embeddings, **others):
            return self.layer(hidden, position_embeddings=position_embeddings, **others) + position_embeddings[0].mean()

    model = small_model()
    model.model.layers[1] = Reads(model.model.layers[1])
    found = recognised(model)
    assert found.silent == ()
    assert found.chain is None


def test_norm_whose_epsilon_is_not_where_it_seems_is_left():
    class Odd(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(size)), 1e-6

        def forward(self, x):
            return x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * self.weight

    model = small_model()
    model.model.norm = Odd(len(model.model.norm.weight))
    assert "model.norm" not in [norm.path for norm in recognised(model).norms]
