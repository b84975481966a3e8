"""Flags are the settings: each has one, aliases work, and only what was set comes back."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_core.cli.main import Parser
from vllm_core.cli.options import add_engine_options, add_sampling_options, engine_options, sampling_options
from vllm_core.config import EngineConfig, option_owners
from vllm_core.errors import ConfigError
from vllm_core.sampling_params import SamplingParams


def parse(*argv: str) -> dict[str, Any]:
    parser = Parser(prog="p")
    add_engine_options(parser)
    return engine_options(parser.parse_args(list(argv)))


def sampling(*argv: str) -> dict[str, Any]:
    parser = Parser(prog="p")
    add_sampling_options(parser, max_tokens=99)
    add_engine_options(parser)
    return sampling_options(parser.parse_args(list(argv)))


def test_every_setting_has_a_flag_with_help() -> None:
    parser = Parser(prog="p")
    add_engine_options(parser)
    shown = parser.format_help()
    for name in option_owners():
        assert f"--{name.replace('_', '-')}" in shown
    for action in parser._actions:
        assert action.help, f"{action.dest} has no help"


def test_settings_that_are_left_out_have_no_flag() -> None:
    parser = Parser(prog="p")
    add_engine_options(parser, leave_out={"model"})
    assert "--model " not in parser.format_help()


def test_nothing_is_set_that_was_not_given() -> None:
    assert parse() == {}
    assert parse("--max-num-seqs", "8") == {"max_num_seqs": "8"}


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--max-num-seqs", "8"], "max_num_seqs", 8),
        (["--gpu-memory-utilization", "0.5"], "device_memory_utilization", 0.5),
        (["--device-memory-utilization", "0.5"], "device_memory_utilization", 0.5),
        (["--tensor-parallel-size", "1"], "tensor_parallel_size", 1),
        (["-tp", "1"], "tensor_parallel_size", 1),
        (["--enable-prefix-caching"], "enable_prefix_caching", True),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--async-scheduling"], "async_scheduling", True),
        (["--no-async-scheduling"], "async_scheduling", False),
        (["--provider", "linear=reference", "--provider", "kv=cpu"], "provider", {"linear": "reference", "kv": "cpu"}),
        (["--deny-provider", "a", "--deny-provider", "b"], "deny_provider", ["a", "b"]),
        (["--device-ids", "GPU-1"], "device_ids", ["GPU-1"]),
        (["--served-model-name", "a", "--served-model-name", "b"], "served_model_name", ["a", "b"]),
        (["--hf-overrides", '{"rope_theta": 5}'], "hf_overrides", {"rope_theta": 5}),
        (["--override-generation-config", '{"top_k": 5}'], "override_generation_config", {"top_k": 5.0}),
        (["--attention-backend", "a"], "provider", {"paged_attention": "a"}),
        (["--attention-backend", "a", "--provider", "linear=b"], "provider", {"paged_attention": "a", "linear": "b"}),
        (["-dp", "2"], "data_parallel_size", 2),
        (["-q", "int8"], "quantization", "int8"),
        (["--kv-cache-memory-bytes", "1000000"], "kv_cache_memory_bytes", 1_000_000),
        (["--dtype", "bfloat16"], "dtype", "bfloat16"),
        (["--max-num-seqs", "8", "--max-num-seqs", "9"], "max_num_seqs", 9),
    ],
)
def test_flags_become_settings(argv: list[str], name: str, value: Any) -> None:
    config = EngineConfig.from_options({"model": "m", **parse(*argv)})
    group = getattr(config, option_owners()[name])
    assert getattr(group, name) == value
    assert name in group.model_fields_set, "what the user sets is explicit"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--max-num-seqs", "many"], "max_num_seqs"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--device-memory-utilization", "nan"], "device_memory_utilization"),
        (["--provider", "linear"], "OP=NAME"),
        (["--provider", "=x"], "OP=NAME"),
        (["--hf-overrides", "{"], "--hf-overrides"),
        (["--hf-overrides", "[1]"], "a JSON object"),
        (["--hf-overrides", "[" * 100_000], "--hf-overrides"),
        (["--override-generation-config", '{"top_kk": 5}'], "top_k"),
        (["--override-generation-config", '{"top_k": "many"}'], "override_generation_config"),
        (["--trust-remote-code"], "trust_remote_code"),
        (["--dtype", "int3"], "int3"),
        (["--tensor-parallel-size", "0"], "tensor_parallel_size"),
    ],
)
def test_wrong_values_are_config_errors(argv: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        EngineConfig.from_options({"model": "m", **parse(*argv)})


def test_sampling_flags_become_sampling_params() -> None:
    argv = "--max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 3 --min-p 0.1 --min-tokens 1 --seed 7 --ignore-eos"
    penalties = "--repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3 --stop a --stop b"
    assert SamplingParams(**sampling(*argv.split(), *penalties.split())) == SamplingParams(
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        min_tokens=1,
        seed=7,
        ignore_eos=True,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        stop=["a", "b"],
    )


def test_only_the_limit_has_a_default_of_the_command() -> None:
    assert sampling() == {"max_tokens": 99}


def test_a_seed_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="--seed"):
        sampling("--seed", "lucky")
