"""The borders that no general linter knows; prints each breach as path:line and exits 1.

Rules, each a function from one parsed file to its breaches:
    vendor      core names no hardware vendor's words and reaches no vendor's part of torch
    imports     who may import whom
    unsafe      nothing that runs code or unpickles objects from outside
    size        no file of code over the cap
    paths       no absolute path of somebody's machine
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 500

# Words of vendors' stacks. Letters around a match make another word (input, relationship); digits and _ do not.
_VENDOR = re.compile(
    r"(?<![a-z])(cuda|cudnn|cublas|nvidia|nvml|nccl|rocm|hip|rccl|amd|xpu|intel|npu|ascend|hccl|cann|hpu|mlu|musa|gcu|mps)(?![a-z])",
    re.IGNORECASE,
)
_HOME = re.compile(r"(?<![\w.])/(?:(?:home|Users)/\w|root/)")
_TORCH_DOORS = {"accelerator", "get_device_module", "__dict__", "__getattr__"}
_UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "yaml", "joblib"}
_UNSAFE_BUILTINS = {"eval", "exec", "__import__"}

# Folder or file below core/src/vllm_core -> packages that it must not import.
_FORBIDDEN = {
    "engine": ("vllm_core.registry", "vllm_core.serve", "vllm_core.cli"),
    "engine/scheduler": ("torch",),
    "engine/blocks": ("torch",),
    "engine/prefix": ("torch",),
    "engine/packing": ("torch",),
    "engine/request": ("torch",),
    "api": ("torch", "pydantic", "transformers", "vllm_core.engine", "vllm_core.registry", "vllm_core.serve"),
    "registry": ("torch", "transformers", "vllm_core.engine", "vllm_core.serve"),
    "models": ("transformers", "vllm_core.registry", "vllm_core.serve"),
    "layers": ("transformers", "vllm_core.registry", "vllm_core.serve"),
    "ops": ("transformers", "vllm_core.registry", "vllm_core.serve", "vllm_core.engine"),
}
_EXCEPTED = {"models/transformers_track": "transformers"}
_PLUGIN_ALLOWED = "vllm_core.api"


@dataclass(frozen=True, order=True)
class Breach:
    """One broken rule."""

    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


@dataclass(frozen=True)
class Source:
    """One file: its path below the repository, its text and its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, path: str, text: str) -> Source:
        """Raises SyntaxError."""
        return cls(path, text, ast.parse(text, path))


def imports_of(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Yield line, dotted name, and whether it is imported for type checkers alone."""
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, id(node) in typing_only
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}", id(node) in typing_only


def vendor(source: Source) -> Iterator[Breach]:
    """Vendor words anywhere in core's code, comments included; doors to vendor modules of torch."""
    if not source.path.startswith("core/src/"):
        return
    for number, line in enumerate(source.text.splitlines(), 1):
        for match in _VENDOR.finditer(line):
            yield Breach(source.path, number, "vendor", f"the word {match[0]!r}; ask the Device, or describe it in a data file")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch" and node.attr in _TORCH_DOORS:
            yield Breach(source.path, node.lineno, "vendor", f"torch.{node.attr}; ask the Device")
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "vars"} and node.args:
            named = len(node.args) > 1 and isinstance(node.args[1], ast.Constant)
            if ast.unparse(node.args[0]) == "torch" and not named:
                yield Breach(source.path, node.lineno, "vendor", "a part of torch reached by a computed name; use a table")
    for number, name, _ in imports_of(source.tree):
        if name.startswith("torch.accelerator"):
            yield Breach(source.path, number, "vendor", f"imports {name}; ask the Device")


def imports(source: Source) -> Iterator[Breach]:
    """Imports across a border. Imports for type checkers alone may name torch, and nothing else may be excused."""
    found = list(imports_of(source.tree))
    if source.path.startswith(("plugins/", "examples/")) and "/src/" in source.path:
        for number, name, _ in found:
            if _within(name, "vllm_core") and not _within(name, _PLUGIN_ALLOWED):
                yield Breach(
                    source.path, number, "imports", f"{name}; a plugin imports {_PLUGIN_ALLOWED} and nothing else of core"
                )
        return
    inside = source.path.removeprefix("core/src/vllm_core/")
    for place, forbidden in _FORBIDDEN.items():
        if inside == source.path or not (inside.startswith(place + "/") or inside == place + ".py"):
            continue
        for number, name, typing_only in found:
            for package in forbidden:
                if any(inside.startswith(part + "/") and package == excused for part, excused in _EXCEPTED.items()):
                    continue
                if _within(name, package) and not (typing_only and not package.startswith("vllm_core")):
                    yield Breach(source.path, number, "imports", f"{place} must not import {package} ({name})")


def unsafe(source: Source) -> Iterator[Breach]:
    """Ways to run code from outside."""
    if "/src/" not in source.path:
        return
    for number, name, _ in imports_of(source.tree):
        if name.split(".")[0] in _UNSAFE_MODULES:
            yield Breach(source.path, number, "unsafe", f"imports {name}")
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in _UNSAFE_BUILTINS or called in {"torch.load", "os.system", "os.popen"}:
            yield Breach(source.path, node.lineno, "unsafe", f"calls {called}")
        for keyword in node.keywords:
            if keyword.arg in {"shell", "trust_remote_code", "allow_pickle"} and ast.unparse(keyword.value) == "True":
                yield Breach(source.path, node.lineno, "unsafe", f"{called}({keyword.arg}=True)")


def size(source: Source) -> Iterator[Breach]:
    """Files that have more than one reason to change."""
    count = source.text.count("\n")
    if count > MAX_LINES:
        yield Breach(source.path, count, "size", f"{count} lines, the cap is {MAX_LINES}; split by reason to change")


def paths(source: Source) -> Iterator[Breach]:
    """Absolute paths of a home folder."""
    yield from home_paths(source.path, source.text)


def home_paths(path: str, text: str) -> Iterator[Breach]:
    """The same for text of any kind."""
    for number, line in enumerate(text.splitlines(), 1):
        if _HOME.search(line):
            yield Breach(path, number, "paths", "an absolute path below somebody's home")


RULES: tuple[Callable[[Source], Iterator[Breach]], ...] = (vendor, imports, unsafe, size, paths)


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def sources(root: Path) -> Iterator[Source]:
    """Every Python file of the repository's own."""
    for path, text in texts(root, (".py",)):
        yield Source.parse(path, text)


def texts(root: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Path below the repository and text of its files with these suffixes, built and hidden ones left out."""
    for top in (".", "core", "conformance", "plugins", "examples", "tools", "bench", "tests", "docs"):
        for path in sorted((root / top).glob("*") if top == "." else (root / top).rglob("*")):
            relative = path.relative_to(root)
            hidden = any(part.startswith(".") for part in relative.parts)
            if path.suffix in suffixes and path.is_file() and not hidden and not {"build", "dist"} & set(relative.parts):
                yield relative.as_posix(), path.read_text(encoding="utf-8")


def check(source: Source) -> list[Breach]:
    """All breaches of one file."""
    return sorted({breach for rule in RULES for breach in rule(source)})


def main() -> int:
    """Check the repository; returns the exit status."""
    breaches = [breach for source in sources(ROOT) for breach in check(source)]
    breaches += [breach for path, text in texts(ROOT, (".md", ".toml", ".ini", ".txt")) for breach in home_paths(path, text)]
    for breach in breaches:
        print(breach)
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
