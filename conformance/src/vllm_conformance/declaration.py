"""What a plugin's own tests say to have the suite among them.

from pathlib import Path
from vllm_conformance import Conformance

conformance = Conformance(platform="toy", waivers=Path(__file__).with_name("waivers.toml"))
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_conformance.options import RunOptions
from vllm_conformance.waivers import read_waivers


@dataclass(frozen=True, slots=True, kw_only=True)
class Conformance:
    """The suite, for pytest: put one at the top of a test module, under any name.

    `platform` is the name of an installed platform, `level` the highest level to run, `device` the id of the device to test
    (default: the first), `subset` a fixed part of the cases, `waivers` a file. The report is written to `out`, by default
    the folder ``conformance-report`` where pytest was started.
    """

    platform: str
    level: int = 5
    device: str | None = None
    subset: str | None = None
    waivers: Path | None = None
    out: Path = Path("conformance-report")

    def options(self) -> RunOptions:
        """What to run. Raises ConfigError for a file of waivers that cannot be read."""
        return RunOptions(
            platform=self.platform,
            level=self.level,
            device=self.device,
            subset=self.subset,
            waivers=() if self.waivers is None else read_waivers(self.waivers),
        )
