"""Writes a new distribution: everything that core asks of a plugin, running in host memory until its parts are replaced.

The files are those of ``template/``, with ``@word@`` replaced; ``package`` is the folder of the import package.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

from packaging.version import Version

from vllm_core.api import API_VERSION, CAPABILITIES, OPS
from vllm_core.errors import ConfigError
from vllm_core.registry.hardware import known_plugins
from vllm_core.version import __version__

TEMPLATE = Path(__file__).with_name("template")
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_WORD = re.compile(r"@(\w+)@")
_TAKEN = {"core", "conformance", "toy", "all", "reference"}

BY_REFERENCE: Mapping[str, bool] = {
    "dtype.float32": True,
    "dtype.bfloat16": True,
    "dtype.float16": True,
    "kv_dtype.fp8": False,
    "kv_dtype.int8": False,
    "attention.decoder": True,
    "attention.sliding_window": True,
    "attention.soft_cap": True,
    "attention.sinks": True,
    "attention.encoder": True,
    "prefix_caching": True,
    "chunked_prefill": True,
    "sampling.device": True,
    "sampling.logprobs": True,
    "batch_invariant": False,
    "async_scheduling": False,
    "graphs": False,
    "sleep": False,
    "quantization.weight_only": False,
    "quantization.fp8_activation": False,
    "parallel.tensor": False,
    "peer_copy": False,
}
"""Whether core's references alone make a capability work on a device in host memory that does nothing else."""


def write(name: str, parent: Path) -> Path:
    """Write ``vllm-NAME`` below ``parent`` and return its folder. Raises ConfigError for a name or a folder that is taken."""
    _check_name(name)
    folder = parent / f"vllm-{name.replace('_', '-')}"
    if folder.exists():
        raise ConfigError(
            "Folder is there already",
            on=str(folder),
            found="it exists, and nothing is overwritten",
            expected="a folder that does not exist",
            fix="choose another name or --dir, or remove it",
        )
    words = words_of(name)
    try:
        for source in sorted(TEMPLATE.rglob("*.in")):
            inside = source.relative_to(TEMPLATE).as_posix().removesuffix(".in")
            target = folder / inside.replace("src/package", f"src/{words['module']}")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_fill(source.read_text("utf-8"), words), "utf-8")
    except OSError as error:
        found, fix = str(error), "name a folder that may be written with --dir"
        raise ConfigError("File cannot be written", on=str(folder), found=found, expected="a writable path", fix=fix) from error
    return folder


def words_of(name: str) -> dict[str, str]:
    """What stands for each ``@word@`` of the template."""
    title = name.replace("_", " ").title()
    return {
        "name": name,
        "Name": title,
        "Class": title.replace(" ", ""),
        "module": f"vllm_{name}",
        "distribution": f"vllm-{name.replace('_', '-')}",
        "api_version": f"{API_VERSION[0]}.{API_VERSION[1]}",
        "core_range": core_range(__version__),
        "claims": textwrap.indent(_claims(), " " * 8),
        "ops": _ops(),
    }


def core_range(version: str) -> str:
    """Versions of core for which a plugin that is written today is meant: up to the next minor."""
    parsed = Version(version)
    return f">={parsed.major}.{parsed.minor}.0.dev0,<{parsed.major}.{parsed.minor + 1}"


def _claims() -> str:
    return "\n".join(f'"{name}": {"Full()" if BY_REFERENCE[name] else "NotImplementedYet(LATER)"},' for name in CAPABILITIES)


def _ops() -> str:
    """All ops by family, for the author to choose from."""
    families: dict[str, list[str]] = {}
    for name, spec in OPS.items():
        families.setdefault(spec.family or "alone", []).append(name)
    return "\n".join(
        line
        for family, names in families.items()
        for line in textwrap.wrap(f"{family}: {', '.join(names)}", 120, initial_indent="    ", subsequent_indent="        ")
    )


def _fill(text: str, words: Mapping[str, str]) -> str:
    return _WORD.sub(lambda match: words[match[1]], text)


def _check_name(name: str) -> None:
    taken = _TAKEN | {known.platform for known in known_plugins()}
    if _NAME.fullmatch(name) and name not in taken:
        return
    raise ConfigError(
        "Name cannot be used",
        on=name,
        found="a name of this project's own" if name in taken else "not a plain name",
        expected="small letters, digits and single underscores, beginning with a letter; without 'vllm'",
        fix="for example: vllm-core plugin new acme",
    )
