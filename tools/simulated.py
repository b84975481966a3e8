"""The conformance suite on simulated devices, recorded: reports in bench/results, and their counts in simulator/README.md.

python tools/simulated.py            run `tools/claims.py ascend rocm xpu`, record the reports of those that conform, then write
python tools/simulated.py --table    write the counts of what is recorded already

Reports name the commit that was run: run it where all is committed. The exit status is 1 where a platform failed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import claims

ROOT = claims.ROOT
PAGE = ROOT / "simulator" / "README.md"
PLATFORMS = ("ascend", "rocm", "xpu")


def recorded(platform: str) -> Path:
    """Where a platform's report is kept."""
    return ROOT / "bench" / "results" / f"conformance-{platform}-simulated.json"


def written(text: str, platform: str, report: dict[str, Any]) -> str:
    """The page with a platform's rows and result. Raises ValueError where it has no line for it."""
    line = re.compile(rf"^(\| {platform} \|[^|]*\|) [^|]* \| [^|]* \|", re.MULTILINE)
    if line.search(text) is None:
        raise ValueError(f"{PAGE.name} has no line of a table that begins with | {platform} |")
    return line.sub(rf"\1 {len(report['rows']):,} | {report['result']}, L{report['reached']} |", text, count=1)


def main(arguments: list[str]) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true")
    status = 0
    if not parser.parse_args(arguments).table:
        status = claims.main(list(PLATFORMS))
        for platform in PLATFORMS:
            found = ROOT / "conformance-report" / platform / "conformance.json"
            if found.is_file() and json.loads(found.read_text("utf-8"))["result"] == "CONFORMANT":
                shutil.copyfile(found, recorded(platform))
    text = PAGE.read_text("utf-8")
    for platform in PLATFORMS:
        text = written(text, platform, json.loads(recorded(platform).read_text("utf-8")))
    PAGE.write_text(text, "utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
