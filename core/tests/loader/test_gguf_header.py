from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_core.errors import ModelConfigError, ModelError, WeightsError
from vllm_core.loader.gguf_config import config_of
from vllm_core.loader.gguf_header import GGML_TYPES, read_header
from vllm_core.loader.gguf_weights import iterate

TENSORS = [
    ("token_embd.weight", np.arange(512, dtype=np.float32).reshape(8, 64), None),
    ("output_norm.weight", np.ones(64, dtype=np.float32), None),
]
VOCAB = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "é"],
    "tokenizer.ggml.scores": [0.5, 1.5, 2.5],
    "tokenizer.ggml.add_bos_token": True,
}


def test_reads_what_the_writer_wrote(write_gguf):
    header = read_header(write_gguf(metadata=VOCAB, tensors=TENSORS))
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["tokenizer.ggml.tokens"] == ["a", "b", "é"]
    assert header.metadata["tokenizer.ggml.scores"] == [0.5, 1.5, 2.5]
    assert header.metadata["tokenizer.ggml.add_bos_token"] is True
    assert header.tensors["token_embd.weight"].shape == (8, 64)
    assert [info.name for info in header.tensors.values()] == [name for name, _, _ in TENSORS]


@pytest.mark.model
@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf"])
def test_tensor_table_of_a_real_file_fills_the_file(model_file, name):
    path = model_file(name)
    infos = list(read_header(path).tensors.values())
    assert all(info.offset % 32 == 0 for info in infos)
    end = max(info.offset + info.size_bytes for info in infos)
    assert 0 <= path.stat().st_size - end < 32


def test_block_sizes_are_those_of_the_gguf_package():
    for number, (name, elements, size_bytes) in GGML_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (elements, size_bytes))


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fraction=st.floats(0, 0.999))
def test_file_cut_anywhere_is_an_error_in_four_parts(write_gguf, four_parts, fraction):
    path = write_gguf(metadata=VOCAB, tensors=TENSORS)
    whole = path.read_bytes()
    end = max(info.offset + info.size_bytes for info in read_header(path).tensors.values())
    path.write_bytes(whole[: int(end * fraction)])
    with pytest.raises(WeightsError, match=r"cut off|cannot be read") as caught:
        read_header(path)
    four_parts(caught.value)


def test_file_cut_in_half_names_bytes_found_and_expected(write_gguf):
    path = write_gguf(tensors=TENSORS)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 1000])
    with pytest.raises(WeightsError) as caught:
        read_header(path)
    assert caught.value.found == f"{len(whole) - 1000} bytes"
    assert "at least" in caught.value.expected
    assert "output_norm.weight" in caught.value.expected


def test_file_that_shrinks_after_opening_is_an_error(write_gguf):
    path = write_gguf(tensors=TENSORS)
    header = read_header(path)
    path.write_bytes(path.read_bytes()[:-1500])
    with pytest.raises(WeightsError, match="cut off"):
        list(iterate(header, config_of(header)))


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_never_crash(write_gguf, four_parts, data):
    path = write_gguf(metadata=VOCAB, tensors=TENSORS)
    raw = bytearray(path.read_bytes())
    head = min(info.offset for info in read_header(path).tensors.values())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, head - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        header = read_header(path)
        config_of(header)
    except ModelError as error:
        four_parts(error)


@pytest.mark.parametrize(
    ("offset", "value", "found"),
    [
        (0, b"GGML", "b'GGML'"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 1 << 60), "tensors"),
        (16, struct.pack("<Q", 1 << 60), "keys"),
        (24, struct.pack("<Q", 1 << 62), "a string of"),
    ],
)
def test_false_head_is_refused_before_it_is_believed(write_gguf, offset, value, found):
    path = write_gguf(tensors=TENSORS)
    raw = bytearray(path.read_bytes())
    raw[offset : offset + len(value)] = value
    path.write_bytes(raw)
    with pytest.raises(WeightsError) as caught:
        read_header(path)
    assert found in caught.value.found


def test_huge_array_is_refused(write_gguf):
    path = write_gguf(metadata=VOCAB)
    raw = bytearray(path.read_bytes())
    at = raw.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
    raw[at : at + 8] = struct.pack("<Q", 1 << 40)
    path.write_bytes(raw)
    with pytest.raises(WeightsError, match="an array of"):
        read_header(path)


def test_unknown_tensor_type_is_named_with_its_tensor(write_gguf):
    kind = gguf.GGMLQuantizationType.IQ4_NL
    blocks = np.zeros((2, 18), dtype=np.uint8)
    path = write_gguf(tensors=[("blk.0.attn_q.weight", blocks, kind)])
    with pytest.raises(WeightsError, match="IQ4_NL") as caught:
        read_header(path)
    assert "blk.0.attn_q.weight" in caught.value.on


def test_part_of_a_split_model_is_refused(write_gguf):
    with pytest.raises(ModelConfigError, match="part 1 of 3"):
        read_header(write_gguf(metadata={"split.count": 3, "split.no": 0}))
