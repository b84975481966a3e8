"""What parent and child tell each other: one JSON object a line, over two pipes that nothing else writes to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_conformance.case import Case, Evidence
from vllm_conformance.collect import PACKAGE
from vllm_core.api import DeviceFacts

MAX_LINE_BYTES = 16 << 20
MAX_DETAIL_CHARS = 4000


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First message to a child. `devices` are empty when it is to look for them itself; the first is under test."""

    platform: str
    devices: tuple[DeviceFacts, ...] = ()
    options: Mapping[str, Any] = {}


class Describe(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks for a `Description`, with the cases of a package's modules."""

    device: str | None = None
    cases: str = PACKAGE


class Task(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks for one case."""

    case: Case


class Preparing(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something is being imported or opened (`done`: has been): the case's clock stands still meanwhile."""

    done: bool


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A case's evidence. `not_run` is set where it could not run for want of a device."""

    evidence: Evidence
    not_run: bool = False


class Description(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The platform as it is here, without its objects. `problem` says why it cannot be tested beyond level 0."""

    platform: str
    distribution: str
    distribution_version: str
    entry_point: str
    problem: str = ""
    vendor: str = ""
    api_version: str = ""
    support_level: str = ""
    companions: tuple[str, ...] = ()
    """The versions that it was made for, a sentence each."""
    claims: dict[str, dict[str, Any]] = {}
    providers: dict[str, tuple[str, ...]] = {}
    """Of each op that something here serves: its providers, best first; ``reference`` is core's own."""
    devices: tuple[DeviceFacts, ...] = ()
    cases: tuple[Case, ...] = ()
    plan: dict[str, Any] | None = None
    plan_problem: str = ""
    torch_version: str = ""


class Broken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The suite itself cannot go on: no such platform, or cases that cannot be collected."""

    what: str
    on: str
    found: str
    expected: str
    fix: str


Request = Setup | Describe | Task
Answer = Preparing | Done | Description | Broken

_encoder = msgspec.json.Encoder()
_requests: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def encode(message: Request | Answer) -> bytes:
    """One line."""
    return _encoder.encode(message) + b"\n"


def decode_request(line: bytes) -> Request:
    """Raises msgspec.DecodeError."""
    return _requests.decode(line)


def decode_answer(line: bytes) -> Answer:
    """Raises msgspec.DecodeError."""
    return _answers.decode(line)
