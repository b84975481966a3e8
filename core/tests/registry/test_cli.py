"""The commands `platforms`, `doctor` and `plugin`, as a person runs them."""

from __future__ import annotations

import argparse
import json
import os

import pytest

from vllm_core.cli import doctor, platforms, plugin
from vllm_core.errors import ConfigError, UnknownPlatformError
from vllm_core.registry.explain import from_json
from vllm_core.registry.snapshot import read

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


@pytest.fixture
def command(site, source, monkeypatch, capsys):
    """Run a command line where one fake platform is enabled; returns (exit status, standard output)."""
    site.add("dist-a", {"fake": source("fake")})
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_CORE_CACHE", site.environ["VLLM_CORE_CACHE"])
    monkeypatch.setenv("VLLM_CORE_PLUGINS", "dist-a")
    monkeypatch.setenv("COLUMNS", "250")

    def run(*words):
        parser = argparse.ArgumentParser()
        subparsers = parser.add_subparsers(required=True)
        for module in (platforms, doctor, plugin):
            module.add_parser(subparsers)
        args = parser.parse_args([str(word) for word in words])
        status = args.func(args)
        return status, capsys.readouterr().out

    return run


@pytest.fixture
def config_only(tmp_path):
    """A model folder that has a config and nothing else."""
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_list_shows_platform_distribution_and_device(command):
    status, text = command("platforms", "list")
    assert status == 0
    for part in ("fake", "dist-a 1.0", "acme", "dev-0"):
        assert part in text


def test_list_as_json_has_platforms_and_failures(command):
    data = json.loads(command("platforms", "list", "--json")[1])
    assert [one["distribution"] for one in data["platforms"]] == ["dist-a"]
    assert set(data) == {"platforms", "failed"}


def test_list_without_any_device_exits_with_1(command, site, source, monkeypatch):
    site.add("dist-bad", {"bad": "raise ImportError('stale')"})
    monkeypatch.setenv("VLLM_CORE_PLUGINS", "dist-bad")
    status, text = command("platforms", "list")
    assert status == 1
    assert "ImportError: stale" in text


def test_explain_plans_from_a_config_alone(command, config_only):
    status, text = command("platforms", "explain", config_only)
    assert status == 0
    for part in ("LlamaForCausalLM", "fake", "paged_attention", "block_size", "Rejected"):
        assert part in text


def test_explain_as_json_is_the_plan(command, config_only):
    words = ("--platform", "fake", "--block-size", "32", "--provider", "all=reference")
    plan = from_json(command("platforms", "explain", config_only, "--json", *words)[1])
    assert plan.platform == "fake"
    assert plan.kv_groups[0].layout.tokens_per_block == 32
    assert {one.provider for one in plan.bindings} == {"reference"}


def test_explain_takes_every_option_of_the_plan(command, config_only):
    words = ("--deny-provider", "fake", "--device-ids", "dev-0", "--enforce-eager", "--strict", "--kv-cache-dtype", "bfloat16")
    plan = from_json(command("platforms", "explain", config_only, "--json", *words)[1])
    assert (plan.device.id, plan.graphs, plan.kv_dtype) == ("dev-0", False, "bfloat16")
    assert "fake" not in {one.provider for one in plan.bindings}
    assert all(not one.fallbacks for one in plan.bindings)


def test_a_provider_that_is_no_pair_is_an_error(command, config_only):
    with pytest.raises(ConfigError, match="OP=NAME"):
        command("platforms", "explain", config_only, "--provider", "reference")


def test_explain_plans_for_a_saved_machine(command, config_only, tmp_path):
    file = tmp_path / "probe.json"
    status, _ = command("doctor", "--json", file)
    assert status == 0
    assert [one.distribution for one in read(file).platforms] == ["dist-a"]
    here = command("platforms", "explain", config_only, "--json")[1]
    assert from_json(command("platforms", "explain", config_only, "--json", "--probe", file)[1]) == from_json(here)


def test_ops_lists_every_op_with_the_platforms_providers(command):
    text = command("platforms", "ops", "--platform", "fake")[1]
    row = next(line for line in text.splitlines() if line.split()[:1] == ["rms_norm"])
    assert "fake, reference" in row
    assert "reduce_scatter" in text


def test_ops_of_an_unknown_platform_is_an_error(command):
    with pytest.raises(UnknownPlatformError, match="did you mean 'fake'"):
        command("platforms", "ops", "--platform", "fakee")


def test_doctor_shows_every_step(command, stub_torch):
    text = command("doctor")[1]
    for step in (
        "torch build",
        "driver and devices",
        "container",
        "plugin, probe and backend",
        "native libraries",
        "shared memory",
    ):
        assert step in text


def test_doctor_refuses_a_file_that_cannot_be_written(command, tmp_path, stub_torch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="File cannot be written"):
        command("doctor", "--json", tmp_path / "file" / "below.json")


def test_plugin_check_passes_a_good_plugin(command):
    status, text = command("plugin", "check", "fake")
    assert status == 0
    assert "1 of" in text


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"setup": "from vllm_core.api import Unsupported\nCLAIMS['attention.decoder'] = Unsupported('no')"}, "required"),
        ({"offers": "Offer(provider='p', ops={'rms_norm': 'no_such_module_here:f'})"}, "no_such_module_here"),
        ({"offers": "Offer(provider='p', ops={'rms_nrm': 'm:f'})"}, "did you mean 'rms_norm'"),
        ({"probe": "raise RuntimeError('driver')"}, "RuntimeError: driver"),
        ({"api_version": "9.0"}, "built for API 9.0"),
    ],
)
def test_plugin_check_fails_a_plugin_that_breaks_the_contract(command, site, source, change, part):
    site.add("dist-wrong", {"wrong": source("wrong", **change)})
    status, text = command("plugin", "check", "wrong")
    assert status == 1
    assert part in text


def test_plugin_check_of_kernels_alone_needs_no_platform(command, site, kernels_source):
    site.add("dist-k", {"other.fast": kernels_source})
    assert command("plugin", "check", "dist-k")[0] == 0


def test_plugin_check_of_an_unknown_name_is_an_error(command):
    with pytest.raises(UnknownPlatformError, match="did you mean 'fake'"):
        command("plugin", "check", "fakke")


def test_parsers_are_made_without_heavy_imports(site):
    """`explain` has the engine's options, which are made from pydantic settings; the other two need nothing."""
    code = (
        "import argparse, json, sys\nfrom vllm_core.cli import doctor, plugin\n"
        "subparsers = argparse.ArgumentParser().add_subparsers()\n"
        "for module in (doctor, plugin): module.add_parser(subparsers)\n"
        "print(json.dumps(sorted({'torch', 'pydantic', 'rich', 'msgspec', 'pluggy'} & set(sys.modules))))"
    )
    assert site.child(code) == []
    code = code.replace("import doctor, plugin", "import platforms").replace("(doctor, plugin)", "(platforms,)")
    assert set(site.child(code)) <= {"pydantic", "msgspec", "pluggy"}
