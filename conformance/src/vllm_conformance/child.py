"""A child process: takes requests on one pipe, answers on another, until the first one ends.

Started by `vllm_conformance.worker` as ``python -m vllm_conformance.child IN OUT`` with the numbers of its two pipes. Its
standard output and error go to a file of the parent's, so that nothing that a plugin prints can be taken for an answer.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import unittest
from typing import BinaryIO, get_args

import msgspec

from vllm_conformance.case import Evidence, MissingDeviceError, Outcome
from vllm_conformance.protocol import (
    MAX_DETAIL_CHARS,
    Answer,
    Broken,
    Describe,
    Done,
    Preparing,
    Setup,
    Task,
    decode_request,
    encode,
)
from vllm_conformance.subject import LiveSubject
from vllm_core.api import load_entry
from vllm_core.errors import VLLMCoreError
from vllm_core.registry.load import describe_error

OUTCOMES = frozenset(get_args(Outcome))


def main(requests: int, answers: int) -> int:
    """Serve until the pipe of requests ends."""
    faulthandler.enable()
    for number in (requests, answers):
        os.set_inheritable(number, False)  # what a case starts must not keep the pipes open
    with open(requests, "rb") as source, open(answers, "wb", buffering=0) as sink:
        return _serve(source, sink)


def _serve(source: BinaryIO, sink: BinaryIO) -> int:
    def answer(message: Answer) -> None:
        sink.write(encode(message))

    subject: LiveSubject | None = None
    for line in source:
        request = decode_request(line)
        try:
            if isinstance(request, Setup):
                subject = LiveSubject(
                    request.platform,
                    devices=request.devices,
                    options=request.options,
                    announce=lambda done: answer(Preparing(done=done)),
                )
                continue
            assert subject is not None, "the first request is Setup"
            answer(_describe(subject, request) if isinstance(request, Describe) else run(request, subject))
        except VLLMCoreError as error:
            answer(Broken(what=error.what, on=error.on, found=error.found, expected=error.expected, fix=error.fix))
            return 2
    return 0


def _describe(subject: LiveSubject, request: Describe) -> Answer:
    from vllm_conformance.describe import describe  # plans, which no case needs to wait for

    return describe(subject, request)


def run(task: Task, subject: LiveSubject) -> Done:
    """Run one case. Nothing that it raises leaves this function."""
    try:
        subject.announce(False)
        function = load_entry(task.case.run)  # imports torch, for most
        subject.announce(True)
        evidence = function(subject, task.case.params)
    except MissingDeviceError as error:
        return Done(evidence=Evidence(outcome="FAIL", detail=f"{error.what}: {error.found}"), not_run=True)
    except BaseException as error:  # noqa: BLE001 - a case may raise anything; it becomes the row
        return Done(evidence=_failure(error))
    return Done(evidence=_checked(evidence))


def _failure(error: BaseException) -> Evidence:
    if _is_skip(error):
        return Evidence(outcome="ILLEGAL_SKIP", detail=f"skipped: {error}"[:MAX_DETAIL_CHARS])
    return Evidence(outcome="FAIL", detail=describe_error(error)[:MAX_DETAIL_CHARS])


def _is_skip(error: BaseException) -> bool:
    """Whether it is pytest's way of skipping, or unittest's. Without importing pytest for it."""
    pytest = sys.modules.get("_pytest.outcomes")
    return isinstance(error, unittest.SkipTest) or (pytest is not None and isinstance(error, pytest.Skipped))


def _checked(evidence: object) -> Evidence:
    """What a case returned, if it can be believed; else why not."""
    if not isinstance(evidence, Evidence):
        return Evidence(outcome="FAIL", detail=f"the case returned {type(evidence).__name__}, not Evidence")
    if evidence.outcome not in OUTCOMES:
        return Evidence(outcome="FAIL", detail=f"the case returned the outcome {evidence.outcome!r}")
    evidence.detail = evidence.detail[:MAX_DETAIL_CHARS]
    try:
        msgspec.json.decode(msgspec.json.encode(evidence), type=Evidence)  # as it will arrive: NaN does not
    except (msgspec.MsgspecError, TypeError) as error:
        return Evidence(outcome="FAIL", detail=f"the case returned wrong evidence: {error}")
    return evidence


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
