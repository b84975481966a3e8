"""Programmatic dependent launch (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization").

A kernel launched so may start while the one before it drains. `wait` blocks until that one's writes are visible: every
kernel calls it before it touches memory that another kernel of the step writes. `trigger` lets the next one start.
"""

from __future__ import annotations

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    # Compilers without such launches: with PDL off neither name is compiled.
    gdc_launch_dependents = gdc_wait = None


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait for the kernel before, where this one may have started early."""
    if PDL:
        gdc_wait()


@triton.jit
def trigger(PDL: tl.constexpr):
    """Let the kernel after this one start."""
    if PDL:
        gdc_launch_dependents()
