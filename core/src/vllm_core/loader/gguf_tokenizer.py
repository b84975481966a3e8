"""The tokenizer that a GGUF file's metadata describes, built with the `tokenizers` library.

Follows transformers' conversion, so that token ids are the same; where that leaves out what llama.cpp and the original
tokenizers do (`add_space_prefix`, Llama 3's beginning of text), the originals are followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from vllm_core.errors import TokenizerError
from vllm_core.loader.gguf_config import generation_config_of
from vllm_core.loader.gguf_header import GGUFHeader
from vllm_core.loader.tokenizer import Tokenizer, byte_alphabet

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"
_KEY = "tokenizer.ggml."

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_SPLITS = {
    **dict.fromkeys(_LLAMA3, _LLAMA3_SPLIT),
    "smaug-bpe": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
}
_GPT2_LIKE = ("default", "gpt-2", "smollm")


def build(header: GGUFHeader, chat_template: str | None = None) -> Tokenizer:
    """Build the tokenizer; ``chat_template`` replaces the file's. Raises TokenizerError for a kind that is not known."""
    metadata, on = header.metadata, str(header.path)
    kind = metadata.get(_KEY + "model")
    _check_arrays(metadata, on)
    if kind == "gpt2":
        backend = _byte_level(metadata, on)
    elif kind == "llama":
        backend = _sentencepiece(metadata, gemma=str(metadata.get("general.architecture")).startswith("gemma"), on=on)
    else:
        raise _wrong(on, f"{_KEY}model", repr(kind), "gpt2 or llama")
    special = _special_tokens(metadata, on)
    _add_tokens(backend, metadata, special, byte_level=kind == "gpt2")
    backend.post_processor = _post_processor(metadata)
    templates = {
        key.removeprefix("tokenizer.chat_template").lstrip(".") or "default": value
        for key, value in metadata.items()
        if key.startswith("tokenizer.chat_template") and isinstance(value, str)
    }
    if chat_template is not None:
        templates["default"] = chat_template
    return Tokenizer(
        backend,
        name=on,
        special_tokens=special,
        eos_token_ids=generation_config_of(header).get("eos_token_id", ()),
        chat_templates=templates,
    )


def _check_arrays(metadata: Mapping[str, Any], on: str) -> None:
    tokens = metadata.get(_KEY + "tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise _wrong(on, f"{_KEY}tokens", type(tokens).__name__, "a list of strings")
    for name in ("scores", "token_type"):
        values = metadata.get(_KEY + name)
        if values is not None and (not isinstance(values, list) or len(values) != len(tokens)):
            found = f"{len(values)} values" if isinstance(values, list) else type(values).__name__
            raise _wrong(on, _KEY + name, found, f"{len(tokens)}, one for each token")


def _byte_level(metadata: Mapping[str, Any], on: str) -> tokenizers.Tokenizer:
    spelling = {byte: character for character, byte in byte_alphabet().items()}
    tokens = metadata[_KEY + "tokens"]
    strange = set("".join(tokens)).difference(spelling.values())
    if strange:
        tokens = [
            token if strange.isdisjoint(token) else "".join(spelling[byte] for byte in token.encode()) for token in tokens
        ]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in metadata.get(_KEY + "merges", ())]
    backend = tokenizers.Tokenizer(_bpe(on, vocab=vocab, merges=merges, fuse_unk=False))
    pre = metadata.get(_KEY + "pre", "default")
    if pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    elif pre in _GPT2_LIKE:
        # smollm's own tokenizer also splits digits from what stands before them. transformers' conversion does not,
        # which shows at runs of spaces before a digit; the same ids as there are worth more here.
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        raise _wrong(on, f"{_KEY}pre", repr(pre), f"one of {', '.join([*_GPT2_LIKE, *_SPLITS])}")
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any], *, gemma: bool, on: str) -> tokenizers.Tokenizer:
    tokens = metadata[_KEY + "tokens"]
    if gemma:
        # Runs of spaces are stored as spaces; text reaches the model with spaces replaced.
        tokens = [_SPACE * len(token) if " " in token and not token.strip() else token for token in tokens]
    vocab = {token: index for index, token in enumerate(tokens)}
    if _KEY + "merges" in metadata:
        merges = [tuple(merge.split(" ")) for merge in metadata[_KEY + "merges"]]
    else:
        scores = None if gemma else metadata.get(_KEY + "scores")
        from vllm_core.loader.implied_merges import implied_merges  # numpy: most files have their merges

        merges = implied_merges(list(vocab), None if scores is None else [scores[index] for index in vocab.values()])
    unknown = metadata.get(_KEY + "unknown_token_id")
    unk = tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None
    model = _bpe(on, vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True, unk_token=unk if gemma else None)
    backend = tokenizers.Tokenizer(model)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if gemma:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
        backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    else:
        prefix = metadata.get(_KEY + "add_space_prefix", True)
        scheme = "first" if prefix else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
        if prefix:
            steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _bpe(on: str, **arguments: Any) -> models.BPE:
    try:
        return models.BPE(**arguments)
    except Exception as error:  # `tokenizers` raises bare Exception for merges outside the vocabulary
        raise _wrong(on, f"{_KEY}merges", str(error), "merges of two tokens into a token") from error


def _special_tokens(metadata: Mapping[str, Any], on: str) -> dict[str, str]:
    tokens = metadata[_KEY + "tokens"]
    special = {}
    for name, theirs in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        index = metadata.get(f"{_KEY}{theirs}_token_id")
        if index is None:
            continue
        if not isinstance(index, int) or not 0 <= index < len(tokens):
            raise _wrong(on, f"{_KEY}{theirs}_token_id", repr(index), f"an id below {len(tokens)}")
        special[f"{name}_token"] = tokens[index]
    return special


def _add_tokens(
    backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], special: Mapping[str, str], *, byte_level: bool
) -> None:
    """Tokens that are matched whole in a text: control tokens, and those that users defined."""
    tokens, types = metadata[_KEY + "tokens"], metadata.get(_KEY + "token_type") or ()
    alphabet = set(byte_alphabet())
    # A control token with other characters than those of the byte alphabet is a mislabelled part of the vocabulary.
    control = [
        token
        for token, kind in zip(tokens, types, strict=False)
        if kind == _CONTROL and (not byte_level or alphabet.issuperset(token))
    ]
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in dict.fromkeys([*special.values(), *control])]
    )
    defined = [token for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    known = [token for token in defined if backend.token_to_id(token) is not None]
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in known])


def _post_processor(metadata: Mapping[str, Any]) -> processors.TemplateProcessing:
    bos, eos = metadata.get(_KEY + "bos_token_id"), metadata.get(_KEY + "eos_token_id")
    # What llama.cpp takes where older files say nothing.
    default = metadata.get(_KEY + "model") == "llama" or metadata.get(_KEY + "pre") in _LLAMA3
    begins = bos is not None and metadata.get(_KEY + "add_bos_token", default)
    ends = eos is not None and metadata.get(_KEY + "add_eos_token", False)
    return surround(bos if begins else None, eos if ends else None)


def surround(bos: int | None, eos: int | None) -> processors.TemplateProcessing:
    """A post-processor that puts these tokens around a text."""
    single = [*(["bos:0"] if bos is not None else []), "$A:0", *(["eos:0"] if eos is not None else [])]
    pair = [*single, *(piece.replace(":0", ":1").replace("$A", "$B") for piece in single)]
    named = [(name, token) for name, token in (("bos", bos), ("eos", eos)) if token is not None]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=named)


def _wrong(on: str, key: str, found: str, expected: str) -> TokenizerError:
    return TokenizerError(
        "Tokenizer of the GGUF file cannot be used",
        on=f"{key} in {on}",
        found=found,
        expected=expected,
        fix="give the original tokenizer's folder with --tokenizer",
    )
