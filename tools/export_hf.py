"""Write a GGUF model as a Hugging Face folder: config, sharded safetensors in float32, tokenizer, chat template.

python tools/export_hf.py MODEL OUTDIR [--shard-mb 200]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_core.config import ModelConfig
from vllm_core.loader.source import ModelSource, open_model

if TYPE_CHECKING:
    import torch


def export(model: str, folder: Path, shard_bytes: int = 200 << 20) -> Path:
    """Write the model to ``folder``, which is made; return it."""
    source = open_model(ModelConfig(model=model))
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", source.config)
    _write_json(folder / "generation_config.json", source.generation_config)
    _write_tokenizer(source, folder)
    _write_weights(source, folder, shard_bytes)
    return folder


def _write_tokenizer(source: ModelSource, folder: Path) -> None:
    tokenizer = source.tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    _write_json(folder / "tokenizer_config.json", settings)
    if tokenizer.chat_template is not None:
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")


def _write_weights(source: ModelSource, folder: Path, shard_bytes: int) -> None:
    from safetensors.torch import save_file

    shards: list[dict[str, torch.Tensor]] = [{}]
    sizes = [0]
    for name, tensor in source.weights():
        if sizes[-1] and sizes[-1] + tensor.nbytes > shard_bytes:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = tensor.contiguous()
        sizes[-1] += tensor.nbytes
    weight_map = {}
    for index, shard in enumerate(shards, start=1):
        file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    content: dict[str, Any] = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", content)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", help="GGUF file, or 'demo'")
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("--shard-mb", type=int, default=200, help="most megabytes in one file")
    options = parser.parse_args(argv)
    print(export(options.model, options.folder, options.shard_mb << 20))
    return 0


if __name__ == "__main__":
    sys.exit(main())
