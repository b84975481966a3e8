"""Plugins as real distributions in a temporary folder, and facts for planning by hand."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from vllm_core.api import CAPABILITIES, CallSite, DeviceFacts, Full, KVGroupSpec, KVLayout, Manifest, Offer
from vllm_core.api.manifest import Check
from vllm_core.api.ops import OPS, family_of
from vllm_core.registry import candidates, discover
from vllm_core.registry.candidates import reference_offers
from vllm_core.registry.plan import Candidate, Needs

PLATFORM = """
from vllm_core.api import CAPABILITIES, Check, ConfigPatch, DeviceFacts, Full, KVLayout, Manifest, Offer, ProbeReport, hookimpl

CLAIMS = {{name: Full() for name in CAPABILITIES}}
{setup}

def layout(group, dtype, tokens_per_block):
    return KVLayout(layout_id="{name}", dtype=dtype, tokens_per_block=tokens_per_block, block_bytes=64)

@hookimpl
def manifest():
    return Manifest(name="{name}", vendor="{vendor}", device_type="{name}", api_version="{api_version}",
                    core_range="{core_range}", claims=CLAIMS, device_class="{device_class}",
                    support_level="{support_level}", visible_devices_env="FAKE_VISIBLE")

@hookimpl
def probe():
    {probe}
    return ProbeReport(devices=(DeviceFacts(id="dev-0", name="Fake", device_type="{name}", architecture="fake1",
                                            memory_kind="discrete", memory_bytes=8 << 30),),
                       checks=(Check(name="driver", outcome="ok", detail="found"),))

@hookimpl
def configure(config):
    return ConfigPatch(changes={{}}, reasons={{}})

@hookimpl
def programs(device):
    return ()

@hookimpl
def start(device):
    return None

@hookimpl
def create_device(facts):
    raise RuntimeError("no device in this test")

@hookimpl
def offers(device):
    return [{offers}]
"""

KERNELS = """
from vllm_core.api import Offer, hookimpl

@hookimpl
def offers(device):
    return [Offer(provider="fast", ops={"rms_norm": "json:loads"}, priority=50)]
"""


def _source(name: str, **changes: str) -> str:
    values = {
        "vendor": "acme",
        "api_version": "0.1",
        "core_range": ">=0.1,<0.2",
        "device_class": "accelerator",
        "support_level": "beta",
        "setup": "",
        "probe": "",
        "offers": f'Offer(provider="{name}", ops={{"rms_norm": "json:loads"}}, priority=10)',
    }
    return PLATFORM.format(name=name, **{**values, **changes})


@dataclass
class Site:
    """A folder on the path of this process and of its children."""

    folder: Path
    environ: dict[str, str]
    modules: list[str] = field(default_factory=list)

    def add(self, distribution: str, entry_points: Mapping[str, str], version: str = "1.0") -> list[str]:
        """Install a distribution with one module per entry point; returns the modules' names."""
        lines, modules = ["[vllm.platforms]"], []
        for name, source in entry_points.items():
            module = f"plugin_{uuid.uuid4().hex}"
            (self.folder / f"{module}.py").write_text(source)
            lines.append(f"{name} = {module}")
            modules.append(module)
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        needs = "Requires-Python: >=3.10\nRequires-Dist: vllm-core<0.2,>=0.1\n"
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{needs}")
        if entry_points:
            (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        self.modules += modules
        importlib.invalidate_caches()
        return modules

    def child(self, code: str, **environ: str) -> Any:
        """Run code in a fresh interpreter and return the JSON that it printed last."""
        path = os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**self.environ, "PYTHONPATH": path, **environ},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def source() -> Callable[..., str]:
    """Source of a complete fake platform; keywords change parts of it."""
    return _source


@pytest.fixture(scope="session")
def kernels_source() -> str:
    """Source of a distribution that only adds kernels."""
    return KERNELS


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    made = Site(folder, {**environ, "VLLM_CORE_CACHE": str(tmp_path / "cache")})
    yield made
    for module in made.modules:
        sys.modules.pop(module, None)


@pytest.fixture
def stub_torch(site: Site) -> None:
    """A torch that child processes find first, and that imports at once."""
    version = "__version__ = '9.9'\nclass version:\n    build = 'special'\n"
    (site.folder / "torch.py").write_text(version)


@pytest.fixture
def empty_root(tmp_path: Path) -> Path:
    """A file system without hardware."""
    root = tmp_path / "root"
    root.mkdir()
    return root


@pytest.fixture
def without_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that lacks this plugin of ours, whatever is installed here."""
    monkeypatch.setattr(candidates, "find", lambda: [one for one in discover.find() if one.platform != "ascend"])


def _layout(group: KVGroupSpec, dtype: str, tokens_per_block: int) -> KVLayout:
    return KVLayout(layout_id="fake", dtype=dtype, tokens_per_block=tokens_per_block, block_bytes=tokens_per_block * 8)


def _offer(provider: str = "fast", ops: tuple[str, ...] = ("rms_norm",), **changes: Any) -> Offer:
    kv = any(OPS[op].family == "kv" for op in ops)
    features = frozenset(feature for op in ops for feature in OPS[op].features)
    entries = {op: f"{provider}:{op}" for op in ops}
    values = {"priority": 10, "features": features, "kv_layout": _layout if kv else None}
    return Offer(provider=provider, ops=entries, **{**values, **changes})


def _candidate(name: str = "fake", *, offers: tuple[Offer, ...] = (), devices: Any = None, **changes: Any) -> Candidate:
    claims = {capability: Full() for capability in CAPABILITIES} | changes.pop("claims", {})
    eager_full = changes.pop("eager_full", True)
    distribution = changes.pop("distribution", f"vllm-{name}")
    hint = changes.pop("hint", "")
    facts = {"vendor": "acme", "device_type": name, "api_version": "0.1", "core_range": ">=0.1", "support_level": "beta"}
    device = DeviceFacts(
        id="dev-0", name="Fake", device_type=name, architecture="fake1", memory_kind="discrete", memory_bytes=8 << 30
    )
    return Candidate(
        manifest=Manifest(name=name, claims=claims, **{**facts, **changes}),
        distribution=distribution,
        version="1.0",
        entry_point=name,
        devices=(device,) if devices is None else devices,
        checks=(Check(name="driver", outcome="failed" if devices == () else "ok", detail="libfake.so.1", hint=hint),),
        offers=(*offers, *reference_offers()),
        eager_full=eager_full,
    )


def _needs(*, windows: tuple[int | None, ...] = (None,), **changes: Any) -> Needs:
    groups = tuple(
        KVGroupSpec(
            index=index,
            kind="full" if window is None else "window",
            layers=(index,),
            num_kv_heads=2,
            head_size=64,
            window=window,
        )
        for index, window in enumerate(windows)
    )
    sites = [CallSite(op=op, role=role, dtype="float32") for op, role in (("rms_norm", "norm"), ("add_rms_norm", "norm"))]
    sites += [CallSite(op=op, role="linear", dtype="float32") for op in ("linear_pack", "linear")]
    for group in groups:
        features = {"paged_attention": frozenset({"sliding_window"} if group.window else ())}
        sites += [
            CallSite(
                op=op,
                role=f"kv.{group.index}.{group.kind}",
                dtype="float32",
                group=group.index,
                kv_dtype=changes.get("kv_dtype", "float32"),
                head_size=64,
                features=features.get(op, frozenset()),
            )
            for op in family_of("kv_write")
        ]
    values = {
        "model": "m",
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "kv_dtype": "float32",
        "capabilities": frozenset({"attention.decoder"}),
        "sites": tuple(sites),
        "kv_groups": groups,
    }
    return Needs(**{**values, **changes})


@pytest.fixture(scope="session")
def offer() -> Callable[..., Offer]:
    """An offer with priority 10 and every feature of its ops."""
    return _offer


@pytest.fixture(scope="session")
def candidate() -> Callable[..., Candidate]:
    """A candidate that claims everything and has the references; keywords change its manifest."""
    return _candidate


@pytest.fixture(scope="session")
def needs() -> Callable[..., Needs]:
    """Needs of a small decoder with one KV group per window."""
    return _needs
