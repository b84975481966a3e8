"""What `platforms explain` says of a small Llama on machines that are not here: one JSON object, by the machines' names.

python tools/explain_machines.py PLATFORM REPORTS.json

The file has probe reports by name, as the platform's probe gives them (`ProbeReport` as JSON). Each is saved as `doctor --json`
would save it, then `vllm-core platforms explain --probe` plans for it. `{"status": exit status, "text": what was printed}`.
Tests of hardware packages hold it against the words that they expect (`missing`).
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import msgspec

from vllm_core.api import ProbeReport
from vllm_core.cli.main import main as command
from vllm_core.registry.candidates import load_all, with_offers
from vllm_core.registry.discover import find
from vllm_core.registry.snapshot import FORMAT, Snapshot, encode, save_platform
from vllm_core.version import __version__

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def saved(platform: str, report: ProbeReport) -> bytes:
    """The machine as `doctor --json` would have saved it."""
    plugins = load_all([one for one in find() if one.platform == platform])
    candidates = with_offers(plugins.platforms[0], report, plugins)
    platforms = tuple(save_platform(one) for one in candidates)
    return encode(Snapshot(format=FORMAT, core_version=__version__, host={}, platforms=platforms, failed=(), steps={}))


class Explained(TypedDict):
    """Exit status of the command, and what it printed."""

    status: int
    text: str


def explained(platform: str, report: ProbeReport, folder: Path) -> Explained:
    """Exit status and text of the command."""
    file = folder / "machine.json"
    file.write_bytes(saved(platform, report))
    words = ["platforms", "explain", str(folder), "--probe", str(file), "--platform", platform]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = command(words)
    return {"status": status, "text": said.getvalue()}


def explain_all(platform: str, reports: Mapping[str, ProbeReport]) -> dict[str, Explained]:
    """What is said of each machine."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        return {machine: explained(platform, report, folder) for machine, report in reports.items()}


def missing(platform: str, reports: Mapping[str, ProbeReport], expected: Mapping[str, Sequence[str]]) -> list[str]:
    """Words of ``expected`` that the text of a machine lacks, and exit statuses that are wrong: 0 where a provider named as the
    platform's distribution is expected, else 2. A line each, with the text."""
    found, wrong = explain_all(platform, reports), []
    for machine, words in expected.items():
        said = found[machine]
        status = 0 if f"vllm-{platform}" in words else 2
        lacking = [word for word in words if word not in said["text"]]
        if lacking or said["status"] != status:
            wrong.append(f"{machine}: status {said['status']}, without {lacking}\n{said['text']}")
    return wrong


def main(platform: str, reports: Path) -> None:
    """Print all of them."""
    print(json.dumps(explain_all(platform, msgspec.json.decode(reports.read_bytes(), type=dict[str, ProbeReport]))))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
