"""What one engine has computed of a prompt another continues: whatever the two caches look like, the tokens are the same."""

from __future__ import annotations

import pytest
import torch

from vllm_core import SamplingParams
from vllm_core.api import Device, is_available
from vllm_core.errors import MemoryBudgetError, RequestError, UnsupportedError
from vllm_core.registry.load import open_platform

PROMPT = [(17 * i + 5) % 250 for i in range(90)]
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
REFERENCE = {"provider": {"all": "reference"}}


@torch.inference_mode()
def contents(llm, prompt):
    """What the cache has of a prompt's whole blocks, per layer: float32 [N,2,tokens_per_block,Hk,D]."""
    tables, side, out = llm._core.scheduler.tables, llm._kv_side(), []
    digests: list[bytes] = []
    from vllm_core.engine import prefix

    prefix.extend(digests, prompt, tables.size, "")
    for group, pool in zip(side.groups, tables.pools, strict=True):
        found = [pool.find(digest) for digest in digests]
        blocks = side.indices([block for block in found if block]).clone()
        shape = (len(blocks), 2, tables.size, group.spec.num_kv_heads, group.spec.head_size)
        for layer in group.spec.layers:
            values = torch.zeros(shape, device=side.device.torch_device)
            side.op("kv_export", group)(values, side.program.kv[layer], blocks)
            out.append(values.cpu())
    return out


def free(llm):
    return [pool.num_free for pool in llm._core.scheduler.tables.pools]


@pytest.mark.parametrize(
    ("source", "target", "form", "route"),
    [
        ({}, {}, "raw", "auto"),
        ({}, {}, "raw", "host"),
        ({"block_size": 32}, {"block_size": 8}, "canonical", "auto"),
        ({"block_size": 8}, REFERENCE, "canonical", "host"),
    ],
)
def test_a_prompt_computed_here_is_continued_there(llama, engines, run, source, target, form, route):
    first, second = engines(llama, **source), engines(llama, **target)
    run(first, [PROMPT], ONE)
    done = first.send_kv(PROMPT, second, route=route)
    size = second.plan.kv_groups[0].layout.tokens_per_block
    assert done.num_tokens == done.num_copied
    assert done.num_tokens >= 64
    device = type(first._engine.device)
    assert done.route == ("host" if route == "host" or device.copy_to_peer is Device.copy_to_peer else "peer")
    assert done.num_tokens % size == 0
    if first.plan.kv_groups[0].layout != second.plan.kv_groups[0].layout:
        assert (done.form, bool(done.form_reason)) == ("canonical", True)
    else:
        assert done.form == form
    assert run(second, [PROMPT], GREEDY) == [llama.greedy(PROMPT, 16)]
    assert second.get_metrics().prefix_hits == min(done.num_tokens, (len(PROMPT) - 1) // size * size)
    assert run(first, [PROMPT], GREEDY) == [llama.greedy(PROMPT, 16)], "the source has lost nothing"


@pytest.mark.parametrize(("source", "target", "form"), [(8, 8, "auto"), (8, 16, "auto"), (24, 16, "canonical")])
def test_windows_are_continued_too(gemma, engines, run, source, target, form):
    """Their blocks before the window are gone, and nobody needs them."""
    first, second = (engines(gemma, block_size=size, **REFERENCE) for size in (source, target))
    run(first, [PROMPT], ONE)
    done = first.send_kv(PROMPT, second, form=form)
    assert done.num_tokens >= 24
    assert run(second, [PROMPT], GREEDY) == [gemma.greedy(PROMPT, 16)]
    assert second.get_metrics().prefix_hits > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "fp8_e5m2"])
def test_another_dtype_gets_what_it_would_have_been_rounded_to(llama, engines, run, dtype):
    first = engines(llama, **REFERENCE)
    if dtype == "fp8_e5m2" and not is_available(open_platform(first.plan).manifest.claims["kv_dtype.fp8"]):
        pytest.skip(f"{first.plan.platform} keeps no KV in fp8")
    second = engines(llama, kv_cache_dtype=dtype, **REFERENCE)
    run(first, [PROMPT], ONE)
    done = first.send_kv(PROMPT, second)
    assert (done.form, done.form_reason) == ("canonical", f"dtype float32 and {dtype}")
    narrow = torch.float8_e5m2 if dtype == "fp8_e5m2" else getattr(torch, dtype)
    for sent, arrived in zip(contents(first, PROMPT), contents(second, PROMPT), strict=True):
        assert torch.equal(sent.to(narrow).float(), arrived)
    back = engines(llama, **REFERENCE)
    assert second.send_kv(PROMPT, back).num_tokens == done.num_tokens
    for sent, arrived in zip(contents(second, PROMPT), contents(back, PROMPT), strict=True):
        assert torch.equal(sent, arrived)


def test_what_travels_raw_arrives_bit_by_bit(llama, engines, run):
    first, second = (engines(llama, kv_cache_dtype="bfloat16", **REFERENCE) for _ in range(2))
    run(second, [PROMPT[::-1]], ONE)  # so that blocks have other numbers
    run(first, [PROMPT], ONE)
    done = first.send_kv(PROMPT, second, form="raw")
    layout = first.plan.kv_groups[0].layout
    assert done.size_bytes == done.num_copied // layout.tokens_per_block * layout.block_bytes * 2
    for sent, arrived in zip(contents(first, PROMPT), contents(second, PROMPT), strict=True):
        assert torch.equal(sent, arrived)


def test_what_the_other_has_is_not_copied_again(llama, engines, run):
    first, second = engines(llama), engines(llama)
    size = first.plan.kv_groups[0].layout.tokens_per_block
    run(first, [PROMPT], ONE)
    run(second, [PROMPT[: 2 * size]], ONE)
    before = free(second)
    done = first.send_kv(PROMPT, second)
    assert (done.num_tokens, done.num_copied) == (90 // size * size, 90 // size * size - 2 * size)
    again = first.send_kv(PROMPT, second)
    assert (again.num_tokens, again.num_copied, again.size_bytes) == (done.num_tokens, 0, 0)
    assert free(second) == before, "cached blocks are free ones"
    assert first.send_kv(PROMPT, first).num_copied == 0


def test_caches_of_tenants_stay_apart(llama, engines, run):
    first, second = engines(llama), engines(llama)
    run(first, [PROMPT], ONE, cache_salt="one")
    assert first.send_kv(PROMPT, second).num_tokens == 0
    assert first.send_kv(PROMPT, second, cache_salt="one").num_tokens > 0
    assert run(second, [PROMPT], GREEDY) == [llama.greedy(PROMPT, 16)]
    assert second.get_metrics().prefix_hits == 0


def test_a_cache_that_is_too_small_is_left_as_it_was(llama, engines, run):
    first, second = engines(llama, block_size=8), engines(llama, block_size=8, num_gpu_blocks_override=8, max_model_len=48)
    run(first, [PROMPT], ONE)
    before = free(second)
    with pytest.raises(RequestError):
        second.send_kv(PROMPT, first)  # its own context does not hold the prompt
    with pytest.raises(MemoryBudgetError, match="7 free blocks"):
        first.send_kv(PROMPT, second)
    assert free(second) == before


def test_a_copy_that_fails_leaves_nothing_to_be_found(llama, engines, run, monkeypatch):
    first, second = engines(llama), engines(llama)
    run(first, [PROMPT], ONE)
    before = free(second)

    def fail(*arguments):
        raise RuntimeError("the link is down")

    with monkeypatch.context() as patch:
        patch.setattr("vllm_core.engine.transfer._Copy.__call__", fail)
        with pytest.raises(RuntimeError, match="link is down"):
            first.send_kv(PROMPT, second)
    assert free(second) == before
    assert run(second, [PROMPT], GREEDY) == [llama.greedy(PROMPT, 16)]
    assert second.get_metrics().prefix_hits == 0


def test_what_cannot_be_exchanged_is_refused(llama, gemma, engines, run):
    first, other, plain = engines(llama), engines(gemma), engines(llama, enable_prefix_caching=False)
    coarse = engines(llama, block_size=32, **REFERENCE)
    with pytest.raises(UnsupportedError, match="different models"):
        first.send_kv(PROMPT, other)
    with pytest.raises(UnsupportedError, match="no prefix cache"):
        first.send_kv(PROMPT, plain)
    with pytest.raises(UnsupportedError, match=r"layout_id|tokens_per_block"):
        first.send_kv(PROMPT, coarse, form="raw")
    with first.open_batch([(PROMPT, GREEDY)]), pytest.raises(RequestError, match="unfinished requests"):
        first.send_kv(PROMPT, coarse)
    assert run(coarse, [PROMPT], GREEDY) == [llama.greedy(PROMPT, 16)]


def test_engines_whose_workers_keep_the_kv_say_so(llama, engines):
    shared, one = engines(llama, tensor_parallel_size=2), engines(llama)
    with pytest.raises(UnsupportedError, match="LeadProgram"):
        shared.send_kv(PROMPT, one)


def test_engines_that_turn_positions_differently_do_not_exchange_keys(llama, engines, run):
    """Some RoPE scalings go by the longest sequence that an engine allows: the same checkpoint, and other keys."""
    scaled = {"hf_overrides": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}}
    first, same, longer = (engines(llama, max_model_len=length, **scaled) for length in (256, 512, 600))
    run(first, [PROMPT], ONE)
    assert first.send_kv(PROMPT, same).num_tokens >= 64, "neither is longer than what the model was trained for"
    with pytest.raises(UnsupportedError, match="256 and 600"):
        first.send_kv(PROMPT, longer)
    assert longer.get_metrics().prefix_hits == 0
