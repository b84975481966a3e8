"""The vendor's ops: schemas as published, documented rules enforced, mathematics against formulas written here."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path

import pytest

from vllm_simulator.npu import dispatch

ATTENTION = """
import torch_npu
n = torch_npu
torch.manual_seed(0)
blocks, size, heads, kv_heads, d = 6, 128, 4, 2, 64
q = torch.randn(5, heads, d).half()
keys, values = (torch.randn(blocks, size, kv_heads * d).half() for _ in range(2))
table, mask = torch.tensor([[3, 0], [5, 1]], dtype=torch.int32), torch.ones(2048, 2048, dtype=torch.int8).triu(1)
on = lambda *all_: [one.npu() for one in all_]
def call(q=q, keys=keys, table=table, mask=mask, ends=(2, 5), lengths=(2, 130), **more):
    options = dict(atten_mask=mask.npu(), actual_seq_lengths=list(ends), actual_seq_lengths_kv=list(lengths),
        block_table=table.npu(), num_heads=heads, num_key_value_heads=kv_heads, scale=d**-0.5, input_layout="TND",
        sparse_mode=3, block_size=size)
    return n.npu_fused_infer_attention_score(*on(q, keys, values), **{**options, **more})[0].cpu()
found = call()
k1 = keys[torch.tensor([5, 1])].view(256, kv_heads, d)[:130].float().repeat_interleave(2, 1)
v1 = values[torch.tensor([5, 1])].view(256, kv_heads, d)[:130].float().repeat_interleave(2, 1)
wanted = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in (q[2:].float(), k1, v1)),
    attn_mask=torch.ones(3, 130).tril(127).bool())[0].transpose(0, 1)
out["difference"] = (found[2:].float() - wanted).abs().max().item()
out["float32"] = said(lambda: call(q.float(), keys.float()))
out["block size"] = said(lambda: call(block_size=64))
out["layout"] = said(lambda: call(input_layout="XYZ"))
out["mask"] = said(lambda: call(mask=mask[:128, :128].contiguous()))
out["sums"] = said(lambda: call(ends=(2, 4)))
out["short table"] = said(lambda: call(lengths=(2, 300)))
out["strided"] = said(lambda: n.npu_fused_infer_attention_score(q.npu().transpose(0, 1), *on(keys, values), input_layout="TND",
    block_table=table.npu(), actual_seq_lengths=[4], actual_seq_lengths_kv=[4], num_heads=5, num_key_value_heads=5,
    block_size=size))
x, gamma = torch.randn(3, 8).half().npu(), torch.ones(8).half().npu()
out["unknown keyword"] = said(lambda: n.npu_rms_norm(x, gamma, eps=1e-6))
out["wider gamma"] = said(lambda: n.npu_rms_norm(x, gamma.float()))
out["host tensor"] = said(lambda: n.npu_rms_norm(x.cpu(), gamma.cpu()))
out["not simulated"] = said(lambda: n.npu_fast_gelu(x))
w = torch.arange(32 * 16).view(32, 16).half().npu()
nz = n.npu_format_cast(w, 29)
out["formats"] = [n.get_npu_format(w), n.get_npu_format(nz), n.get_npu_format(nz.t())]
out["product"] = torch.equal(torch.mm(torch.eye(16).half().npu(), nz.t()).cpu(), w.t().cpu())
out["read"] = said(lambda: nz + 1)
out["ragged"] = said(lambda: n.npu_format_cast(torch.ones(20, 16).half().npu(), 29))
groups = torch.tensor([1, 2], dtype=torch.int64).npu()
weights = torch.randn(2, 8, 4).half()
y = n.npu_grouped_matmul([x], [weights.npu()], group_list=groups, split_item=2, group_type=0, group_list_type=1)[0].cpu()
out["grouped"] = (y[1:].float() - x.cpu()[1:].float() @ weights[1].float()).abs().max().item()
out["one group"] = said(lambda: n.npu_grouped_matmul([x], [weights[:1].npu()], group_list=groups[:1], split_item=2,
    group_type=0, group_list_type=1))
out["groups of int32"] = said(lambda: n.npu_grouped_matmul([x], [weights.npu()], group_list=groups.int(), split_item=2,
    group_type=0, group_list_type=1))
shares, chosen, _ = n.npu_moe_gating_top_k_softmax(torch.tensor([[1.0, 3.0, 1.0], [2.0, 2.0, 0.0]]).npu(), k=2)
out["chosen"] = chosen.cpu().tolist()
def routed(rows=x[:2], **more):
    given = dict(active_num=4, expert_num=3, expert_tokens_num_type=1, expert_tokens_num_flag=True, active_expert_range=[0, 3])
    return n.npu_moe_init_routing_v2(rows, chosen, **{**given, **more})
rows, places, counts, _ = routed()
out["places"], out["counts"] = places.cpu().tolist(), counts.cpu().tolist()
out["rows"] = torch.equal(rows[places].cpu(), x[:2].cpu().repeat_interleave(2, 0))
back = n.npu_moe_finalize_routing(rows, None, None, None, shares.half(), places.view(2, 2).t().reshape(-1), None)
out["back"] = (back.cpu().float() - x[:2].cpu().float() * shares.cpu().sum(1, keepdim=True)).abs().max().item()
out["no counts"] = said(lambda: routed(expert_tokens_num_flag=False))
out["scales in float32"] = said(lambda: n.npu_moe_finalize_routing(rows, None, None, None, shares, places, None))
single, there = q[:2].npu(), on(keys, values, mask, table)
def captured(graph, **more):
    with torch.npu.graph(graph, **more):
        return n.npu_fused_infer_attention_score(single, *there[:2], atten_mask=there[2], block_table=there[3],
            actual_seq_lengths=[1, 2], actual_seq_lengths_kv=[1, 1], num_heads=heads, num_key_value_heads=kv_heads,
            scale=d**-0.5, input_layout="TND", sparse_mode=3, block_size=size)[0]
fixed, graph = torch.npu.NPUGraph(), torch.npu.NPUGraph()
old, new = captured(fixed), captured(graph, auto_dispatch_capture=True)
out["no update"] = said(lambda: fixed.update([{"actual_seq_lengths_kv": [5, 130]}]))
graph.update([{"actual_seq_lengths": [1, 2], "actual_seq_lengths_kv": [5, 130]}])
fixed.replay(), graph.replay()
expected = [call(q[:2], ends=(1, 2), lengths=one) for one in ((1, 1), (5, 130))]
out["captured lengths"] = [torch.equal(found.cpu(), one) for found, one in zip((old, new), expected)]
out["too many updates"] = said(lambda: graph.update([{}, {}, {}]))
q8, s = n.npu_dynamic_quant(x)
out["quantised"] = (q8.cpu().float() * s.cpu()[:, None] - x.cpu().float()).abs().max().item()
"""


@pytest.fixture(scope="module")
def answers(found_on):
    """What a child on an NPU found out."""
    return found_on(ATTENTION, pose="npu", memory_mib=256)


def test_attention_over_pages_is_attention(answers):
    assert answers["difference"] < 2e-3


def test_lengths_of_a_captured_launch_change_where_it_was_captured_for_that(answers):
    assert answers["captured lengths"] == [True, True]


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ("no update", "does not support update"),
        ("too many updates", "1 launches need to be updated"),
        ("float32", "float16 or bfloat16"),
        ("block size", "a multiple of 128"),
        ("layout", "not simulated"),
        ("mask", "2048 x 2048"),
        ("sums", "running sums end with T"),
        ("short table", "its table 2"),
        ("strided", "contiguous"),
        ("unknown keyword", "Unknown keyword argument 'eps'"),
        ("wider gamma", "gamma has x's dtype"),
        ("host tensor", "CPU"),
        ("not simulated", "NotImplementedError"),
        ("read", "only products do"),
        ("one group", "more than one group"),
        ("groups of int32", "int64 [G]"),
        ("no counts", "the flag is True"),
        ("scales in float32", "scales have the rows' dtype"),
        ("ragged", "multiples of 16 and 16"),
    ],
)
def test_a_broken_rule_is_refused(answers, question, text):
    assert text in answers[question]


def test_a_weight_keeps_its_format_and_products_read_it(answers):
    assert answers["formats"] == [2, 29, 29]
    assert answers["product"]


def test_grouped_products_and_quantisation(answers):
    assert answers["grouped"] < 1e-2
    assert answers["quantised"] < 0.03


def test_rows_go_to_their_experts_and_come_back(answers):
    assert answers["chosen"] == [[1, 0], [0, 1]]
    assert (answers["places"], answers["counts"]) == ([2, 0, 1, 3], [2, 2, 0])
    assert answers["rows"]
    assert answers["back"] < 5e-3


def functions():
    from vllm_simulator.npu import attention, cache, moe, norm, quant, rotary

    assert all((attention, cache, moe, norm, quant, rotary))
    return sorted(dispatch.OPS)


@pytest.mark.parametrize("name", functions())
def test_a_simulated_op_has_the_names_and_defaults_of_its_schema(name):
    schema = dispatch.schemas()[name]
    text = schema[schema.index("(") + 1 : schema.index(") ->")]
    published = re.findall(
        r"(?:Tensor(?:\([a-z]!\))?|SymInt|ScalarType|int|float|bool|str)[\[\]\d?]* (\w+)(?:=([^,]+))?(?:,|$)", text
    )
    parameters = inspect.signature(dispatch.OPS[name]).parameters
    own = {one: parameter.default for one, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD}
    assert [one for one, _ in published if one in own] == list(own)
    takes_more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    assert takes_more or len(published) == len(own)
    for one, default in published:
        if one in own and default:
            assert own[one] == pytest.approx(_value(default))


def _value(text: str) -> object:
    known: dict[str, object] = {"None": None, "False": False, "True": True, "[]": ()}
    if text in known:
        return known[text]
    return text.strip('"') if text.startswith('"') else float(text)


@pytest.mark.slow
def test_the_data_file_is_what_the_wheel_registers():
    from vllm_simulator.npu.extract import published

    wheel = os.environ.get("TORCH_NPU_WHEEL")
    if not wheel:
        pytest.skip("TORCH_NPU_WHEEL names no file: pip download --no-deps torch-npu==2.13.0")
    assert dict(published(Path(wheel))) == dict(dispatch.schemas())
