"""Record the contract of the current API version, for `vllm-core plugin diff-api` and the test that guards it.

    python tools/record_api.py

A version that has been released is never recorded anew: raise `API_VERSION` first.
"""

from __future__ import annotations

from vllm_core.authoring.describe import describe, to_text
from vllm_core.authoring.diff import RECORDED, current_version


def main() -> None:
    """Write the file and name it."""
    path = RECORDED / f"{current_version()}.json"
    path.write_text(to_text(describe()), "utf-8")
    print(path)


if __name__ == "__main__":
    main()
