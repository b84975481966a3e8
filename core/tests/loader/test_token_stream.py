from __future__ import annotations

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from vllm_core.loader.tokenizer import Tokenizer, byte_alphabet


def byte_level() -> Tokenizer:
    vocab = dict(byte_alphabet())
    vocab.update({"Ġthe": 256, "Ã©": 257, "ðŁ": 258})
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.add_tokens(["日本"])
    return Tokenizer(backend, name="bytes")


def sentencepiece() -> Tokenizer:
    words = ["<unk>", "▁", "▁the", "cat", "s", "日", "a", "▁▁"]
    vocab = {word: index for index, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(backend, name="spm")


def wordpiece() -> Tokenizer:
    words = ["[UNK]", "the", "cat", "##s", ".", ",", "a", "'", "##a"]
    backend = tokenizers.Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[SEP]"])
    return Tokenizer(backend, name="wordpiece")


TOKENIZERS = {tokenizer.name: tokenizer for tokenizer in (byte_level(), sentencepiece(), wordpiece())}
EURO = [8 + byte for byte in "€".encode()]


@settings(deadline=None, max_examples=400)
@given(data=st.data(), name=st.sampled_from(sorted(TOKENIZERS)), skip=st.booleans())
def test_pieces_join_to_the_text_of_all_tokens(data, name, skip):
    tokenizer = TOKENIZERS[name]
    # Bytes from U+0080 on are frequent, so that characters often come in pieces, and are often invalid.
    token = st.integers(0, tokenizer.vocab_size - 1) | st.integers(0, min(tokenizer.vocab_size, 12) - 1)
    pushes = data.draw(st.lists(st.lists(token, max_size=4), max_size=40))
    stream = tokenizer.stream(skip)
    text = "".join(stream.push(ids) for ids in pushes) + stream.flush()
    assert text == tokenizer.decode([token for ids in pushes for token in ids], skip)


@settings(deadline=None)
@given(text=st.text(max_size=60), name=st.sampled_from(["bytes", "spm"]))
def test_only_whole_characters_are_shown(text, name):
    tokenizer = TOKENIZERS[name]
    base = 0 if name == "bytes" else 8
    stream = tokenizer.stream()
    shown = "".join(stream.push([base + byte]) for byte in text.encode())
    assert "\ufffd" not in shown or "\ufffd" in text
    assert (shown + stream.flush()).strip(" ") == text.strip(" ")


def test_character_is_shown_with_its_last_byte():
    stream = TOKENIZERS["bytes"].stream()
    assert [stream.push([byte]) for byte in "a€b".encode()] == ["a", "", "", "€", "b"]
    assert stream.flush() == ""


def test_byte_run_is_shown_when_it_ends():
    stream = TOKENIZERS["spm"].stream()
    assert [stream.push([token]) for token in [2, *EURO, 3]] == ["the", "", "", "", "€cat"]


def test_incomplete_character_is_shown_at_the_end_only():
    for name, ids in {"bytes": [0xE2, 0x82], "spm": EURO[:2]}.items():
        stream = TOKENIZERS[name].stream()
        assert stream.push(ids) == ""
        assert stream.flush() == TOKENIZERS[name].decode(ids)


def test_leading_space_is_kept_inside_a_text():
    stream = TOKENIZERS["spm"].stream()
    assert [stream.push([2]) for _ in range(30)] == ["the", *[" the"] * 29]


def test_window_does_not_grow_with_the_text():
    stream = TOKENIZERS["spm"].stream()
    for _ in range(1000):
        stream.push([3, 2])
    assert len(stream._ids) < 32


def test_special_tokens_are_skipped_or_shown():
    end = TOKENIZERS["bytes"].encode("<|end|>")[0]
    assert TOKENIZERS["bytes"].stream().push([end, 0x41]) == "A"
    assert TOKENIZERS["bytes"].stream(skip_special_tokens=False).push([end, 0x41]) == "<|end|>A"


def test_streams_do_not_share_state():
    first, second = TOKENIZERS["bytes"].stream(), TOKENIZERS["bytes"].stream()
    first.push([0xE2])
    assert second.push([0x41]) == "A"
