"""Models by repository name, fetched with `huggingface_hub`: its cache, its resume, its offline mode, its endpoint.

Only what is needed is fetched, and nothing that can run: no pickled weights, no Python files.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from vllm_core.errors import ModelNotFoundError

SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "modules.json",
    "1_Pooling/config.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
)
_INDEX = "model.safetensors.index.json"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository at one commit. `revision` is what the user asked for, `commit` None where the hub is not reachable."""

    name: str
    revision: str | None
    commit: str | None
    files: tuple[str, ...]

    def settings(self) -> Path:
        """Fetch everything but weights; return the folder. Raises ModelNotFoundError."""
        return self._fetch(SETTINGS)

    def weights(self) -> Path:
        """Fetch settings and safetensors; return the folder. Raises ModelNotFoundError."""
        return self._fetch((*SETTINGS, *self._weight_files()))

    def gguf(self) -> Path | None:
        """Fetch the one GGUF file of a repository that has no safetensors; None where there is none."""
        found = [name for name in self.files if name.endswith(".gguf") and "/" not in name]
        if self._weight_files() or not found:
            return None
        if len(found) > 1:
            raise ModelNotFoundError(
                "Repository holds several models",
                on=self.name,
                found=", ".join(found[:8]),
                expected="one .gguf file",
                fix=f"fetch one: hf download {self.name} {found[0]}, and name the file",
            )
        return self._fetch(found) / found[0]

    def _weight_files(self) -> tuple[str, ...]:
        top = [name for name in self.files if name.endswith(".safetensors") and "/" not in name]
        if _INDEX in self.files:
            return (_INDEX, *(name for name in top if name != "model.safetensors"))
        return ("model.safetensors",) if "model.safetensors" in top else tuple(top)

    def _fetch(self, patterns: Sequence[str]) -> Path:
        from huggingface_hub import snapshot_download

        try:
            return Path(
                snapshot_download(
                    self.name,
                    # By its name and not by the commit: the cache then knows where the name led, for offline use.
                    revision=self.revision,
                    allow_patterns=list(patterns),
                    local_files_only=self.commit is None,
                )
            )
        except Exception as error:  # noqa: BLE001 - classified below; an unknown one is raised again
            _explain(self.name, self.revision, error)


def open_repository(name: str, revision: str | None) -> Repository:
    """Look a repository up. Where the hub cannot be reached, what the cache holds is used.

    Raises ModelNotFoundError: no such repository or revision, no access, or not reachable and not in the cache.
    """
    from huggingface_hub import HfApi, constants

    if not constants.HF_HUB_OFFLINE:
        try:
            info = HfApi().model_info(name, revision=revision)
            files = tuple(sibling.rfilename for sibling in info.siblings or ())
            return Repository(name, revision, info.sha, files)
        except Exception as error:  # noqa: BLE001 - classified below; an unknown one is raised again
            if not _unreachable(error):
                _explain(name, revision, error)
            logger.warning("%s cannot be reached (%s); looking for %s in the cache", constants.ENDPOINT, error, name)
    return _cached(name, revision)


def _cached(name: str, revision: str | None) -> Repository:
    from huggingface_hub import snapshot_download

    try:
        # With patterns: what was never wanted is not missed.
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(SETTINGS), local_files_only=True))
    except Exception as error:  # noqa: BLE001 - classified below; an unknown one is raised again
        _explain(name, revision, error)
    return Repository(name, revision, None, tuple(_relative(folder)))


def _relative(folder: Path) -> Iterable[str]:
    return (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())


def _unreachable(error: Exception) -> bool:
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        return error.response is not None and error.response.status_code >= 500
    # By name: which HTTP library raises it (requests, httpx, httpx2) depends on the version of huggingface_hub.
    transport = any(kind.__name__ in ("TransportError", "RequestException") for kind in type(error).__mro__)
    return transport or isinstance(error, (OfflineModeIsEnabled, ConnectionError, TimeoutError))


def _explain(name: str, revision: str | None, error: Exception) -> NoReturn:
    """Raise ModelNotFoundError for what can go wrong with a repository, and anything else as it is."""
    from huggingface_hub import constants, errors

    on = name if revision is None else f"{name} at {revision}"
    found, fix = str(error).strip().split("\n")[0], "check the spelling, or name a local folder"
    if isinstance(error, errors.GatedRepoError):
        found = "a gated repository, and no access to it"
        fix = f"accept its licence at {constants.ENDPOINT}/{name}, and set HF_TOKEN"
    elif isinstance(error, errors.RepositoryNotFoundError):
        found = f"no repository of that name at {constants.ENDPOINT}, or a private one"
        fix = "check the spelling; for a private repository set HF_TOKEN"
    elif isinstance(error, errors.RevisionNotFoundError):
        found, fix = "no such revision", "check --revision"
    elif isinstance(error, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        found = f"HF_HUB_OFFLINE is set, and nothing in the cache at {constants.HF_HUB_CACHE}"
        fix = f"unset HF_HUB_OFFLINE once, or run `hf download {name}` where there is a network"
    elif isinstance(error, errors.LocalEntryNotFoundError) or _unreachable(error):
        found = f"{constants.ENDPOINT} cannot be reached, and nothing in the cache at {constants.HF_HUB_CACHE}"
        fix = "check the network and HF_ENDPOINT, or name a local folder"
    elif not isinstance(error, (errors.HfHubHTTPError, errors.HFValidationError, errors.EntryNotFoundError)):
        raise error
    raise ModelNotFoundError(
        "Model cannot be fetched", on=on, found=found, expected="a repository that can be read", fix=fix
    ) from error
