"""dtype auto: the checkpoint's, and where a platform lacks it another one, which the Plan says."""

from __future__ import annotations

import json

import pytest

from vllm_core import launch
from vllm_core.api import DeviceFacts, Unsupported, Versioned
from vllm_core.errors import PlanError
from vllm_core.registry.plan import Needs
from vllm_core.registry.select import plan

NO_BF16 = {"dtype.bfloat16": Unsupported("no such unit")}
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
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def bfloat16(needs):
    """Needs of a bfloat16 checkpoint, with the alternatives that dtype auto has."""

    def at(dtype: str) -> Needs:
        return needs(dtype=dtype, kv_dtype=dtype)

    return lambda *others, **changes: needs(
        dtype="bfloat16", kv_dtype="bfloat16", alternatives=tuple(map(at, others or ("float32", "float16"))), **changes
    )


def test_a_platform_that_lacks_the_checkpoints_dtype_takes_the_next_and_says_so(bfloat16, candidate):
    chosen = plan(bfloat16(), [candidate(claims=NO_BF16)], [])
    assert (chosen.dtype, chosen.kv_dtype) == ("float32", "float32")
    assert chosen.reasons["dtype"].startswith("float32: the checkpoint's bfloat16 is unsupported: no such unit")


def test_the_first_alternative_that_it_has_is_taken(bfloat16, candidate):
    claims = NO_BF16 | {"dtype.float32": Unsupported("half precision only")}
    assert plan(bfloat16(), [candidate(claims=claims)], []).dtype == "float16"


def test_a_driver_that_is_too_old_for_the_dtype_counts_as_lacking_it(bfloat16, candidate):
    facts = {"name": "n", "device_type": "t", "architecture": "fake1", "memory_kind": "discrete", "memory_bytes": 1 << 30}
    device = DeviceFacts(id="d", driver_version="500", **facts)
    one = candidate(claims={"dtype.bfloat16": Versioned("driver>=550")}, devices=(device,))
    assert plan(bfloat16(), [one], []).dtype == "float32"


def test_a_named_dtype_is_kept_or_refused(needs, candidate):
    with pytest.raises(PlanError, match=r"dtype\.bfloat16 is unsupported: no such unit"):
        plan(needs(dtype="bfloat16", kv_dtype="bfloat16"), [candidate(claims=NO_BF16)], [])


def test_another_reason_than_the_dtype_changes_no_dtype(bfloat16, candidate):
    claims = {"attention.decoder": Unsupported("encoders only")}
    with pytest.raises(PlanError, match="encoders only") as caught:
        plan(bfloat16(), [candidate(claims=claims)], [])
    assert "bfloat16" in caught.value.on


def test_where_no_alternative_serves_the_error_is_that_of_the_checkpoints_dtype(bfloat16, candidate):
    claims = {f"dtype.{name}": Unsupported("integers only") for name in ("bfloat16", "float32", "float16")}
    with pytest.raises(PlanError, match=r"dtype\.bfloat16 is unsupported"):
        plan(bfloat16(), [candidate(claims=claims)], [])


def test_of_two_equal_platforms_the_one_that_has_the_dtype_is_taken(bfloat16, candidate):
    lacking, having = candidate("a", claims=NO_BF16), candidate("b")
    chosen = plan(bfloat16(), [lacking, having], [])
    assert (chosen.platform, chosen.dtype) == ("b", "bfloat16")
    assert "by dtype" in chosen.reasons["platform"]


def test_an_accelerator_at_another_dtype_goes_before_the_host_at_the_checkpoints(bfloat16, candidate):
    chosen = plan(bfloat16(), [candidate(claims=NO_BF16), candidate("host", device_class="host")], [])
    assert (chosen.platform, chosen.dtype) == ("fake", "float32")


@pytest.fixture
def blueprint(site, source, tmp_path, monkeypatch):
    """The blueprint of a bfloat16 checkpoint on a platform without bfloat16; ``change`` is what the platform changes."""
    for name, value in site.environ.items():
        if name.startswith("VLLM_"):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_CORE_PLUGINS", "dist-a")
    monkeypatch.delenv("VLLM_PLATFORM", raising=False)
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))

    def run(change="{}", **options):
        setup = "from vllm_core.api import Unsupported\nCLAIMS['dtype.bfloat16'] = Unsupported('no such unit')"
        text = source("fake", setup=setup).replace(
            "changes={}, reasons={}", f"changes={change}, reasons=dict.fromkeys({change}, 'why')"
        )
        site.add("dist-a", {"fake": text})
        return launch.blueprint({"model": str(folder), **options})

    return run


def test_the_engine_is_built_at_the_dtype_of_the_plan(blueprint):
    design = blueprint()
    assert (design.plan.dtype, design.spec.dtype, design.config.model.dtype) == ("float32", "float32", "float32")
    assert launch.from_bytes(launch.to_bytes(design)).spec.dtype == "float32"


def test_the_reason_outlives_the_platforms_changes(blueprint):
    design = blueprint("{'block_size': 32}")
    assert design.plan.kv_groups[0].layout.tokens_per_block == 32
    assert "checkpoint's bfloat16" in design.plan.reasons["dtype"]


def test_an_explicit_dtype_that_the_platform_lacks_is_an_error(blueprint):
    with pytest.raises(PlanError, match=r"dtype\.bfloat16 is unsupported"):
        blueprint(dtype="bfloat16")
