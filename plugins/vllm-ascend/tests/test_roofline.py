"""The bounds of a step: which resource binds, and that they grow with what they count."""

from __future__ import annotations

import pytest

from vllm_ascend.backends.families import ATLAS_A2, ATLAS_A3, FAMILIES, family_named, family_of
from vllm_ascend.roofline import Decoder, step

QWEN3_8B = Decoder(layers=36, hidden=4096, intermediate=12288, heads=32, kv_heads=8, head_size=128, vocabulary=151936)
SMOL = Decoder(layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_size=64, vocabulary=49152)


def test_the_weights_of_a_known_model_are_counted():
    assert QWEN3_8B.weights == pytest.approx(7.57e9, rel=0.01)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architecture)
def test_decoding_a_large_model_is_bound_by_memory_and_a_prompt_by_products(family):
    assert step(family, QWEN3_8B, tokens=1, rows=1, context=1024).bound == "memory"
    assert step(family, QWEN3_8B, tokens=8192, rows=1, context=8192).bound == "products"


def test_a_small_model_is_bound_by_launches():
    assert step(ATLAS_A2, SMOL, tokens=1, rows=1, context=128).bound == "launches"


def test_decoding_takes_at_least_one_reading_of_the_weights():
    found = step(ATLAS_A2, QWEN3_8B, tokens=1, rows=1, context=128)
    assert found.memory_s == pytest.approx(2 * QWEN3_8B.weights / ATLAS_A2.bytes_per_s, rel=0.01)


def test_keys_are_read_in_whole_blocks():
    one, full = (step(ATLAS_A3, QWEN3_8B, tokens=8, rows=8, context=context) for context in (1, 128))
    assert one.memory_s == full.memory_s < step(ATLAS_A3, QWEN3_8B, tokens=8, rows=8, context=129).memory_s


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("910B1", "910b"),
        ("910B2C", "910b"),
        ("910B4-1", "910b"),
        ("Ascend910", "910c"),
        ("Ascend910B3", "910b"),
        ("310P3", None),
        ("910A", None),
    ],
)
def test_a_chip_belongs_to_its_family(name, architecture):
    found = family_named(name)
    assert (found and found.architecture) == architecture
    assert found is None or family_of(found.architecture) is found
