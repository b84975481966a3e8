"""Requests come, go and fail without a trace in the engine."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_core import PoolingParams, SamplingParams
from vllm_core.engine.binding import ProviderFailedError
from vllm_core.errors import ConfigError, RequestError

PROMPT = [(17 * i + 2) % 250 for i in range(30)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

ACTS_ONCE = """
from vllm_core.ops.norm import rms_norm as reference

action, after, log = None, 0, []

def fail():
    raise RuntimeError("no such shape")

def rms_norm(*arguments):
    global after, action
    after -= 1
    if action is not None and after < 0:
        act, action = action, None
        act()
    reference(*arguments)
"""


def armed(model, engines, site, **options):
    """An engine, and the module of its norm, which can be told to do something at a later call: a replay makes none."""
    site.kernels("armed", {"rms_norm": "rms_norm"}, ACTS_ONCE)
    llm = engines(model, max_num_seqs=2, enable_prefix_caching=False, enforce_eager=True, **options)
    assert llm.plan.binding("rms_norm", "norm").provider == "armed"
    return llm, sys.modules[site.modules[-1]]


def idle(llm):
    """Nothing runs, waits or owns a block or slot."""
    stats = llm.get_metrics()
    slots = len(llm._core.scheduler._slots)
    return (stats.running, stats.waiting, stats.kv_usage, slots) == (
        0,
        0,
        0.0,
        llm._engine.blueprint.config.scheduler.max_num_seqs,
    )


def served(outputs):
    """Indices by the time they waited."""
    return sorted(range(len(outputs)), key=lambda i: outputs[i].metrics["queue_s"])


def test_priorities_decide_who_runs_first(llama, engines):
    llm = engines(llama, scheduling_policy="priority", max_num_seqs=1)
    outputs = llm.generate([PROMPT] * 4, GREEDY, priority=[3, 0, -5, 0], use_tqdm=False)
    assert served(outputs) == [2, 1, 3, 0]
    assert {tuple(o.outputs[0].token_ids) for o in outputs} == {tuple(llama.greedy(PROMPT, 12))}


def test_first_come_first_served_takes_no_priority(llama, engines):
    llm = engines(llama, max_num_seqs=1)
    assert served(llm.generate([PROMPT] * 3, GREEDY, priority=[0, 0, 0], use_tqdm=False)) == [0, 1, 2]
    with pytest.raises(RequestError, match="priority") as caught:
        llm.generate([PROMPT] * 3, GREEDY, priority=[0, 1, 0], use_tqdm=False)
    assert "scheduling_policy='priority'" in caught.value.fix


def test_under_memory_pressure_the_least_important_request_is_preempted(llama, engines):
    llm = engines(
        llama,
        scheduling_policy="priority",
        num_gpu_blocks_override=12,
        kv_cache_memory_bytes=None,
        block_size=8,
        max_model_len=80,
    )
    outputs = llm.generate([PROMPT, [1, *PROMPT]], GREEDY.replace(max_tokens=40), priority=[1, 0], use_tqdm=False)
    assert llm.get_metrics().preemptions > 0
    assert outputs[1].metrics["decode_s"] < outputs[0].metrics["decode_s"]
    assert outputs[0].outputs[0].token_ids == llama.greedy(PROMPT, 40)


@pytest.mark.parametrize(
    "values", [{"priority": [1]}, {"sampling_params": [GREEDY]}, {"sampling_params": [GREEDY] * 3}], ids=str
)
def test_lists_of_another_length_are_refused(shared, values):
    with pytest.raises(RequestError, match="2 prompts"):
        shared.generate([PROMPT, PROMPT], use_tqdm=False, **values)


def test_closing_a_stream_ends_its_request(shared, run, llama):
    stream = shared.stream(PROMPT, GREEDY.replace(max_tokens=200))
    seen = [list(next(stream).outputs[0].token_ids) for _ in range(3)]
    assert seen[2][:2] == seen[1]
    stream.close()
    assert idle(shared)
    assert run(shared, [PROMPT], GREEDY) == [llama.greedy(PROMPT, 12)]


def test_a_step_ahead_is_read_before_its_request_goes(llama, engines, run):
    llm = engines(llama, async_scheduling=True)
    stream = llm.stream(PROMPT, GREEDY.replace(max_tokens=200))
    next(stream)
    stream.close()
    assert idle(llm)
    assert run(llm, [PROMPT], GREEDY) == [llama.greedy(PROMPT, 12)]


def test_an_abandoned_batch_ends_with_its_block(shared):
    with shared.open_batch([(PROMPT, GREEDY), ([5, *PROMPT], GREEDY)]) as batch:
        batch.advance()
    assert idle(shared)


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A job that a shell starts in the background ignores SIGINT, and so would everything here."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("after", [0, 7, 23])
def test_an_interrupt_leaves_the_engine_usable(llama, engines, site, run, asynchronous, after):
    """Ctrl-C in the midst of a step: the step ends first."""
    llm, kernels = armed(llama, engines, site, async_scheduling=asynchronous)
    kernels.action, kernels.after = lambda: signal.raise_signal(signal.SIGINT), after
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT, PROMPT, PROMPT], GREEDY, use_tqdm=False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert idle(llm)
    assert run(llm, [PROMPT] * 3, GREEDY) == [llama.greedy(PROMPT, 12)] * 3


def test_an_interrupt_ends_a_stream(llama, engines, site, run):
    llm, kernels = armed(llama, engines, site)
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    kernels.action, kernels.after = lambda: signal.raise_signal(signal.SIGINT), 1
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert idle(llm)
    assert run(llm, [PROMPT], GREEDY) == [llama.greedy(PROMPT, 12)]


def test_a_second_interrupt_does_not_wait(llama, engines, site):
    """For a step that does not end."""
    llm, kernels = armed(llama, engines, site)

    def twice():
        signal.raise_signal(signal.SIGINT)
        kernels.log.append("the first one waits")
        signal.raise_signal(signal.SIGINT)
        kernels.log.append("the second one does not")

    kernels.action, kernels.after = twice, 3
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert kernels.log == ["the first one waits"]


def test_other_handlers_of_interrupts_are_left_alone(llama, engines, site, run):
    llm, kernels = armed(llama, engines, site)
    kernels.action, kernels.after = lambda: signal.raise_signal(signal.SIGINT), 3
    before = signal.signal(signal.SIGINT, lambda number, frame: kernels.log.append(number))
    try:
        assert run(llm, [PROMPT], GREEDY) == [llama.greedy(PROMPT, 12)]
    finally:
        signal.signal(signal.SIGINT, before)
    assert kernels.log == [signal.SIGINT]


def test_generation_works_in_another_thread(llama, shared, run):
    """Where handlers cannot be set."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run, shared, [PROMPT], GREEDY).result() == [llama.greedy(PROMPT, 12)]


def test_a_provider_that_fails_in_a_batch_is_named(llama, engines, site):
    """Offline there is no other process to start: the batch fails, with whose fault it was."""
    llm, kernels = armed(llama, engines, site)
    kernels.action, kernels.after = kernels.fail, 10
    with pytest.raises(ProviderFailedError, match="provider armed") as caught:
        llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert "no such shape" in caught.value.found
    assert "--deny-provider armed" in caught.value.fix


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_batch_leaves_nothing_behind(llama, engines, site, asynchronous):
    llm, kernels = armed(llama, engines, site, async_scheduling=asynchronous)
    kernels.action, kernels.after = kernels.fail, 10
    with pytest.raises(ProviderFailedError):
        llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert idle(llm)


@pytest.mark.parametrize(
    ("wrong", "mentions"),
    [
        ([1, 257], "257"),
        ([], "empty"),
        ("", "empty"),
        ([1] * 256, "256 tokens"),
        ([-1], "-1"),
        ([True], "True"),
        ("a\ud800", "surrogate"),
    ],
    ids=["id", "nothing", "no text", "too long", "negative", "boolean", "surrogate"],
)
def test_one_wrong_prompt_disturbs_nothing(llama, shared, run, wrong, mentions):
    with pytest.raises(RequestError, match=mentions):
        shared.generate([PROMPT, wrong, PROMPT], GREEDY, use_tqdm=False)
    assert idle(shared)
    assert run(shared, [PROMPT], GREEDY) == [llama.greedy(PROMPT, 12)]


def test_prompts_in_every_form(llama, shared, run):
    ids = shared.get_tokenizer().encode("abc")
    expected = [llama.greedy(ids, 12)]
    for prompt in ("abc", ids, tuple(ids), {"prompt": "abc"}, {"prompt_token_ids": ids}):
        assert run(shared, [prompt], GREEDY) == expected
    assert run(shared, "abc", GREEDY) == expected
    assert run(shared, ids, GREEDY) == expected
    assert run(shared, {"prompt": "abc"}, GREEDY) == expected


def test_outputs_come_in_the_order_of_the_prompts(llama, shared):
    prompts = [PROMPT[: 3 * i + 1] for i in range(9)]
    params = [GREEDY.replace(max_tokens=12 - i) for i in range(9)]
    outputs = shared.generate(prompts, params, use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == list(range(12, 3, -1))
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)


def test_no_prompts_are_no_outputs(shared):
    assert shared.generate([], GREEDY, use_tqdm=False) == []


@pytest.mark.parametrize(
    ("prompts", "values"),
    [
        (b"abc", {}),
        ([PROMPT], {"sampling_params": PoolingParams()}),
        ([PROMPT], {"sampling_params": 5}),
        ([PROMPT], {"sampling_params": {"max_tokens": 3}}),
        ([PROMPT], {"priority": ["first"]}),
    ],
    ids=str,
)
def test_arguments_of_a_wrong_type_are_refused_in_four_parts(shared, prompts, values):
    with pytest.raises(RequestError) as caught:
        shared.generate(prompts, use_tqdm=False, **values)
    assert caught.value.expected
    assert idle(shared)


def test_after_the_shutdown_every_call_says_so(llama, engines):
    llm = engines(llama)
    llm.shutdown()
    calls = (llm.reset_prefix_cache, llm.sleep, llm.wake_up, lambda: llm.open_batch([(PROMPT, GREEDY)]))
    for call in calls:
        with pytest.raises(ConfigError, match="shut down"):
            call()
