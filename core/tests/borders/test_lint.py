"""The border lint holds the tree, and each of its rules catches what it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

lint = pytest.importorskip("tools.lint_borders", reason="runs in the repository's checkout")

ROOT = Path(__file__).parents[3]


def breaches(path, text):
    return [(breach.rule, breach.line) for breach in lint.check(lint.Source.parse(path, text))]


def test_the_whole_tree_keeps_the_borders():
    assert [str(breach) for source in lint.sources(ROOT) for breach in lint.check(source)] == []


def test_no_text_file_names_a_home_folder():
    found = [breach for path, text in lint.texts(ROOT, (".md", ".toml", ".ini")) for breach in lint.home_paths(path, text)]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "x.is_cuda_alike()",
        "name = 'ROCm'",
        "# the NPU needs this",
        "hip12 = 1",
        "import torch.cuda",
        "torch.accelerator.current_device_index()",
        "from torch import accelerator",
        "getattr(torch, name)",
        "vars(torch)",
        "torch.get_device_module('x')",
    ],
)
def test_core_reaches_no_vendor(line):
    assert ("vendor", 1) in breaches("core/src/vllm_core/layers/x.py", line)


@pytest.mark.parametrize("line", ["relationship = input + chips", "getattr(torch, 'float32')", "getattr(model, name)"])
def test_words_that_only_look_like_vendors_pass(line):
    assert breaches("core/src/vllm_core/layers/x.py", line) == []


def test_a_plugin_may_name_its_vendor():
    assert breaches("plugins/vllm-x/src/vllm_x/device.py", "import torch.cuda") == []


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("core/src/vllm_core/engine/core.py", "from vllm_core.registry.plan import Plan"),
        ("core/src/vllm_core/engine/core.py", "from vllm_core import registry"),
        ("core/src/vllm_core/engine/core.py", "import vllm_core.serve.app"),
        ("core/src/vllm_core/engine/core.py", "if TYPE_CHECKING:\n    from vllm_core.registry.plan import Plan"),
        ("core/src/vllm_core/engine/scheduler.py", "import torch"),
        ("core/src/vllm_core/engine/scheduler/policy.py", "from torch import Tensor"),
        ("core/src/vllm_core/api/device.py", "import torch"),
        ("core/src/vllm_core/models/llama.py", "import transformers"),
        ("plugins/vllm-x/src/vllm_x/plugin.py", "from vllm_core.engine import core"),
        ("plugins/vllm-x/src/vllm_x/plugin.py", "import vllm_core"),
        ("plugins/vllm-x/src/vllm_x/plugin.py", "from vllm_core.errors import ConfigError"),
    ],
)
def test_imports_across_a_border_are_found(path, line):
    assert [rule for rule, _ in breaches(path, line)] == ["imports"]


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("core/src/vllm_core/api/device.py", "if TYPE_CHECKING:\n    import torch"),
        ("core/src/vllm_core/engine/program.py", "import torch"),
        ("core/src/vllm_core/launch.py", "from vllm_core.registry.plan import Plan"),
        ("plugins/vllm-x/src/vllm_x/plugin.py", "from vllm_core.api.ops import OPS"),
        ("plugins/vllm-x/tests/test_x.py", "import vllm_core.launch"),
    ],
)
def test_imports_within_the_borders_pass(path, line):
    assert breaches(path, line) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from yaml import load",
        "eval(text)",
        "exec(code)",
        "torch.load(path)",
        "subprocess.run(command, shell=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_code_from_outside_is_never_run(line):
    assert [rule for rule, _ in breaches("core/src/vllm_core/loader/x.py", line)] == ["unsafe"]


def test_evaluation_mode_of_a_model_is_no_eval():
    assert breaches("core/src/vllm_core/loader/x.py", "model.eval()") == []


def test_a_file_over_the_cap_is_found():
    assert breaches("core/src/vllm_core/x.py", "x = 1\n" * 500) == []
    assert breaches("core/src/vllm_core/x.py", "x = 1\n" * 501) == [("size", 501)]


def test_a_home_path_is_found():
    assert breaches("core/src/vllm_core/x.py", "p = '" + "/ho" + "me/me/x'") == [("paths", 1)]
    assert breaches("core/src/vllm_core/x.py", "p = root / 'home'") == []
