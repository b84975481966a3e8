"""Products and what their data sheets say. Peak figures of dense 16-bit products.

One entry is what the runtime counts as one device: of a Max 1550 one of its two stacks.
"""

from __future__ import annotations

from vllm_triton.roofline import Chip

CHIPS = (
    Chip(
        name="Data Center GPU Max 1550 (one stack)",
        architecture="pvc",
        units=64,
        bandwidth=1.6384e12,
        matrix_rate=416e12,
        memory_bytes=64 << 30,
        latency_s=800e-9,
        source="Intel Data Center GPU Max 1550 product brief, 2023, halved: 3.2768 TB/s, 832 TFLOPS bf16",
    ),
    Chip(
        name="Arc A770",
        architecture="dg2",
        units=32,
        bandwidth=560e9,
        matrix_rate=137.6e12,
        memory_bytes=16 << 30,
        latency_s=500e-9,
        source="Intel Arc A770 product page, 2022: 560 GB/s, 275 TOPS int8, halved for 16 bits",
    ),
    Chip(
        name="Arc B580",
        architecture="bmg",
        units=20,
        bandwidth=456e9,
        matrix_rate=116.5e12,
        memory_bytes=12 << 30,
        latency_s=500e-9,
        source="Intel Arc B580 product page, 2024: 456 GB/s, 233 TOPS int8, halved for 16 bits",
    ),
)
