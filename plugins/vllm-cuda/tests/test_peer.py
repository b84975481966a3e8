"""Which way copies between two GPUs go."""

from __future__ import annotations

import pytest
import torch

from vllm_cuda import peer


@pytest.fixture(autouse=True)
def unknown_pairs():
    peer.why_not_direct.cache_clear()
    yield
    peer.why_not_direct.cache_clear()


def test_a_gpu_reaches_itself():
    assert peer.why_not_direct(torch.device("cuda:0"), torch.device("cuda:0")) == ""


def test_no_access_is_a_reason_and_is_asked_for_once(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: asked.append(pair) or False)
    for _ in range(2):
        reason = peer.why_not_direct(torch.device("cuda:0"), torch.device("cuda:1"))
        assert "no access between cuda:0 and cuda:1" in reason
    assert asked == [(torch.device("cuda:1"), torch.device("cuda:0"))]


def test_bytes_that_arrive_changed_are_counted():
    sent = torch.arange(256, dtype=torch.uint8)
    assert peer.changed(sent, torch.cat((sent[:1] + 1, sent[1:]))) == 1
    assert peer.changed(sent, sent.clone()) == 0
