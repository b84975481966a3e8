"""The support matrix of README.md.

python tools/matrix.py FILE...    write it from reports of the conformance suite, one a platform
python tools/matrix.py            write the claims of this repository's installed platforms; levels stay as they are
python tools/matrix.py --check    exit with 1 if the README has other claims than these
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_conformance.matrix import BEGIN, END, LEVEL_ROW, markdown, matrix, replaced
from vllm_conformance.report import read_report
from vllm_conformance.subject import claims_data
from vllm_core.api import Manifest
from vllm_core.registry.discover import find
from vllm_core.registry.load import Loaded, load

ROOT = Path(__file__).resolve().parent.parent
UNKNOWN = "not measured"


def manifests() -> list[tuple[str, Manifest]]:
    """Distribution and manifest of each platform of this repository that is installed. Raises SystemExit if one fails."""
    ours = {path.parent.name for path in (ROOT / "plugins").glob("*/pyproject.toml")}
    found = []
    for one in find():
        if one.distribution in ours and not one.kernels_only:
            loaded = load(one)
            if not isinstance(loaded, Loaded) or loaded.manifest is None:
                raise SystemExit(str(loaded))
            found.append((one.distribution, loaded.manifest))
    return found


def claimed(platforms: Sequence[tuple[str, Manifest]], levels: Mapping[str, str]) -> str:
    """The table of some manifests, then what they say of themselves; ``levels`` by column."""
    columns = [f"{name} ({manifest.support_level})" for name, manifest in platforms]
    claims = [claims_data(manifest.claims) for _, manifest in platforms]
    table = markdown(columns, claims, [levels.get(column, UNKNOWN) for column in columns])
    return "\n".join([table, *notes(platforms)])


def notes(platforms: Sequence[tuple[str, Manifest]]) -> list[str]:
    """A paragraph a platform: what stands behind its claims."""
    return [line for name, manifest in platforms if manifest.note for line in ("", f"{name}: {manifest.note}.")]


def levels_in(readme: str) -> dict[str, str]:
    """The levels that the README's table has, by column."""
    table = readme.partition(BEGIN)[2].partition(END)[0].splitlines()
    cells = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in table if line.startswith("|")
    }
    return dict(zip(cells.get("", []), cells.get(LEVEL_ROW, []), strict=False))


def main(arguments: list[str]) -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    path = ROOT / "README.md"
    old = path.read_text(encoding="utf-8")
    reports = [read_report(one) for one in options.files]
    if reports:
        named = {report.platform.distribution for report in reports}
        table = "\n".join([matrix(reports), *notes([one for one in manifests() if one[0] in named])])
    else:
        table = claimed(manifests(), levels_in(old))
    new = replaced(old, table)
    if options.check:
        if new != old:
            print("README.md has an old support matrix\n  fix: python tools/matrix.py")
        return int(new != old)
    path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
