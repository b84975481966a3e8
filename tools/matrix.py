"""The support matrix of README.md, from the manifests of this repository's installed platforms.

python tools/matrix.py            write it between its marks
python tools/matrix.py --check    exit with 1 if the README has another one
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_core.api import CAPABILITIES, Full, Manifest, NotImplementedYet, Partial, Support, Unsupported, Versioned
from vllm_core.registry.discover import find
from vllm_core.registry.load import Loaded, load

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "<!-- support matrix: written by tools/matrix.py -->"
END = "<!-- end of the support matrix -->"


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


def cell(support: Support) -> str:
    """One word, and the cases of a partial claim."""
    match support:
        case Full():
            return "yes"
        case Versioned(since):
            return f"since {since}"
        case Partial(_, cases):
            return f"partly: {', '.join(cases)}"
        case NotImplementedYet():
            return "not yet"
        case Unsupported():
            return "no"


def matrix(platforms: Sequence[tuple[str, Manifest]]) -> str:
    """The table in Markdown: a row for each capability, a column for each platform."""
    heads = [f"{name} ({manifest.support_level})" for name, manifest in platforms]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name, capability in CAPABILITIES.items():
        cells = [cell(manifest.claims[name]) for _, manifest in platforms]
        lines.append(f"| `{name}`: {capability.doc} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def replaced(readme: str, table: str) -> str:
    """The README with its table replaced. Raises ValueError if the marks are missing."""
    head, _, rest = readme.partition(BEGIN)
    _, mark, tail = rest.partition(END)
    if not mark:
        raise ValueError(f"README.md lacks {BEGIN!r} or {END!r}")
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


def main(arguments: list[str]) -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    path = ROOT / "README.md"
    old = path.read_text(encoding="utf-8")
    new = replaced(old, matrix(manifests()))
    if parser.parse_args(arguments).check:
        if new != old:
            print("README.md has an old support matrix\n  fix: python tools/matrix.py")
        return int(new != old)
    path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
