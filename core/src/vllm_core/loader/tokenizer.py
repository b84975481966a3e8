"""Text to token ids and back, and chat templates. Uses `tokenizers` and `jinja2` alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers

from vllm_core.errors import ContextLengthError, RequestError
from vllm_core.loader.chat_template import ChatTemplate
from vllm_core.loader.token_stream import ByteStream, TokenStream, WindowStream

_SURE_CHARS = 64
"""Characters per token up to which a text is encoded without asking how long the longest token is."""
_SHRINKING_SLACK = 16
"""Where a normalizer drops characters, or one unknown token stands for many, this much more is let through."""


class Tokenizer:
    """A tokenizer with its chat templates.

    ``special_tokens`` are the texts of `bos_token`, `eos_token`, `unk_token`, `pad_token`... that templates see.
    ``chat_templates`` are sources by name; `default` is used unless tools are given and there is a `tool_use`.
    Raises TokenizerError for a template with wrong syntax.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        name: str,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        # Both would change prompts: what does not fit is an error, and padding is for batches of equal length.
        backend.no_truncation()
        backend.no_padding()
        self._backend, self.name = backend, name
        self.special_tokens = dict(special_tokens or {})
        self.eos_token_ids = list(eos_token_ids)
        templates = chat_templates or {}
        self._templates = {key: ChatTemplate(text, on=f"{key} template of {name}") for key, text in templates.items()}
        self._given: dict[str, ChatTemplate] = {}
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token for token, content in added.items() if content.special)
        self._byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self._token_bytes = {False: _TokenBytes(backend, frozenset()), True: _TokenBytes(backend, self._special_ids)}

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text."""
        bos = self.special_tokens.get("bos_token")
        return None if bos is None else self._backend.token_to_id(bos)

    @property
    def chat_template(self) -> str | None:
        """Source of the default chat template."""
        template = self._templates.get("default")
        return None if template is None else template.source

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Token ids of ``text``.

        Raises RequestError for a text that is no Unicode text (lone surrogates), and, before any work is done, for
        one so long that it cannot have as few as ``max_tokens`` tokens; the exact length is for the caller to check.
        """
        if max_tokens is not None and len(text) > max_tokens * _SURE_CHARS:
            self._check_length(text, max_tokens)
        if not text.isascii():
            _check_unicode(text)
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; ids outside the vocabulary have none."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token: int) -> str:
        """Text of one token as it appears inside a text, special tokens and leading space included."""
        if self._byte_level:
            return self._token_bytes[False][token].decode("utf-8", "replace")
        before = self._anchor
        return self.decode([*before, token], False)[len(self.decode(before, False)) :]

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text: nothing for a special token, which no text shows, or one that does not exist."""
        if self._byte_level:
            return self._token_bytes[True][token]
        text = None if token in self._special_ids else self._backend.id_to_token(token)
        if text is None:
            return b""
        return bytes([int(text[3:5], 16)]) if self._is_byte(token) else text.replace("\u2581", " ").encode()

    def stream(self, skip_special_tokens: bool = True) -> TokenStream:
        """A decoder for the tokens of one sequence as they come."""
        if self._byte_level:
            return ByteStream(self._token_bytes[skip_special_tokens])
        skipped = self._special_ids if skip_special_tokens else frozenset[int]()
        return WindowStream(lambda ids: self.decode(ids, False), self._is_byte, skipped)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Text of a conversation, to be encoded without special tokens.

        ``chat_template`` is a template's source, or the name of one of the model's; ``kwargs`` reach the template.
        Raises RequestError where there is no template, or it cannot render the conversation; TokenizerError where
        ``chat_template`` has wrong syntax.
        """
        return self._choose(chat_template, bool(tools)).render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **{**self.special_tokens, **kwargs},
        )

    def save(self, path: str) -> None:
        """Write `tokenizer.json`."""
        self._backend.save(path, pretty=False)

    def _choose(self, wanted: str | None, has_tools: bool) -> ChatTemplate:
        if wanted is None:
            wanted = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        if wanted in self._templates:
            return self._templates[wanted]
        if "{" not in wanted:
            raise RequestError(
                "There is no such chat template",
                on=self.name,
                found=repr(wanted),
                expected=f"one of {', '.join(self._templates)}" if self._templates else "a model with a chat template",
                fix="give a template with --chat-template, or send a plain prompt",
            )
        if wanted not in self._given:
            # One is remembered: an application gives the same each time.
            self._given = {wanted: ChatTemplate(wanted, on="the chat template given")}
        return self._given[wanted]

    def _check_length(self, text: str, max_tokens: int) -> None:
        most = max_tokens * self._longest_token * (1 if self._keeps_length else _SHRINKING_SLACK)
        if len(text) > most:
            raise ContextLengthError(
                "Prompt is longer than the context",
                on="prompt",
                found=f"{len(text)} characters",
                expected=f"fewer than {max_tokens} tokens, hence at most {most} characters",
                fix="shorten the prompt, or raise --max-model-len if the model allows more",
            )

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    @cached_property
    def _keeps_length(self) -> bool:
        model, normalizer = self._backend.model, self._backend.normalizer
        whole = self._byte_level or (isinstance(model, models.BPE) and model.byte_fallback)
        return whole and (normalizer is None or isinstance(normalizer, (normalizers.Replace, normalizers.Prepend)))

    @cached_property
    def _anchor(self) -> list[int]:
        found = self._backend.token_to_id("a")
        return [] if found is None else [found]

    def _is_byte(self, token: int) -> bool:
        text = self._backend.id_to_token(token)
        return text is not None and len(text) == 6 and text.startswith("<0x")


class _TokenBytes(dict[int, bytes]):
    """Bytes of each token of a byte-level vocabulary, worked out when first asked for."""

    def __init__(self, backend: tokenizers.Tokenizer, skipped: frozenset[int]) -> None:
        super().__init__()
        self._backend, self._skipped = backend, skipped

    def __missing__(self, token: int) -> bytes:
        text = None if token in self._skipped else self._backend.id_to_token(token)
        self[token] = found = b"" if text is None else bytes_of(text)
        return found


def byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level vocabularies spell bytes: printable ones as themselves, others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_ALPHABET = byte_alphabet()


def bytes_of(token: str) -> bytes:
    """Bytes of a token of a byte-level vocabulary; one that is not spelled in bytes stands for itself."""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            "Text is not valid Unicode",
            on=f"character {error.start} of the prompt",
            found=f"the lone surrogate U+{ord(text[error.start]):04X}",
            expected="text that can be written as UTF-8",
            fix="remove the character, or decode the text's source as UTF-16",
        ) from error
