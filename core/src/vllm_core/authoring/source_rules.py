"""Rules that the text of a plugin's files shows: what it imports of core, and what it patches. Nothing is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from vllm_core.authoring.finding import Finding, failed, ok, skipped
from vllm_core.authoring.subject import Subject

CONTRACT = "vllm_core.api"
PROTECTED = ("vllm_core", "torch", "triton", "transformers")
MARK = re.compile(r"#\s*replace:\s*(.+)")
"""The mark that `plugin new` leaves where the author has to put the hardware's own."""

# Switches that libraries mean to be set: `torch.backends....allow_tf32 = True`, `torch._dynamo.config...`.
_SWITCHES = {"backends", "config"}


def check_sources(subject: Subject) -> list[Finding]:
    """Imports, patches and marks left over, file by file."""
    findings: list[Finding] = []
    marks: list[str] = []
    count = 0
    for path in subject.sources():
        count += 1
        text = path.read_text("utf-8", "replace")
        shown = subject.shown(path)
        try:
            tree = ast.parse(text, str(path))
        except SyntaxError as error:
            fix = "correct it; core runs on Python 3.10 and newer"
            found = f"{error.msg} (line {error.lineno})"
            findings.append(failed("source", shown, found, expected="Python that can be read", fix=fix))
            continue
        findings += _imports(shown, tree)
        findings += _patches(shown, tree)
        marks += [
            f"{shown}:{number} {mark[1]}" for number, line in enumerate(text.splitlines(), 1) if (mark := MARK.search(line))
        ]
    if not count:
        return [_no_sources(subject)]
    broken = {one.rule for one in findings}
    findings += [
        ok(rule, subject.distribution, f"{count} files, none breaks it")
        for rule in ("imports", "patches")
        if rule not in broken
    ]
    if marks:
        findings.append(skipped("written", subject.distribution, "\n".join(marks), fix="replace what is marked, then the mark"))
    return findings


def _no_sources(subject: Subject) -> Finding:
    return failed(
        "source",
        subject.origin,
        "no package of its entry points",
        expected="the packages that the entry points name, below src/ or beside pyproject.toml",
        fix="correct the entry point's value, or put the package there",
    )


def _imports(shown: str, tree: ast.Module) -> Iterator[Finding]:
    for line, name in core_imports(tree):
        yield failed(
            "imports",
            f"{shown}:{line}",
            f"imports {name}",
            expected=f"{CONTRACT} and nothing else of core: the rest may change in any release",
            fix=f"use what {CONTRACT} has; say what is missing there",
        )


def core_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each import of core outside of the contract, by statement or by a call with a plain name."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")) and node.args:
            first = node.args[0]
            names = [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
        for name in names:
            if _within(name, "vllm_core") and not _within(name, CONTRACT):
                yield getattr(node, "lineno", 0), name


def _patches(shown: str, tree: ast.Module) -> Iterator[Finding]:
    for line, target in patched_names(tree):
        yield failed(
            "patches",
            f"{shown}:{line}",
            f"changes {target}",
            expected="no name of core, torch, triton or transformers changed",
            fix="offer an op, a device method or a step program instead; say which hook is missing",
        )


def patched_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each assignment to, or deletion of, an attribute of a protected package."""
    aliases = _aliases(tree)
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr") and len(node.args) > 1:
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else "*"
            targets = [ast.Attribute(node.args[0], str(name), ast.Store())]
        for target in targets:
            dotted = _resolve(target, aliases)
            if dotted is not None:
                yield getattr(node, "lineno", 0), dotted


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Local name -> what it is, for names imported from protected packages."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return {name: full for name, full in aliases.items() if any(_within(full, package) for package in PROTECTED)}


def _resolve(target: ast.expr, aliases: dict[str, str]) -> str | None:
    """``torch.nn.Linear.forward`` for an attribute of a protected package; None for anything else, and for its switches."""
    while isinstance(target, ast.Subscript):  # torch.__dict__["x"] = ..., sys.modules["torch"] = ...
        if ast.unparse(target.value) == "sys.modules" and isinstance(target.slice, ast.Constant):
            name = str(target.slice.value)
            return f"sys.modules[{name!r}]" if any(_within(name, package) for package in PROTECTED) else None
        target = target.value
    parts: list[str] = []
    while isinstance(target, ast.Attribute):
        parts.insert(0, target.attr)
        target = target.value
    if not parts or not isinstance(target, ast.Name) or target.id not in aliases:
        return None
    dotted = ".".join([aliases[target.id], *parts])
    return None if _SWITCHES & set(dotted.split(".")) else dotted


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def defined_function(path: Path, name: str) -> ast.FunctionDef | None:
    """The function of that name at the top of a file; None where it is something else."""
    tree = ast.parse(path.read_text("utf-8", "replace"), str(path))
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return found[-1] if found else None


def defines(path: Path, name: str) -> bool:
    """Whether a file binds the name at its top, in any way."""
    tree = ast.parse(path.read_text("utf-8", "replace"), str(path))
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return True
        if isinstance(node, (ast.Import, ast.ImportFrom)) and any((a.asname or a.name) in (name, "*") for a in node.names):
            return True
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(inner, ast.Name) and inner.id == name for target in targets for inner in ast.walk(target)):
            return True
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            inside = ast.Module(node.body, [])
            if any(isinstance(one, ast.FunctionDef) and one.name == name for one in ast.walk(inside)):
                return True
    return False
