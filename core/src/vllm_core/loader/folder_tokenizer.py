"""The tokenizer of a Hugging Face folder: `tokenizer.json` with its settings and chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from vllm_core.errors import TokenizerError
from vllm_core.loader.gguf_tokenizer import surround
from vllm_core.loader.json_files import read_optional
from vllm_core.loader.tokenizer import Tokenizer

FILE = "tokenizer.json"
OTHER_FORMS = ("tokenizer.model", "vocab.txt", "vocab.json", "tekken.json", "spiece.model")
"""Tokenizers that need code of their own; a folder that has only one of these is told so."""

_MAX_BYTES, _MAX_TEMPLATE_BYTES = 256 << 20, 4 << 20


def load(folder: Path, *, eos_token_ids: Sequence[int] = (), chat_template: str | None = None) -> Tokenizer:
    """Load from a folder. ``eos_token_ids`` come before the tokenizer's own; ``chat_template`` replaces its template.

    Raises TokenizerError where `tokenizer.json` is missing or broken, or a template has wrong syntax.
    """
    settings = read_optional(folder / "tokenizer_config.json", TokenizerError)
    backend = _backend(folder)
    special = _special_tokens(settings, read_optional(folder / "special_tokens_map.json", TokenizerError))
    _add_special(backend, special)
    _apply_flags(backend, settings, special)
    eos = None if "eos_token" not in special else backend.token_to_id(special["eos_token"])
    templates = _templates(folder, settings)
    if chat_template is not None:
        templates["default"] = chat_template
    return Tokenizer(
        backend,
        name=str(folder),
        special_tokens=special,
        eos_token_ids=list(dict.fromkeys([*eos_token_ids, *([] if eos is None else [eos])])),
        chat_templates=templates,
    )


def _backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / FILE
    if not path.is_file():
        others = [name for name in OTHER_FORMS if (folder / name).is_file()]
        raise _wrong(
            path,
            f"only {', '.join(others)}" if others else "no such file",
            "a tokenizer in the form of the `tokenizers` library",
            "save it once with transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            if others
            else "name another folder with --tokenizer, or run on token ids with --skip-tokenizer-init",
        )
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise _wrong(path, f"{size} bytes", f"at most {_MAX_BYTES} bytes", "fetch the file again")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exception for a broken file
        raise _wrong(
            path, str(error)[:300], "a tokenizer", "fetch the file again; a newer `tokenizers` may be needed"
        ) from error


def _special_tokens(settings: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    found = {}
    for name in names:
        value = settings.get(name, more.get(name))
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _add_special(backend: tokenizers.Tokenizer, special: Mapping[str, str]) -> None:
    """Special tokens that the vocabulary has but `tokenizer.json` does not mark as such."""
    marked = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [text for text in special.values() if text not in marked and backend.token_to_id(text) is not None]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in missing])


def _apply_flags(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """`add_bos_token` and `add_eos_token`, where given, decide over the post-processor of `tokenizer.json`."""
    if "add_bos_token" not in settings and "add_eos_token" not in settings:
        return
    ids = [
        backend.token_to_id(special[f"{name}_token"])
        if settings.get(f"add_{name}_token") and f"{name}_token" in special
        else None
        for name in ("bos", "eos")
    ]
    backend.post_processor = surround(*ids)


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; a file beats `tokenizer_config.json`."""
    found: dict[str, str] = {}
    given = settings.get("chat_template", read_optional(folder / "chat_template.json", TokenizerError).get("chat_template"))
    if isinstance(given, str):
        found["default"] = given
    elif isinstance(given, list):
        found.update({str(entry["name"]): str(entry["template"]) for entry in given if _is_named_template(entry)})
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    main = folder / "chat_template.jinja"
    if main.is_file():
        files["default"] = main
    return found | {name: read_template(path) for name, path in files.items()}


def _is_named_template(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)


def read_template(path: Path) -> str:
    """Read a template's file. Raises TokenizerError where it is too large, is no text or cannot be read."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_TEMPLATE_BYTES + 1)
        if len(raw) > _MAX_TEMPLATE_BYTES:
            raise ValueError(f"more than {_MAX_TEMPLATE_BYTES} bytes")
        return raw.decode()
    except (OSError, ValueError) as error:
        raise TokenizerError(
            "Chat template is broken",
            on=str(path),
            found=str(error),
            expected="a Jinja template",
            fix="give another with --chat-template",
        ) from error


def _wrong(path: Path, found: str, expected: str, fix: str) -> TokenizerError:
    return TokenizerError("Tokenizer cannot be loaded", on=str(path), found=found, expected=expected, fix=fix)
