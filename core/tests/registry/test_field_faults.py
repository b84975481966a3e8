"""Faults that users and authors of plugins have reported of other engines, each as the behaviour that ours has instead.

The numbers are those of the project's list of field reports. What other modules of these tests hold is not repeated here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import vllm_core
from vllm_core import launch
from vllm_core.api import ENTRY_POINT_GROUP, DeviceFacts, Full, Unsupported, Versioned
from vllm_core.api import version as api_version
from vllm_core.errors import ConfigError, PlanError
from vllm_core.registry.candidates import collect
from vllm_core.registry.select import plan

SOURCES = sorted(Path(vllm_core.__file__).parent.rglob("*.py"))
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}
CONFIGURE = """
    import json, pathlib
    with open({file!r}, "a") as log:
        log.write(json.dumps(dict(config)) + "\\n")
    return ConfigPatch(changes={changes!r}, reasons={{name: "needs it" for name in {changes!r}}})
"""


@pytest.fixture
def decide(site, source, tmp_path, monkeypatch):
    """The blueprint of a small model on a platform whose `configure` makes ``changes``; and what it was given, call by call."""

    def run(changes, **options):
        file = tmp_path / "calls"
        configure = CONFIGURE.format(file=str(file), changes=changes)
        text = source("fake").replace("    return ConfigPatch(changes={}, reasons={})", configure)
        site.add("dist-fake", {"fake": text})
        for name, value in {**site.environ, "VLLM_CORE_PLUGINS": "dist-fake", "VLLM_PLATFORM": "fake"}.items():
            monkeypatch.setenv(name, value)
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        design = launch.blueprint({"model": str(folder), "load_format": "dummy", **options})
        return design, [json.loads(line) for line in file.read_text().splitlines()]

    return run


def test_8_kernels_that_failed_to_load_are_in_the_plan_of_their_platform(site, source, empty_root, needs):
    """An overlay failed at import, the plain platform was used, and nothing but its missing feature told."""
    site.add("dist-a", {"one": source("one")})
    site.add("dist-k", {"one.fast": "import a_library_that_is_not_there"})
    environ = {**site.environ, "VLLM_CORE_PLUGINS": "dist-a,dist-k"}
    chosen = plan(needs(), *collect(environ=environ, root=empty_root))
    assert chosen.platform == "one"
    (reason,) = [one.reason for one in chosen.rejected if one.candidate == "dist-k:one.fast"]
    assert "a_library_that_is_not_there" in reason
    assert any("dist-k:one.fast" in note for note in chosen.notes)


def test_11_messages_take_the_groups_name_from_where_it_is_defined():
    """A hint told authors to declare an entry point in a group that was no longer read."""
    code = [path.name for path in SOURCES if f'"{ENTRY_POINT_GROUP}' in path.read_text("utf-8")]
    assert code == ["hooks.py"]


@pytest.mark.parametrize(
    ("ours", "theirs", "loads"),
    [((2, 0), (2, 9), True), ((2, 0), (1, 5), True), ((2, 0), (0, 1), False), ((2, 0), (3, 0), False), ((0, 1), (0, 0), True)],
)
def test_13_this_major_of_the_contract_is_loaded_and_the_one_before(monkeypatch, ours, theirs, loads):
    """Plugins broke about once a week."""
    monkeypatch.setattr(api_version, "API_VERSION", ours)
    assert api_version.is_loadable(theirs) is loads


def test_19_core_imports_whole_where_no_plugin_may_be_loaded():
    """Names of compiled kernels were looked up while modules were imported: any other build died."""
    code = (
        "import importlib, pkgutil, sys, vllm_core\n"
        "names = [one.name for one in pkgutil.walk_packages(vllm_core.__path__, 'vllm_core.')]\n"
        "for name in names: importlib.import_module(name)\n"
        "print(len(names), [name for name in sys.modules if name.startswith('vllm_') and not name.startswith('vllm_core')])"
    )
    pytest.importorskip("torch")
    environ = {**os.environ, "VLLM_CORE_PLUGINS": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    count, _, plugins = done.stdout.strip().partition(" ")
    assert int(count) == len(SOURCES) - 1, "all but the package itself"
    assert plugins == "[]"


def test_20_a_capability_that_nobody_answered_for_is_absent(needs, candidate):
    """A feature was gated by a list of vendors, and everyone else had to patch the gate."""
    wanted = needs(capabilities=frozenset({"attention.decoder", "teleport"}))
    with pytest.raises(PlanError, match="teleport is unsupported"):
        plan(wanted, [candidate()], [])


def test_21_weights_in_eight_bits_claim_no_kv_cache_in_eight_bits(needs, candidate):
    """One number stood for all that a device can do with eight bits."""
    claims = {"quantization.weight_only": Full(), "kv_dtype.fp8": Unsupported("no conversion in its kernels")}
    with pytest.raises(PlanError, match=r"kv_dtype\.fp8 is unsupported: no conversion"):
        plan(needs(kv_dtype="fp8"), [candidate(claims=claims)], [])


def test_23_a_platform_is_asked_once_and_with_a_complete_configuration(decide):
    """The hook was called for an empty configuration, and many times."""
    design, calls = decide({"max_num_seqs": 3})
    (config,) = calls
    assert design.config.scheduler.max_num_seqs == 3
    assert config["max_num_batched_tokens"] > 0
    missing = [name for name in ("block_size", "dtype", "max_model_len", "tensor_parallel_size") if name not in config]
    assert missing == []


def test_32_core_writes_no_variable_of_the_environment():
    """Devices were chosen by rewriting the vendor's variable, and every plugin had to undo that."""
    writes = ("os.environ[", "os.putenv", "os.environ.update", "os.environ.setdefault", "os.unsetenv")
    lines = [(path.name, line.strip()) for path in SOURCES for line in path.read_text("utf-8").splitlines()]
    assert [one for one in lines if any(word in one[1] for word in writes) and "] in" not in one[1]] == []


def test_34_what_an_engine_needs_is_asked_of_all_its_devices(needs, candidate):
    """Gates looked at the first device alone."""
    first, second = (
        DeviceFacts(
            id=f"dev-{index}",
            name="Fake",
            device_type="fake",
            architecture="fake1",
            memory_kind="discrete",
            memory_bytes=8 << 30,
            driver_version=driver,
        )
        for index, driver in enumerate(("550.1", "470.2"))
    )
    claims = {"prefix_caching": Versioned("driver>=500")}
    wanted = needs(workers=2, capabilities=frozenset({"prefix_caching", "parallel.tensor"}))
    with pytest.raises(PlanError, match=r"needs driver>=500, found driver 470\.2"):
        plan(wanted, [candidate(devices=(first, second), claims=claims)], [])
    newer = replace(second, driver_version="550.1")
    assert len(plan(wanted, [candidate(devices=(first, newer), claims=claims)], []).devices) == 2


def test_42_a_platform_cannot_overrule_what_the_user_asked_for(decide):
    """An option was accepted, and ignored."""
    with pytest.raises(ConfigError, match="block_size") as caught:
        decide({"block_size": 32}, block_size=16)
    assert "dist-fake" in caught.value.fix


def test_46_blocks_are_negotiated_at_the_size_that_the_platform_wants(decide):
    """They were aligned before the platform had set its size."""
    design, calls = decide({"block_size": 32})
    assert {group.layout.tokens_per_block for group in design.plan.kv_groups} == {32}
    assert design.plan.reasons["block_size"] == "needs it"
    assert len(calls) == 1
