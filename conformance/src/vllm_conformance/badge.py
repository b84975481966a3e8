"""A badge for a plugin's README, as SVG."""

from __future__ import annotations

from html import escape

from vllm_conformance.report import Report
from vllm_core.errors import ConfigError

LABEL = "vllm conformance"
_CHARACTER_PX = 6.6
_PADDING_PX = 12.0
_COLOURS = {"CONFORMANT": "#2a7d4f", "NOT_CONFORMANT": "#b3261e", "INCOMPLETE": "#8a6d00"}


def badge(report: Report) -> str:
    """The badge of a report. Raises ConfigError for a subset, which proves no level, and for a run without some provider."""
    if report.subset is not None or report.denied:
        raise ConfigError(
            "A badge needs a whole run",
            on=f"{report.platform.distribution} {report.versions.plugin}",
            found=f"subset {report.subset}" if report.subset else f"a run without {', '.join(report.denied)}",
            expected="all cases of a level, with all providers",
            fix=f"vllm-core conformance run --platform {report.platform.name}",
        )
    return _svg(message(report), _COLOURS[report.result])


def message(report: Report) -> str:
    """What the badge says."""
    if report.result == "CONFORMANT":
        return f"L{report.reached} simulated" if report.simulated else f"L{report.reached}"
    return "incomplete" if report.result == "INCOMPLETE" else "failing"


def _svg(text: str, colour: str) -> str:
    left, right = (len(one) * _CHARACTER_PX + _PADDING_PX for one in (LABEL, text))
    width = left + right
    font = "font-family='Verdana,DejaVu Sans,sans-serif' font-size='11' fill='#fff' text-anchor='middle'"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:g}' height='20' role='img' "
        f"aria-label='{escape(f'{LABEL}: {text}')}'>"
        f"<title>{escape(f'{LABEL}: {text}')}</title>"
        f"<clipPath id='r'><rect width='{width:g}' height='20' rx='3'/></clipPath>"
        f"<g clip-path='url(#r)'><rect width='{left:g}' height='20' fill='#444'/>"
        f"<rect x='{left:g}' width='{right:g}' height='20' fill='{colour}'/></g>"
        f"<g {font}><text x='{left / 2:g}' y='14'>{escape(LABEL)}</text>"
        f"<text x='{left + right / 2:g}' y='14'>{escape(text)}</text></g></svg>\n"
    )
