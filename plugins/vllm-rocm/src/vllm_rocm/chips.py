"""Products and what their data sheets say. Peak figures of dense 16-bit products, without sparsity.

One entry is what the runtime counts as one device: MI210, and half of an MI250X (one of its two dies).
"""

from __future__ import annotations

from vllm_triton.roofline import Chip

CHIPS = (
    Chip(
        name="Instinct MI250X (one die)",
        architecture="gfx90a",
        units=110,
        bandwidth=1.6384e12,
        matrix_rate=191.5e12,
        memory_bytes=64 << 30,
        latency_s=800e-9,
        source="AMD Instinct MI250X accelerator data sheet, 2021, halved: 3.2 TB/s, 383.0 TFLOPS bf16",
    ),
    Chip(
        name="Instinct MI300X",
        architecture="gfx942",
        units=304,
        bandwidth=5.3e12,
        matrix_rate=1307.4e12,
        memory_bytes=192 << 30,
        latency_s=800e-9,
        source="AMD Instinct MI300X accelerator data sheet, 2023: 5.3 TB/s, 1307.4 TFLOPS bf16",
    ),
    Chip(
        name="Instinct MI350X",
        architecture="gfx950",
        units=256,
        bandwidth=8.0e12,
        matrix_rate=2306.9e12,
        memory_bytes=288 << 30,
        latency_s=800e-9,
        source="AMD Instinct MI350X GPU data sheet, 2025: 8 TB/s, 2306.9 TFLOPS bf16",
    ),
    Chip(
        name="Radeon RX 7900 XTX",
        architecture="gfx1100",
        units=48,
        bandwidth=960e9,
        matrix_rate=122.8e12,
        memory_bytes=24 << 30,
        latency_s=500e-9,
        source="AMD Radeon RX 7900 XTX product page, 2022: 960 GB/s, 122.8 TFLOPS half precision",
    ),
    Chip(
        name="Radeon RX 9070 XT",
        architecture="gfx1201",
        units=32,
        bandwidth=640e9,
        matrix_rate=195e12,
        memory_bytes=16 << 30,
        latency_s=500e-9,
        source="AMD Radeon RX 9070 XT product page, 2025: 640 GB/s, 195 TFLOPS half precision matrix",
    ),
)


def chip_of(architecture: str) -> Chip:
    """The product of an architecture. Raises KeyError where there is none."""
    return {chip.architecture: chip for chip in CHIPS}[architecture]
