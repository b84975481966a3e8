"""The files of vllm-conformance that are made from its code: the must-pass lists, and the JSON Schema of a report.

python tools/conformance_files.py            write them
python tools/conformance_files.py --check    exit with 1 if others are there
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType

from vllm_conformance import lists
from vllm_conformance.case import Case
from vllm_conformance.collect import case_modules, collect
from vllm_conformance.describe import NOWHERE
from vllm_conformance.report import SCHEMA, schema
from vllm_core.api import CAPABILITIES, OPS, Full, Offer, Unsupported
from vllm_core.api.ops import WHOLES
from vllm_core.registry.candidates import reference_offers

SERVICES = (*(f"op:{op}" for op in OPS), lists.REFERENCES)


def cases(absent: frozenset[str], services: frozenset[str], modules: Iterable[ModuleType] | None = None) -> tuple[Case, ...]:
    """The cases of a platform that claims all but ``absent`` and has these services; of all modules, or of some."""
    claims = {name: Unsupported("absent") if name in absent else Full() for name in CAPABILITIES}
    return collect(claims, tuple(offers_of(services)), NOWHERE, modules=modules)


def offers_of(services: frozenset[str]) -> Iterator[Offer]:
    """Kernels for each op that is served, and core's references where they may run."""
    for offer in reference_offers():
        ops = {op: entry for op, entry in offer.ops.items() if f"op:{op}" in services}
        yield replace(offer, provider="kernels", kind="kernel", ops=ops)
        if lists.REFERENCES in services:
            yield replace(offer, ops=ops)
    yield Offer(provider="kernels", ops={name: OPS[name].reference for name in WHOLES if f"op:{name}" in services})


def list_texts() -> dict[str, str]:
    """Each must-pass list by the name of its file."""
    found: dict[int, list[lists.Entry]] = {}
    for module in case_modules():  # one by one: most have no cases of what is absent, and are looked at less often
        for level, entries in lists.derive(partial(cases, modules=(module,)), CAPABILITIES, SERVICES).items():
            found.setdefault(level, []).extend(entries)
    return {f"L{level}.txt": lists.to_text(entries) for level, entries in sorted(found.items())}


def schema_text() -> str:
    """The schema's file."""
    return json.dumps(schema(), indent=1, sort_keys=True) + "\n"


def outdated() -> list[str]:
    """Names of files that are not what the code gives."""
    old = {path.name: path.read_text("utf-8") for path in [*lists.FOLDER.glob("L*.txt"), SCHEMA] if path.is_file()}
    new = {**list_texts(), SCHEMA.name: schema_text()}
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def main(arguments: list[str]) -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args(arguments).check:
        lists.write_lists(list_texts())
        SCHEMA.write_text(schema_text(), "utf-8")
        return 0
    wrong = outdated()
    for name in wrong:
        print(f"{name} is not what the code gives\n  fix: python tools/conformance_files.py")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
