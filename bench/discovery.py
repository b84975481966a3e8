"""What finding and choosing a platform costs with five plugins installed: seconds by stage, in whole processes.

    python bench/discovery.py [--runs 7] [--out FILE]

`first` is the first start on a machine: every plugin is imported and probed in a child process, all at once. `known` is
every start after it: nothing runs in a child. Four of the plugins are written by `plugin new`; the fifth is vllm-cpu if it
is installed. The goal is 250 ms to discover and choose, probes apart: `known.choose_s`. What importing core's own modules
costs before that is `import_s`. Medians with the range, each run a process of its own. `choose_cpu_s` is the processor time
of the same: on a machine that has other work the least of many runs, and this, say what the work itself takes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from vllm_core.authoring.scaffold import write

NAMES = ("alpha", "beta", "gamma", "delta")
GOAL_S = 0.25
LOOK = """
import json, os, sys, time
began = time.perf_counter()
from vllm_core.registry import candidates, select
from vllm_core.registry.plan import Needs
from vllm_core.api import CallSite
imported = time.perf_counter()
cpu = time.process_time()
usable, failed = candidates.collect(environ=os.environ)
collected = time.perf_counter()
sites = tuple(CallSite(op=op, role="norm", dtype="float32") for op in ("rms_norm", "add_rms_norm"))
empty = {"capabilities": frozenset(), "kv_groups": ()}
needs = Needs(model="m", architecture="a", dtype="float32", kv_dtype="float32", sites=sites, **empty)
chosen = select.plan(needs, usable, failed)
planned = time.perf_counter()
print(json.dumps({
    "import_s": imported - began, "collect_s": collected - imported, "plan_s": planned - collected,
    "choose_s": planned - imported, "choose_cpu_s": time.process_time() - cpu, "platforms": len(usable),
}))
"""


def install(folder: Path) -> Path:
    """Lay out the written plugins as pip would; returns the folder that has to be on the path."""
    site = folder / "site"
    site.mkdir()
    for name in NAMES:
        source = write(name, folder / "written") / "src" / f"vllm_{name}"
        source.rename(site / source.name)
        info = site / f"vllm_{name}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-{name}\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(f"[vllm.platforms]\n{name} = vllm_{name}.plugin\n")
    return site


def look(site: Path, cache: Path) -> dict[str, float]:
    """One process that finds, collects and plans."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environ |= {"PYTHONPATH": str(site), "VLLM_CORE_CACHE": str(cache), "VLLM_CORE_PLUGINS": ",".join((*NAMES, *extra()))}
    done = subprocess.run([sys.executable, "-c", LOOK], env=environ, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def extra() -> list[str]:
    """The real one, where it is installed."""
    from vllm_core.registry.discover import find

    return [one.key for one in find() if one.entry_point == "cpu"]


def summary(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median and range of each time, in milliseconds."""
    return {
        name: {
            "median_ms": round(statistics.median(row[name] for row in rows) * 1e3, 1),
            "least_ms": round(min(row[name] for row in rows) * 1e3, 1),
            "most_ms": round(max(row[name] for row in rows) * 1e3, 1),
        }
        for name in rows[0]
        if name.endswith("_s")
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vllm-core-bench-") as name:
        folder = Path(name)
        (folder / "written").mkdir()
        site = install(folder)
        first = [look(site, folder / f"cache{run}") for run in range(args.runs)]
        known = [look(site, folder / "cache0") for _ in range(args.runs + 1)][1:]
    result = {
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "platforms": known[0]["platforms"],
        "first": summary(first),
        "known": summary(known),
        "load": [round(one, 1) for one in os.getloadavg()],
        "goal_ms": GOAL_S * 1e3,
        "goal_met": statistics.median(row["choose_s"] for row in known) <= GOAL_S,
    }
    text = json.dumps(result, indent=2)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
