"""The distribution as core finds it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

from vllm_core.api import CAPABILITIES, PLATFORM_HOOKS, is_available


def test_the_entry_point_has_the_name_of_the_platform_and_all_hooks():
    (found,) = entry_points(group="vllm.platforms", name="toy")
    plugin = found.load()
    assert plugin.manifest().name == "toy"
    assert set(plugin.manifest().claims) == set(CAPABILITIES)
    assert all(callable(getattr(plugin, hook)) for hook in PLATFORM_HOOKS)


def test_every_required_capability_is_claimed():
    from vllm_toy.plugin import CLAIMS

    assert all(is_available(CLAIMS[name]) for name, row in CAPABILITIES.items() if row.required)


def test_planning_imports_no_torch():
    code = (
        "import sys; from vllm_toy import plugin; plugin.manifest(); plugin.probe(); plugin.offers(plugin.probe().devices[0]); "
    )
    done = subprocess.run([sys.executable, "-c", code + "print('torch' in sys.modules)"], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
