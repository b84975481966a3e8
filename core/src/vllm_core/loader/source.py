"""A model as its user names it: config, weights and tokenizer, whatever form the files have.

Opening reads names and settings only and imports no torch; weights come one tensor at a time when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vllm_core.chat import default_sampling
from vllm_core.config import ModelConfig
from vllm_core.errors import ConfigError, ModelConfigError, ModelNotFoundError, RequestError
from vllm_core.loader import gguf_config, gguf_header, hub, locate, quant_config
from vllm_core.loader.gguf_header import GGUFHeader, read_header
from vllm_core.loader.json_files import read_object, read_optional

if TYPE_CHECKING:
    import torch

    from vllm_core.api import QuantTensor
    from vllm_core.layers.shard import Wanted
    from vllm_core.loader.tokenizer import Tokenizer

_POOLING = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}


@dataclass(frozen=True)
class ModelSource:
    """What was found under a model's name.

    `config` has the keys of a Hugging Face `config.json`, `hf_overrides` applied; `pooling` is how a sentence encoder
    pools (mean, cls, last), or None.
    """

    name: str
    path: Path
    kind: Literal["folder", "gguf"]
    config: dict[str, Any]
    generation_config: dict[str, Any] = field(default_factory=dict)
    pooling: str | None = None
    _header: GGUFHeader | None = field(default=None, repr=False)
    _repository: hub.Repository | None = field(default=None, repr=False)
    _tokenizer_path: Path | None = None
    _chat_template: str | None = field(default=None, repr=False)

    def weight_formats(self) -> Mapping[str, int]:
        """Quantised formats of the checkpoint's weights, with the number of weights in each. Reads no weights."""
        if self._header is not None:
            return gguf_header.formats_of(self._header)
        return quant_config.sizes(self.config)

    def weights(self, wanted: Wanted | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors under their Hugging Face names, one at a time, in file order; of each what is ``wanted``.

        Only that is read, where it lies together in the file. Safetensors keep their dtype; what is quantised is decoded to
        float32. Raises WeightsError.
        """
        from vllm_core.ops.quant import decoded

        return decoded(self.packed_weights(wanted))

    def packed_weights(self, wanted: Wanted | None = None) -> Iterator[tuple[str, torch.Tensor | QuantTensor]]:
        """As `weights`, but what is quantised in the checkpoint stays as it is. Raises WeightsError."""
        if self._header is not None:
            from vllm_core.loader import gguf_weights

            return gguf_weights.iterate(self._header, self.config, wanted)
        from vllm_core.loader import safetensors_files

        scheme = quant_config.read(self.config)
        folder = self.path if self._repository is None else self._repository.weights()
        if scheme is None:
            return safetensors_files.iterate(folder, wanted)
        from vllm_core.loader import quant_weights

        # Parts of a weight are cut when it is whole.
        return quant_weights.assemble(safetensors_files.iterate(folder), scheme, safetensors_files.names(folder))

    @property
    def has_tokenizer(self) -> bool:
        """Whether `tokenizer` has something to load."""
        path = self._tokenizer_path
        if path is None or path.suffix == ".gguf":
            header = self._header if path is None else read_header(path)
            return header is not None and "tokenizer.ggml.tokens" in header.metadata
        from vllm_core.loader import folder_tokenizer as files

        return any((path / name).is_file() for name in (files.FILE, *files.OTHER_FORMS))

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer. Raises TokenizerError."""
        from vllm_core.loader import folder_tokenizer, gguf_tokenizer

        path = self._tokenizer_path
        if path is None or path.suffix == ".gguf":
            header = self._header if path is None else read_header(path)
            assert header is not None, "a source without a header has the path of its tokenizer"
            return gguf_tokenizer.build(header, self._chat_template)
        ends = self.generation_config.get("eos_token_id", self.config.get("eos_token_id"))
        ids = [token for token in (ends if isinstance(ends, list) else [ends]) if isinstance(token, int)]
        return folder_tokenizer.load(path, eos_token_ids=ids, chat_template=self._chat_template)


def open_model(model: ModelConfig) -> ModelSource:
    """Find a model and read its settings.

    Raises ModelNotFoundError, ModelConfigError; for a GGUF file also WeightsError, where it is damaged.
    """
    path = locate.locate(model.model)
    if path is None:
        return _from_hub(model)
    if path.is_file() and path.suffix == ".json":
        return _from_folder(model, path.parent, config_file=path)
    if path.is_file():
        return _from_gguf(model, path)
    gguf = locate.gguf_in(path) if _wants_gguf(model, path) else None
    return _from_gguf(model, gguf) if gguf is not None else _from_folder(model, path)


def _wants_gguf(model: ModelConfig, folder: Path) -> bool:
    if model.load_format == "gguf":
        return True
    return model.load_format == "auto" and not any(folder.glob("*.safetensors"))


def _from_hub(model: ModelConfig) -> ModelSource:
    repository = hub.open_repository(model.model, model.revision)
    gguf = repository.gguf() if model.load_format in ("auto", "gguf") else None
    if gguf is not None:
        return _from_gguf(model, gguf)
    return _from_folder(model, repository.settings(), repository=repository)


def _from_gguf(model: ModelConfig, path: Path) -> ModelSource:
    if model.load_format == "safetensors":
        raise _wrong_format(model, path, "a GGUF file", "safetensors")
    header = read_header(path)
    return ModelSource(
        name=model.model,
        path=path,
        kind="gguf",
        config=_overridden(gguf_config.config_of(header), model),
        generation_config=_generation_config(gguf_config.generation_config_of(header), model),
        _header=header,
        _tokenizer_path=_tokenizer_path(model, None),
        _chat_template=_chat_template(model),
    )


def _from_folder(
    model: ModelConfig, folder: Path, *, config_file: Path | None = None, repository: hub.Repository | None = None
) -> ModelSource:
    if model.load_format == "gguf":
        raise _wrong_format(model, folder, "no .gguf file", "GGUF")
    path = config_file or folder / "config.json"
    if not path.is_file():
        raise ModelConfigError(
            "Model has no config",
            on=str(folder),
            found="neither config.json nor a .gguf file",
            expected="the folder of a model",
            fix="name the folder that holds config.json",
        )
    return ModelSource(
        name=model.model,
        path=folder,
        kind="folder",
        config=_checked(_overridden(read_object(path), model), path),
        generation_config=_generation_config(read_optional(folder / "generation_config.json"), model),
        pooling=_pooling(folder),
        _repository=repository,
        _tokenizer_path=_tokenizer_path(model, folder),
        _chat_template=_chat_template(model),
    )


def _wrong_format(model: ModelConfig, path: Path, found: str, expected: str) -> ConfigError:
    return ConfigError(
        "Model has another format than asked for",
        on=f"--load-format {model.load_format} for {path}",
        found=found,
        expected=expected,
        fix="use --load-format auto",
    )


def _generation_config(found: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Apply `override_generation_config`, and see whether sampling can use what comes of it."""
    changes: dict[str, Any] = {
        name: int(value) if value.is_integer() and name in ("top_k", "max_new_tokens") else value
        for name, value in model.override_generation_config.items()
    }
    if not changes:
        return found
    merged = {**found, **changes}
    if "temperature" in changes:
        merged.pop("do_sample", None)  # it would ask for greedy tokens whatever the temperature
    try:
        default_sampling(merged)
    except RequestError as error:
        raise ConfigError(
            "Option has a wrong value",
            on=f"--override-generation-config {error.on}",
            found=error.found,
            expected=error.expected,
            fix=f"change {error.on}",
        ) from error
    return merged


def _overridden(config: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Apply `hf_overrides`; an object is merged into an object, anything else replaces."""
    return _merge(config, model.hf_overrides)


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _checked(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Check the names of the architecture, and bring a nested text model's settings to the top."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ModelConfigError(
            "Config names no architecture",
            on=str(path),
            found=f"architectures: {names!r}"[:200],
            expected='a list of names, such as ["LlamaForCausalLM"]',
            fix="add it to config.json, or give it with --hf-overrides",
        )
    text = config.get("text_config")
    if not isinstance(text, dict) or "hidden_size" in config:
        return config
    outer = {key: value for key, value in config.items() if key != "text_config"}
    return {**outer, **{key: value for key, value in text.items() if key != "architectures"}}


def _pooling(folder: Path) -> str | None:
    settings = read_optional(folder / "1_Pooling" / "config.json")
    if not settings:
        return None
    modes = [ours for theirs, ours in _POOLING.items() if settings.get(theirs)]
    known = {"pooling_mode", *_POOLING}
    others = [key for key, value in settings.items() if key.startswith("pooling_mode_") and key not in known and value]
    if isinstance(settings.get("pooling_mode"), str):
        modes = [{"lasttoken": "last"}.get(settings["pooling_mode"], settings["pooling_mode"])]
    if len(modes) != 1 or modes[0] not in _POOLING.values() or others:
        raise ModelConfigError(
            "Pooling is not supported",
            on=str(folder / "1_Pooling" / "config.json"),
            found=", ".join([*modes, *others]) or "no mode",
            expected="one of mean, cls, last",
            fix="use another model",
        )
    return modes[0]


def _tokenizer_path(model: ModelConfig, default: Path | None) -> Path | None:
    if model.tokenizer is None:
        return default
    path = locate.locate(model.tokenizer)
    if path is None:
        return hub.open_repository(model.tokenizer, None).settings()
    if path.is_file() and path.name == "tokenizer.json":
        return path.parent
    if path.is_dir() or path.suffix == ".gguf":
        return path
    raise ModelNotFoundError(
        "Tokenizer does not exist",
        on=str(path),
        found=f"a file {path.name}",
        expected="a folder, tokenizer.json or a .gguf file",
        fix="name the tokenizer's folder",
    )


def _chat_template(model: ModelConfig) -> str | None:
    """The template given: text where it has the form of one, else a file's."""
    given = model.chat_template
    if given is None or "{" in given:
        return given
    from vllm_core.loader.folder_tokenizer import read_template

    return read_template(Path(given).expanduser())
