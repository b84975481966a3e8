"""Products, and the figures of theirs that Intel publishes. Rates are of dense 16-bit products.

A rate is matrix engines x operations a clock of one x the clock, all three as `source` names them. One entry is what the
runtime counts as one device: of a Max 1550 one of its two stacks.
"""

from __future__ import annotations

from vllm_triton.roofline import Chip

CHIPS = (
    Chip(
        name="Data Center GPU Max 1550 (one stack)",
        architecture="pvc",
        units=64,
        bandwidth=1.6384e12,
        matrix_rate=512 * 512 * 1.6e9,
        memory_bytes=64 << 30,
        latency_s=800e-9,
        source="Intel Data Center GPU Max 1550 specifications: 3,276.8 GB/s, 1,024 XMX engines, 1.6 GHz, of which half; 512 "
        "operations of bf16 a clock (Intel Data Center GPU Max Series Technical Overview)",
    ),
    Chip(
        name="Arc A770",
        architecture="dg2",
        units=32,
        bandwidth=560e9,
        matrix_rate=512 * 128 * 2.1e9,
        memory_bytes=16 << 30,
        latency_s=500e-9,
        source="Intel Arc A770 specifications: 560 GB/s, 512 XMX engines, 2.1 GHz; 128 operations of fp16 a clock ("
        "Introduction to the Xe-HPG Architecture)",
    ),
    Chip(
        name="Arc B580",
        architecture="bmg",
        units=20,
        bandwidth=456e9,
        matrix_rate=160 * 256 * 2.67e9,
        memory_bytes=12 << 30,
        latency_s=500e-9,
        source="Intel Arc B580 specifications: 456 GB/s, 160 XMX engines, 2.67 GHz; 256 operations of fp16 a clock, twice as "
        "wide as Xe-HPG's",
    ),
)


def chip_of(architecture: str) -> Chip:
    """The product of an architecture. Raises KeyError where there is none."""
    return {chip.architecture: chip for chip in CHIPS}[architecture]
