"""Products, and the figures of theirs that AMD publishes. Rates are of dense 16-bit products, without sparsity.

A rate is compute units x operations a clock of one x the highest clock, all three as `source` names them; it is AMD's own peak
figure where that is given. Counts of units, LDS and registers: ROCm documentation, "AMD GPU specifications". One entry is what
the runtime counts as one device: MI210, and half of an MI250X (one of its two dies). A unit is what torch counts as a
multiprocessor: two compute units on RDNA.
"""

from __future__ import annotations

from vllm_triton.roofline import Chip

CHIPS = (
    Chip(
        name="Instinct MI250X (one die)",
        architecture="gfx90a",
        units=110,
        bandwidth=1.6e12,
        matrix_rate=110 * 1024 * 1.7e9,
        memory_bytes=64 << 30,
        latency_s=800e-9,
        source='ROCm documentation, "MI250 microarchitecture": 1.6 TB/s a die, 1.7 GHz; AMD\'s table of the MI200 series: 220 '
        "compute units and 383.0 TFLOPS bf16 in both dies, 1,024 operations a clock and unit",
    ),
    Chip(
        name="Instinct MI300X",
        architecture="gfx942",
        units=304,
        bandwidth=5.3e12,
        matrix_rate=304 * 2048 * 2.1e9,
        memory_bytes=192 << 30,
        latency_s=800e-9,
        source="AMD Instinct MI300X data sheet: 5.3 TB/s, 2.1 GHz, 1,307.4 TFLOPS bf16, 2,048 operations a clock and unit",
    ),
    Chip(
        name="Instinct MI350X",
        architecture="gfx950",
        units=256,
        bandwidth=8.0e12,
        matrix_rate=256 * 4096 * 2.2e9,
        memory_bytes=288 << 30,
        latency_s=800e-9,
        source="AMD Instinct MI350X product page: 8 TB/s, 2.2 GHz; twice CDNA 3's operations a clock and unit, 4,096",
    ),
    Chip(
        name="Radeon RX 7900 XTX",
        architecture="gfx1100",
        units=48,
        bandwidth=960e9,
        matrix_rate=96 * 512 * 2.498e9,
        memory_bytes=24 << 30,
        latency_s=500e-9,
        source="AMD Radeon RX 7900 XTX product page: 960 GB/s, 96 compute units, 2.498 GHz, 512 operations a clock and unit",
    ),
    Chip(
        name="Radeon RX 9070 XT",
        architecture="gfx1201",
        units=32,
        bandwidth=640e9,
        matrix_rate=64 * 1024 * 2.97e9,
        memory_bytes=16 << 30,
        latency_s=500e-9,
        source="AMD Radeon RX 9070 XT product page: 640 GB/s, 64 compute units, 2.97 GHz, 1,024 operations a clock and unit",
    ),
)


def chip_of(architecture: str) -> Chip:
    """The product of an architecture. Raises KeyError where there is none."""
    return {chip.architecture: chip for chip in CHIPS}[architecture]
