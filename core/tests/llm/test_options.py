"""Options of the engine are honoured and visible in the Plan; what is not an option is refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from vllm_core import PoolingParams, SamplingParams
from vllm_core.api import is_available
from vllm_core.errors import ConfigError, PlanError, RequestError, UnknownOptionError
from vllm_core.registry.load import open_platform

PROMPT = [(17 * i + 2) % 250 for i in range(30)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_stay_close(llama, engines, one, dtype):
    """Log-probabilities of the prompt against float32."""
    llm = engines(llama, dtype=dtype)
    assert (llm.plan.dtype, llm.plan.kv_dtype) == (dtype, dtype)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (out,) = llm.generate([PROMPT], params, use_tqdm=False)
    found = torch.tensor([e[t].logprob for e, t in zip(out.prompt_logprobs[1:], PROMPT[1:], strict=True)])
    expected = llama.logits(PROMPT).log_softmax(1)[torch.arange(29), torch.tensor(PROMPT[1:])]
    assert 0 < (found - expected).abs().max() < 0.3
    assert (found - expected).abs().mean() < 0.05


def test_the_kv_cache_has_a_dtype_of_its_own(llama, engines, run):
    llm = engines(llama, kv_cache_dtype="bfloat16")
    assert (llm.plan.dtype, llm.plan.kv_dtype) == ("float32", "bfloat16")
    assert {group.layout.dtype for group in llm.plan.kv_groups} == {"bfloat16"}
    wide = engines(llama)
    assert llm._engine.budget.num_blocks[0] > 1.9 * wide._engine.budget.num_blocks[0]
    assert len(run(llm, [PROMPT], GREEDY)[0]) == 8


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_a_kv_cache_of_eight_bits_takes_less_and_generates_or_is_refused_by_name(llama, engines, run, dtype):
    whole = engines(llama)
    if not is_available(open_platform(whole.plan).manifest.claims[f"kv_dtype.{dtype}"]):
        with pytest.raises(PlanError, match=rf"kv_dtype\.{dtype} is unsupported"):
            engines(llama, kv_cache_dtype=dtype)
        return
    llm = engines(llama, kv_cache_dtype=dtype)
    assert llm.plan.kv_dtype == dtype
    assert llm.plan.kv_groups[0].layout.block_bytes < whole.plan.kv_groups[0].layout.block_bytes
    (tokens,) = run(llm, [PROMPT], GREEDY)
    assert len(tokens) == len(run(whole, [PROMPT], GREEDY)[0])


@pytest.mark.parametrize("size", [1, 24, 128])
def test_the_block_size_asked_for(gemma, engines, run, size):
    llm = engines(gemma, block_size=size)
    assert {group.layout.tokens_per_block for group in llm.plan.kv_groups} == {size}
    assert run(llm, [PROMPT], GREEDY) == [gemma.greedy(PROMPT, 8)]


def test_the_dtype_of_the_checkpoint_is_the_default(llama, engines):
    assert engines(llama, dtype="auto").plan.dtype == "float32"


def test_memory_asked_for_is_memory_taken(llama, engines):
    llm = engines(llama, kv_cache_memory_bytes=1_000_000)
    assert 0.9 * 1_000_000 < llm._engine.budget.size_bytes <= 1_000_000
    assert engines(llama, kv_cache_memory_bytes=None, num_gpu_blocks_override=40)._engine.budget.num_blocks == (40,)


def test_names_that_users_of_vllm_know(llama, engines):
    llm = engines(llama, kv_cache_memory_bytes=None, gpu_memory_utilization=0.01)
    assert llm._engine.blueprint.config.cache.device_memory_utilization == 0.01


def test_an_unknown_option_has_a_nearest_name(llama, engines):
    with pytest.raises(UnknownOptionError, match="did you mean 'max_num_seqs'"):
        engines(llama, max_num_sequences=4)


def test_random_weights_from_a_config_alone(llama, tmp_path, engines, run):
    shutil.copyfile(llama.path / "config.json", tmp_path / "config.json")
    first, second, other = (engines(tmp_path, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert run(first, [PROMPT], GREEDY) == run(second, [PROMPT], GREEDY)
    assert run(first, [PROMPT], GREEDY) != run(other, [PROMPT], GREEDY)


def test_without_a_tokenizer_token_ids_are_all_there_is(llama, engines):
    llm = engines(llama, skip_tokenizer_init=True)
    (out,) = llm.generate([PROMPT], GREEDY.replace(logprobs=1), use_tqdm=False)
    assert out.outputs[0].token_ids == llama.greedy(PROMPT, 8)
    assert out.outputs[0].text == ""
    assert next(iter(out.outputs[0].logprobs[0].values())).decoded_token is None
    with pytest.raises(RequestError, match="tokenizer"):
        llm.generate(["text"], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="bad_words"):
        llm.generate([PROMPT], GREEDY.replace(bad_words=["x"]), use_tqdm=False)
    with pytest.raises(ConfigError, match="no tokenizer"):
        llm.get_tokenizer()


def test_stop_strings_need_a_tokenizer(llama, engines):
    """An option is never ignored."""
    llm = engines(llama, skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="stop"):
        llm.generate([PROMPT], GREEDY.replace(stop="x"), use_tqdm=False)


def test_stop_strings_need_text(shared):
    with pytest.raises(RequestError, match="stop"):
        shared.generate([PROMPT], GREEDY.replace(stop="x", detokenize=False), use_tqdm=False)


def test_without_detokenizing_there_are_tokens_and_no_text(llama, shared, one):
    out = one(shared, PROMPT, temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    assert (out.token_ids, out.text) == (llama.greedy(PROMPT, 8), "")


def test_special_tokens_are_shown_when_asked_for(shared, one):
    values = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True, "logit_bias": {256: 100.0}}
    assert one(shared, PROMPT, **values).text == ""
    assert one(shared, PROMPT, skip_special_tokens=False, **values).text == "<|end|>"


def test_a_decoder_embeds_its_last_token(llama, engines):
    llm = engines(llama, runner="pooling")
    prompts = [PROMPT, PROMPT[:3], PROMPT[:17], [5]]
    outputs = llm.embed(prompts, use_tqdm=False)
    for prompt, out in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            hidden = llama.model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        expected = hidden / hidden.norm()
        torch.testing.assert_close(torch.tensor(out.outputs.embedding), expected, atol=1e-4, rtol=1e-4)
    (short,) = llm.embed([PROMPT], PoolingParams(dimensions=8), use_tqdm=False)
    cut = torch.tensor(outputs[0].outputs.embedding[:8])
    torch.testing.assert_close(torch.tensor(short.outputs.embedding), cut / cut.norm(), atol=1e-6, rtol=1e-6)


def test_an_engine_does_one_thing(llama, shared, engines):
    with pytest.raises(RequestError, match="runner 'pooling'"):
        shared.embed([PROMPT], use_tqdm=False)
    with pytest.raises(RequestError, match=r"use embed\(\)"):
        engines(llama, runner="pooling").generate([PROMPT], GREEDY, use_tqdm=False)


def test_chat_without_a_template_says_so(shared):
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(RequestError, match="no chat template") as caught:
        shared.chat(messages, GREEDY, use_tqdm=False)
    assert "--chat-template" in caught.value.fix


def test_chat_is_generation_from_the_rendered_text(llama, shared):
    several = [[{"role": "user", "content": text}] for text in ("hi", "hello there")]
    outputs = shared.chat(several, GREEDY, chat_template=TEMPLATE, use_tqdm=False)
    for messages, out in zip(several, outputs, strict=True):
        ids = shared.get_tokenizer().encode(f"<user>{messages[0]['content']}<assistant>")
        assert out.prompt_token_ids == ids
        assert out.outputs[0].token_ids == llama.greedy(ids, 8)
    (single,) = shared.chat(several[0], GREEDY, chat_template=TEMPLATE, use_tqdm=False)
    assert single.prompt_token_ids == outputs[0].prompt_token_ids


def test_the_engines_chat_template_is_the_default(llama, engines, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    messages = [{"role": "user", "content": "hi"}]
    for given in (TEMPLATE, str(file)):
        (out,) = engines(llama, chat_template=given).chat(messages, GREEDY, use_tqdm=False)
        assert bytes_of(out.prompt_token_ids, llama) == "<user>hi<assistant>"


def bytes_of(ids, tiny):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tiny.path / "tokenizer.json")).decode(ids)


def test_the_models_generation_config_is_the_default(llama, tmp_path, engines):
    folder = tmp_path / "model"
    shutil.copytree(llama.path, folder)
    values = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 5, "eos_token_id": [7, 256]}
    (folder / "generation_config.json").write_text(json.dumps(values))
    llm = engines(folder)
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 0.9, 20, 5)
    assert len(llm.generate([PROMPT], use_tqdm=False)[0].outputs[0].token_ids) <= 5
    stopped = llm.generate([PROMPT], SamplingParams(temperature=0.0, logit_bias={7: 100.0}), use_tqdm=False)[0].outputs[0]
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == ([7], "stop", None)


def test_without_a_generation_config_the_defaults_are_ours(shared):
    assert shared.get_default_sampling_params() == SamplingParams()


def test_whole_prompts_where_chunks_are_off(llama, engines, run):
    llm = engines(llama, enable_chunked_prefill=False, max_num_batched_tokens=256)
    prompts = [[i, *PROMPT] for i in range(12)]
    assert run(llm, prompts, GREEDY) == [llama.greedy(prompt, 8) for prompt in prompts]
    with pytest.raises(ConfigError, match="at least 256"):
        engines(llama, enable_chunked_prefill=False, max_num_batched_tokens=255)


def test_statistics_count_what_was_done(llama, engines):
    llm = engines(llama)
    llm.generate([PROMPT, [9, *PROMPT]], GREEDY, use_tqdm=False)
    stats = llm.get_metrics()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.finished) == (61, 16, {"length": 2})
    assert stats.steps == 8


def test_shutdown_gives_the_memory_back(llama, engines):
    llm = engines(llama)
    device = llm._engine.device
    assert sum(device.statistics().own_bytes.values()) > 1 << 20
    llm.shutdown()
    assert sum(device.statistics().own_bytes.values()) == 0
