from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from vllm_core.config import ModelConfig
from vllm_core.errors import ContextLengthError, RequestError, TokenizerError
from vllm_core.loader import folder_tokenizer, gguf_tokenizer
from vllm_core.loader.gguf_header import read_header
from vllm_core.loader.source import open_model
from vllm_core.loader.tokenizer import Tokenizer, byte_alphabet, bytes_of

CORPUS = [
    "",
    " ",
    "\n",
    "\t\t x",
    "Hello world",
    " leading",
    "trailing ",
    "1234567890 12 3.14 1,000",
    "x" * 300,
    "a b  c   d    e     f",
    "def f(x):\n    return x**2  # comment\n\n\n\tif x:\r\n    12\n",
    "v    5",
    "naïve “q” ½ ² ٣٤ १२३ Ⅷ",
    "日本語 中文 한국어",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈",
    "\u200b\ufeff\u00a0 nbsp",
    "<|im_start|>user\nhi<|im_end|>",
    "<bos>a<eos> <unk> <pad> <mask>",
    "<|endoftext|><repo_name>a",
    "I'm you're WE'LL 'tis",
    "e\u0301 \u0300",
    "אבג العربية ไทย हिन्दी",
    "\x00\x01\x7f",
    "<0x41><0xE2> ▁ ▁▁x",
    "a\u2028b\u2029c\u0085d",
    "http://a.b/c?d=e&f=g#h",
    "𝔘𝔫𝔦 𐍈",
    '{"a": [1, 2, {"b": null}]}',
    "\n" * 6,
    " " * 30 + "x",
    "<unused1>[multimodal]",
]
SMOLLM, GEMMA, MINILM = "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf", "all-minilm-l6-v2"


@pytest.fixture(scope="session")
def smollm(model_file):
    return open_model(ModelConfig(model=str(model_file(SMOLLM)))).tokenizer()


def bytes_backend() -> tokenizers.Tokenizer:
    """A byte-level vocabulary of the 256 bytes."""
    vocab = byte_alphabet()
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("name", [SMOLLM, GEMMA])
@pytest.mark.filterwarnings("ignore")
def test_gguf_token_ids_are_those_of_transformers(model_file, name):
    transformers = pytest.importorskip("transformers")
    path = model_file(name)
    reference = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=name)
    ours = open_model(ModelConfig(model=str(path))).tokenizer()
    for text in CORPUS:
        for special in (True, False):
            ids = reference.encode(text, add_special_tokens=special)
            assert ours.encode(text, special) == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip), text


@pytest.mark.model
@pytest.mark.filterwarnings("ignore")
def test_wordpiece_ids_are_those_of_transformers(model_file):
    transformers = pytest.importorskip("transformers")
    folder = model_file(MINILM)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    ours = open_model(ModelConfig(model=str(folder))).tokenizer()
    for text in CORPUS:
        assert ours.encode(text) == reference.encode(text), text
        assert ours.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False), text


@pytest.mark.model
def test_truncation_and_padding_of_the_file_are_off(model_file):
    folder = model_file(MINILM)
    stored = json.loads((folder / "tokenizer.json").read_text())
    assert stored["truncation"] or stored["padding"], "the file does not show the rule"
    tokenizer = folder_tokenizer.load(folder)
    assert tokenizer.encode("a") == [101, 1037, 102]
    assert len(tokenizer.encode("a " * 2000)) == 2002


@pytest.mark.model
def test_demo_model_brings_its_special_tokens_and_template(smollm):
    assert (smollm.vocab_size, smollm.bos_token_id, smollm.eos_token_ids) == (49152, 1, [2])
    text = smollm.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert smollm.encode(text, add_special_tokens=False)[0] == 1


@pytest.mark.model
def test_token_texts_join_to_the_text(smollm):
    ids = smollm.encode("Hello world 12 <|im_end|> foo")
    assert "".join(map(smollm.token_text, ids)) == "Hello world 12 <|im_end|> foo"


def test_token_text_of_wordpiece_keeps_the_space():
    backend = tokenizers.Tokenizer(models.WordPiece({"a": 0, "cat": 1, "##s": 2, "[UNK]": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend, name="t")
    assert [tokenizer.token_text(token) for token in (1, 2)] == [" cat", "s"]


@pytest.mark.parametrize("text", ["\ud800", "fine \udfff end", "é" * 1000 + "\ud83d"])
def test_lone_surrogate_is_a_request_error(text, four_parts):
    with pytest.raises(RequestError, match="lone surrogate") as caught:
        Tokenizer(bytes_backend(), name="t").encode(text)
    four_parts(caught.value)
    assert str(len(text.rstrip(" end")) - 1) in caught.value.on


def test_text_that_cannot_fit_is_refused_before_it_is_encoded(four_parts):
    class Untouched:
        def encode(self, *args, **kwargs):
            raise AssertionError("the text was encoded")

    tokenizer = Tokenizer(bytes_backend(), name="t")
    assert tokenizer._longest_token == 1
    assert tokenizer._keeps_length
    tokenizer._backend = Untouched()
    with pytest.raises(ContextLengthError, match="longer than the context") as caught:
        tokenizer.encode("x" * 10_000_000, max_tokens=8192)
    four_parts(caught.value)


def test_text_that_may_fit_is_encoded_whatever_its_length():
    tokenizer = Tokenizer(bytes_backend(), name="t")
    assert len(tokenizer.encode("x" * 640, max_tokens=10)) == 640
    with pytest.raises(RequestError):
        tokenizer.encode("x" * 641, max_tokens=10)


def test_length_bound_never_refuses_what_fits():
    backend = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "y": 1}, unk_token="[UNK]"))
    tokenizer = Tokenizer(backend, name="t")
    assert not tokenizer._keeps_length
    assert tokenizer.encode("x" * 700, max_tokens=10) == [0]


def test_ids_outside_the_vocabulary_have_no_text():
    tokenizer = Tokenizer(bytes_backend(), name="t")
    assert tokenizer.decode([0x41, 99999]) == tokenizer.decode([0x41])
    assert tokenizer.token_text(99999) == ""


def test_byte_alphabet_is_a_bijection():
    assert sorted(byte_alphabet().values()) == list(range(256))
    assert bytes_of("Ġa") == b" a"
    assert bytes_of("日") == "日".encode()


def test_template_by_name_and_by_text():
    templates = {"default": "D", "tool_use": "T{{ tools | length }}"}
    tokenizer = Tokenizer(bytes_backend(), name="t", special_tokens={"bos_token": "<s>"}, chat_templates=templates)
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.chat_template == "D"
    assert tokenizer.apply_chat_template(messages) == "D"
    assert tokenizer.apply_chat_template(messages, tools=[{"a": 1}]) == "T1"
    assert tokenizer.apply_chat_template(messages, chat_template="{{ bos_token }}{{ x }}", x=3) == "<s>3"
    with pytest.raises(RequestError, match="no such chat template"):
        tokenizer.apply_chat_template(messages, chat_template="other")
    with pytest.raises(RequestError, match="a model with a chat template"):
        Tokenizer(bytes_backend(), name="t").apply_chat_template(messages)


def folder_files(**more):
    return {"tokenizer.json": bytes_backend().to_str(), **more}


def test_template_of_a_folder_file_beats_the_config(write_folder):
    config = {"chat_template": "config", "eos_token": {"content": "A", "lstrip": False}}
    files = {"tokenizer_config.json": config, "chat_template.jinja": "file", "additional_chat_templates/rag.jinja": "rag"}
    tokenizer = folder_tokenizer.load(write_folder(folder_files(**files)))
    assert tokenizer.chat_template == "file"
    assert tokenizer.apply_chat_template([], chat_template="rag") == "rag"
    assert tokenizer.special_tokens == {"eos_token": "A"}
    assert tokenizer.eos_token_ids == [0x41]


def test_named_templates_of_the_config(write_folder):
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}, {"name": 3}]
    tokenizer = folder_tokenizer.load(write_folder(folder_files(**{"tokenizer_config.json": {"chat_template": named}})))
    assert tokenizer.apply_chat_template([], tools=[{}]) == "two"


def test_end_ids_of_the_generation_config_come_first(write_folder):
    folder = write_folder(folder_files(**{"special_tokens_map.json": {"eos_token": "A"}}))
    assert folder_tokenizer.load(folder, eos_token_ids=[7, 0x41]).eos_token_ids == [7, 0x41]


@pytest.mark.parametrize(("flags", "expected"), [({"add_bos_token": True}, [0x42, 0x61]), ({"add_bos_token": False}, [0x61])])
def test_flags_decide_over_surrounding_tokens(write_folder, flags, expected):
    config = {"bos_token": "B", "eos_token": "A", **flags}
    tokenizer = folder_tokenizer.load(write_folder(folder_files(**{"tokenizer_config.json": config})))
    assert tokenizer.encode("a") == expected
    assert tokenizer.encode("a", add_special_tokens=False) == [0x61]


@pytest.mark.parametrize("content", ["", "{}", "{", "[]", '{"model": {"type": "Magic"}}'])
def test_broken_tokenizer_is_an_error_in_four_parts(write_folder, four_parts, content):
    with pytest.raises(TokenizerError) as caught:
        folder_tokenizer.load(write_folder({"tokenizer.json": content}))
    four_parts(caught.value)


def test_broken_template_is_found_at_load(write_folder):
    with pytest.raises(TokenizerError, match="Chat template"):
        folder_tokenizer.load(write_folder(folder_files(**{"chat_template.jinja": "{% if %}"})))


GPT2 = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": [*byte_alphabet(), "ab", "<s>"],
    "tokenizer.ggml.token_type": [1] * 257 + [3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 257,
}
SPM = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "hi", "▁hi"],
    "tokenizer.ggml.scores": [0.0] * 260 + [-3.0, -4.0, -1.0, -0.5],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 5,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def build(write_gguf, metadata, **more):
    return gguf_tokenizer.build(read_header(write_gguf(metadata={**metadata, **more})))


def test_llama3_texts_begin_with_their_token(write_gguf):
    assert build(write_gguf, GPT2).encode("ab") == [257, 256]
    assert build(write_gguf, GPT2, **{"tokenizer.ggml.add_bos_token": False}).encode("ab") == [256]
    assert build(write_gguf, GPT2, **{"tokenizer.ggml.pre": "qwen2"}).encode("ab") == [256]


def test_control_tokens_inside_a_text_stay_whole_and_are_skipped(write_gguf):
    tokenizer = build(write_gguf, GPT2)
    ids = tokenizer.encode("ab<s>ab", add_special_tokens=False)
    assert ids == [256, 257, 256]
    assert tokenizer.decode(ids) == "abab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "ab<s>ab"


def test_sentencepiece_prefixes_a_space_unless_the_file_says_no(write_gguf):
    assert build(write_gguf, SPM).encode("hi") == [1, 263]
    assert build(write_gguf, SPM).decode([1, 263]) == "hi"
    assert build(write_gguf, SPM, **{"tokenizer.ggml.add_space_prefix": False}).encode("hi") == [1, 262]


def test_sentencepiece_falls_back_to_bytes(write_gguf):
    tokenizer = build(write_gguf, SPM)
    assert tokenizer.encode("é", add_special_tokens=False) == [259, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode([3 + 0xC3, 3 + 0xA9]) == "é"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tokenizer.ggml.model": "bert"}, "gpt2 or llama"),
        ({"tokenizer.ggml.pre": "martian"}, "martian"),
        ({"tokenizer.ggml.token_type": [1]}, "one for each token"),
        ({"tokenizer.ggml.bos_token_id": 9999}, "9999"),
        ({"tokenizer.ggml.merges": ["a nowhere"]}, "merges"),
        ({"tokenizer.ggml.tokens": None}, "tokens"),
        ({"tokenizer.chat_template": "{% for %}"}, "Chat template"),
    ],
)
def test_metadata_that_makes_no_tokenizer_is_named(write_gguf, four_parts, changes, text):
    with pytest.raises(TokenizerError, match=text) as caught:
        build(write_gguf, GPT2, **changes)
    four_parts(caught.value)
