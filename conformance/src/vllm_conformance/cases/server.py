"""L4: a real server process, `vllm-core serve`, on a tiny model. Planning; imports no torch.

All cases but the last share one server of their process, so that it is started once; one that has ended is started anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from vllm_conformance.case import Case
from vllm_core.api import DeviceFacts, Offer, Support

NAMES = (
    "completions_are_right",
    "streams_are_the_same_text",
    "several_choices_and_prompts",
    "wrong_requests_are_refused_and_the_next_served",
    "an_abort_in_midstream_frees_blocks",
    "overload_is_answered",
    "aborts_under_load_leave_nothing",
    "a_signal_ends_it_in_order",
)


def collect(claims: Mapping[str, Support], offers: Sequence[Offer], facts: DeviceFacts) -> Iterator[Case]:
    """The same for every platform."""
    for name in NAMES:
        run = f"vllm_conformance.cases.runs.server:{name}"
        yield Case(f"L4/{name}", 4, "server:http", "large", run, {"ci": True})
