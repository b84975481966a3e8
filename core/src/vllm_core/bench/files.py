"""What ``--out`` writes; the name's ending says which form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from vllm_core.bench import plots, tables
from vllm_core.bench.compare import Judgement
from vllm_core.bench.results import Result, to_json
from vllm_core.errors import ConfigError, nearest
from vllm_core.registry.cache import write_atomic

FORMS = (".json", ".md", ".csv", ".png", ".svg")
_PLOTS = (".png", ".svg")


def check(paths: Sequence[Path]) -> None:
    """Before anything is measured. Raises ConfigError for another form, a missing folder, or a plot without matplotlib."""
    for path in paths:
        if path.suffix not in FORMS:
            raise ConfigError(
                "File has no form",
                on=str(path),
                found=f"ending {path.suffix!r}",
                expected=f"one of {', '.join(FORMS)}",
                fix=nearest(path.suffix, FORMS),
            )
        if not path.absolute().parent.is_dir():
            raise ConfigError(
                "File cannot be written",
                on=str(path),
                found="no such folder",
                expected="a folder that is there",
                fix=f"mkdir -p {path.absolute().parent}",
            )
        if path.suffix in _PLOTS:
            plots.require()


def save(found: Result | Judgement, paths: Sequence[Path]) -> None:
    """Write each. Raises OSError."""
    for path in paths:
        if path.suffix in _PLOTS:
            if isinstance(found, Result):
                plots.draw_result(found, path)
            else:
                plots.draw_judgement(found, path)
        else:
            write_atomic(path, _text(found, path.suffix))


def _text(found: Result | Judgement, form: str) -> bytes:
    if isinstance(found, Result):
        if form == ".json":
            return to_json(found)
        made = tables.of_result(found)
        return (tables.csv_of_result(found) if form == ".csv" else tables.markdown(made)).encode()
    if form == ".json":
        body = {"passed": not found.failed, "verdict": tables.verdict(found), "decides": found.deciding.name}
        facts = {**body, "criteria": found.criteria, "differences": found.differences}
        return msgspec.json.format(msgspec.json.encode(facts), indent=1) + b"\n"
    made = tables.of_judgement(found)
    if form == ".csv":
        return tables.csv_of_judgement(found).encode()
    return f"{tables.verdict(found)}\n\n{tables.markdown(made)}".encode()
