"""The child process of a probe: imports one plugin, runs its `probe`, writes the report as JSON.

    python -m vllm_core.registry.probe_child DISTRIBUTION ENTRY_POINT REPORT probe|import

When the import has ended, a file beside the report says so. The last line on stderr says why it failed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from vllm_core.api import ProbeReport
from vllm_core.errors import PluginError
from vllm_core.registry.discover import find_in
from vllm_core.registry.load import load
from vllm_core.registry.plan import Failed
from vllm_core.registry.probe import imported_mark


def main(arguments: list[str]) -> int:
    """Return the exit status: 0, or 1 with the reason on stderr."""
    distribution, entry_point, report, what = arguments
    found = next((one for one in find_in(distribution) if one.entry_point == entry_point), None)
    if found is None:
        return _fail(f"{distribution}:{entry_point} is not found in the child process")
    loaded = load(found)
    imported_mark(Path(report)).touch()
    if isinstance(loaded, Failed):
        return _fail(str(loaded))
    kernels = loaded.manifest is None  # nothing to probe
    try:
        data = msgspec.json.encode(ProbeReport(devices=(), checks=()) if kernels or what == "import" else loaded.probe())
    except PluginError as error:
        return _fail(error.found)
    except (TypeError, msgspec.MsgspecError) as error:
        return _fail(f"its report is not plain data: {error}")
    Path(report).write_bytes(data)
    return 0


def _fail(reason: str) -> int:
    sys.stderr.write(f"\n{reason}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
