"""`top` reads metrics as a server writes them, and shows rates and percentiles of what is new."""

from __future__ import annotations

from rich.console import Console

from vllm_core.cli import top

PAGE = """\
# TYPE vllm:platform info
vllm:platform_info{{model_name="m",platform="cpu",device="EPYC",architecture="avx2",dtype="float32",kv_dtype="fp8"}} 1.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="m"}} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{model_name="m"}} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{model_name="m"}} 0.25
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{model_name="m"}} {tokens}
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{le="0.1",model_name="m"}} {fast}
vllm:time_to_first_token_seconds_bucket{{le="1.0",model_name="m"}} {all}
vllm:time_to_first_token_seconds_bucket{{le="+Inf",model_name="m"}} {all}
vllm:time_to_first_token_seconds_count{{model_name="m"}} {all}
vllm:time_to_first_token_seconds_sum{{model_name="m"}} 1.0
"""


def looked(at: float, **values: float) -> top.Look:
    found = top.look(PAGE.format(**values))
    found.at = at
    return found


def shown(before: top.Look, now: top.Look) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - closed below
    console.print(top.view({"http://x": before}, {"http://x": now}))
    console.file.close()
    return console.export_text()


def test_rates_and_percentiles_are_of_what_is_new() -> None:
    text = shown(looked(10, tokens=100, fast=50, all=50), looked(12, tokens=160, fast=52, all=54))
    assert "3 running, 2 waiting" in text
    assert "30.0 generated" in text
    assert "25.0 % in use" in text
    assert "median up to 0.1 s, 99 % up to 1 s" in text
    assert "cpu: EPYC, avx2" in text


def test_counters_of_a_server_that_started_again_are_no_negative_rates() -> None:
    assert "0.0 generated" in shown(looked(10, tokens=100, fast=5, all=5), looked(11, tokens=4, fast=0, all=0))


def test_a_server_without_an_engine_is_shown_as_such() -> None:
    page = "\n".join(PAGE.format(tokens=0, fast=0, all=0).splitlines()[:2])
    assert "is starting, or gone" in shown(top.look(page), top.look(page))
