"""Blackwell data centre chips (sm_100), and the smaller ones (sm_120), which have 99 KiB of shared memory."""

from __future__ import annotations

from dataclasses import replace

from vllm_cuda.backends import ada, hopper

TUNING = replace(hopper.TUNING, family="blackwell")

SMALL = replace(ada.TUNING, family="blackwell-small", pdl=True)
