"""Options: unknown ones are errors with the nearest name, explicit ones are remembered, environment is checked."""

import pytest

from vllm_core.config import KNOWN_ENVIRONMENT, EngineConfig, check_environment, option_owners
from vllm_core.errors import ConfigError, UnknownOptionError


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(UnknownOptionError, match="max_num_seqs"):
        EngineConfig.from_options({"model": "m", "max_num_seq": 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_seqs", "many"),
        ("block_size", -16),
        ("dtype", "float8"),
        ("kv_cache_dtype", "int3"),
        ("device_memory_utilization", 1.5),
        ("kv_cache_memory_bytes", 0),
        ("scheduling_policy", "lifo"),
        ("trust_remote_code", True),
        ("tensor_parallel_size", 0),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_expected(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options({"model": "m", name: value})
    assert caught.value.on == name
    assert caught.value.found == repr(value)
    assert not caught.value.expected.startswith("Value error")


def test_names_that_users_of_vllm_know_are_accepted() -> None:
    config = EngineConfig.from_options({"model": "m", "gpu_memory_utilization": 0.5})
    assert config.cache.device_memory_utilization == 0.5


def test_one_option_under_two_names_is_refused() -> None:
    options: dict[str, object] = {"model": "m", "gpu_memory_utilization": 0.5, "device_memory_utilization": 0.4}
    with pytest.raises(ConfigError, match="given twice"):
        EngineConfig.from_options(options)


def test_no_two_groups_share_an_option() -> None:
    assert len(option_owners()) == sum(len(type(group).model_fields) for _, group in EngineConfig.from_options({"model": "m"}))


def test_changes_by_a_platform_do_not_count_as_explicit() -> None:
    config = EngineConfig.from_options({"model": "m", "max_num_seqs": 8})
    changed = config.with_changes({"block_size": 32, "max_num_seqs": 9})
    assert changed.cache.block_size == 32
    assert "block_size" not in changed.cache.model_fields_set
    assert changed.scheduler.model_fields_set == {"max_num_seqs"}
    assert config.cache.block_size is None, "settings are frozen"


def test_changes_are_checked_like_options() -> None:
    with pytest.raises(ValueError, match="block_size"):
        EngineConfig.from_options({"model": "m"}).with_changes({"block_size": -1})


def test_an_unknown_variable_of_ours_is_an_error_with_the_nearest() -> None:
    with pytest.raises(UnknownOptionError, match="VLLM_CORE_CACHE"):
        check_environment({"VLLM_CORE_CACHES": "x"})


def test_variables_of_other_projects_are_mentioned() -> None:
    assert check_environment({"VLLM_USE_V1": "1", "VLLM_PLATFORM": "cpu", "HOME": "/"}) == ["VLLM_USE_V1"]


def test_known_variables_pass() -> None:
    assert check_environment(dict.fromkeys(KNOWN_ENVIRONMENT, "x")) == []
