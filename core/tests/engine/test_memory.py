"""Splitting memory over KV groups: what fits, what does not, and with which figures the error says so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_core.api import KVGroupSpec, KVLayout, MemoryStats
from vllm_core.engine.memory import GroupMemory, MemoryRequest, kv_bytes, size_kv
from vllm_core.errors import MemoryBudgetError

BLOCK = 1024


def group(window: int | None = None, layers: int = 2, size: int = 16, index: int = 0) -> GroupMemory:
    spec = KVGroupSpec(
        index=index,
        kind="full" if window is None else "window",
        layers=tuple(range(layers)),
        num_kv_heads=1,
        head_size=8,
        window=window,
    )
    return GroupMemory(spec, KVLayout(layout_id="x", dtype="float32", tokens_per_block=size, block_bytes=BLOCK))


def request(**changes: object) -> MemoryRequest:
    values = {
        "max_model_len": 1024,
        "explicit_len": True,
        "chunk": 256,
        "absolute_bytes": None,
        "utilization": 0.5,
        "override_blocks": None,
    }
    return MemoryRequest(**{**values, **changes})


def stats(total: int = 1 << 24, available: int = 1 << 24, own: int = 0) -> MemoryStats:
    return MemoryStats(total, available, {"weights": own}, own)


def test_utilization_is_of_the_total_less_own_allocations() -> None:
    assert kv_bytes(request(utilization=0.5), stats(total=1000, available=900, own=100)) == 400


def test_available_memory_is_an_upper_bound() -> None:
    assert kv_bytes(request(utilization=1.0), stats(total=1000, available=300)) == 300


@pytest.mark.parametrize("available", [900, 450])
def test_what_is_allocated_after_the_kv_cache_comes_out_of_the_same_share(available) -> None:
    assert kv_bytes(request(utilization=0.5, later_bytes=150), stats(total=1000, available=available, own=50)) == 300
    assert kv_bytes(request(utilization=0.5, later_bytes=600), stats(total=1000, available=available, own=50)) == 0


def test_absolute_size_overrides_the_utilization() -> None:
    assert kv_bytes(request(absolute_bytes=12345), stats(total=10, available=10)) == 12345


def test_one_full_group_takes_all_blocks_that_fit() -> None:
    budget = size_kv(request(absolute_bytes=100 * 2 * BLOCK + 7), [group()], stats())
    assert budget.num_blocks == (100,)
    assert budget.size_bytes == 100 * 2 * BLOCK


def test_a_context_asked_for_that_does_not_fit_names_bytes_needed_and_had() -> None:
    had = 10 * 2 * BLOCK
    with pytest.raises(MemoryBudgetError) as caught:
        size_kv(request(absolute_bytes=had), [group()], stats())
    assert str(had) in caught.value.found
    assert "144 tokens" in caught.value.found
    assert str((1024 // 16 + 1) * 2 * BLOCK) in caught.value.expected
    assert caught.value.fix == "lower --max-model-len to 144, or raise --kv-cache-memory-bytes"


def test_what_did_not_size_the_cache_is_not_offered() -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        size_kv(request(override_blocks=10), [group()], stats())
    assert caught.value.fix == "lower --max-model-len to 144, or raise --num-gpu-blocks-override"
    with pytest.raises(MemoryBudgetError) as caught:
        size_kv(request(), [group()], stats(available=10 * 2 * BLOCK))
    assert caught.value.fix == "lower --max-model-len to 144, or raise --kv-cache-memory-bytes or --device-memory-utilization"


def test_an_error_says_what_the_plan_chose_that_the_bytes_depend_on() -> None:
    """field-reports 43: the cache did not fit, and nothing told whose cache it was."""
    with pytest.raises(MemoryBudgetError, match=r"max_model_len 1024 \(platform p; full KV of q in fp8\)"):
        size_kv(request(absolute_bytes=BLOCK, chosen="platform p; full KV of q in fp8"), [group()], stats())


def test_a_context_nobody_asked_for_is_cut_to_what_fits() -> None:
    budget = size_kv(request(absolute_bytes=10 * 2 * BLOCK, explicit_len=False), [group()], stats())
    assert budget.max_model_len == 9 * 16


def test_a_context_is_not_cut_to_nothing() -> None:
    with pytest.raises(MemoryBudgetError):
        size_kv(request(absolute_bytes=5 * 2 * BLOCK, explicit_len=False), [group()], stats())


def test_nothing_at_all_is_an_error_with_a_fix() -> None:
    with pytest.raises(MemoryBudgetError, match="raise --kv-cache-memory-bytes"):
        size_kv(request(absolute_bytes=100), [group()], stats())


def test_a_window_group_gets_fewer_blocks_than_the_full_one_but_holds_a_sequence() -> None:
    groups = [group(), group(window=64, layers=10, index=1)]
    budget = size_kv(request(absolute_bytes=1 << 24), groups, stats())
    full, window = budget.num_blocks
    assert window < full
    assert window - 1 >= groups[1].blocks_for(1024, 256)


def test_a_model_of_windows_alone_uses_the_whole_budget() -> None:
    budget = size_kv(request(absolute_bytes=200 * 2 * BLOCK), [group(window=64)], stats())
    assert budget.num_blocks == (200,)


def test_an_encoder_needs_no_memory() -> None:
    assert size_kv(request(), [], stats()).num_blocks == ()


def test_too_few_blocks_that_were_asked_for_are_named_as_the_cause() -> None:
    with pytest.raises(MemoryBudgetError, match="num-gpu-blocks-override"):
        size_kv(request(override_blocks=3), [group()], stats())


def test_number_of_blocks_can_be_set() -> None:
    assert size_kv(request(override_blocks=70), [group()], stats()).num_blocks == (70,)


@given(
    budget=st.integers(0, 1 << 22),
    layers=st.integers(1, 8),
    window=st.one_of(st.none(), st.integers(1, 600)),
    length=st.integers(1, 4096),
    chunk=st.integers(1, 512),
)
def test_what_is_given_never_exceeds_the_budget_and_holds_the_context(
    budget: int, layers: int, window: int | None, length: int, chunk: int
) -> None:
    groups = [group(layers=1), group(window=window, layers=layers, index=1)]
    asked = request(absolute_bytes=budget, max_model_len=length, chunk=min(chunk, length), explicit_len=False)
    try:
        out = size_kv(asked, groups, stats())
    except MemoryBudgetError:
        return
    assert out.size_bytes <= budget
    assert out.max_model_len <= length
    for count, g in zip(out.num_blocks, groups, strict=True):
        assert count - 1 >= g.blocks_for(out.max_model_len, min(chunk, out.max_model_len)) or g.spec.window is not None
