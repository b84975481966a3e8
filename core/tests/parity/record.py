"""Record what transformers generates in float32, greedily, for the fixed prompts: tokens and the gap of the two best logits.

    python core/tests/parity/record.py MODEL.gguf OUT.json

The tests compare with the recorded files; `nox -s full` records again and compares the records.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

NEW_TOKENS = 64


def record(model_file: Path) -> list[dict[str, list[float] | list[int]]]:
    """Greedy decoding of each prompt alone, without a stop."""
    where = {"pretrained_model_name_or_path": str(model_file.parent), "gguf_file": model_file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), attn_implementation="eager"
    ).eval()
    rows = []
    for prompt in json.loads((Path(__file__).parent / "prompts.json").read_text(encoding="utf-8")):
        ids = tokenizer(prompt)["input_ids"]
        tokens, gaps, past = [], [], None
        step = torch.tensor([ids])
        with torch.inference_mode():
            for _ in range(NEW_TOKENS):
                out = model(input_ids=step, past_key_values=past, use_cache=True)
                past = out.past_key_values
                best = torch.topk(out.logits[0, -1], 2)
                tokens.append(int(best.indices[0]))
                gaps.append(round(float(best.values[0] - best.values[1]), 6))
                step = torch.tensor([[tokens[-1]]])
        rows.append({"prompt_token_ids": ids, "token_ids": tokens, "gaps": gaps})
    return rows


def main() -> None:
    """Write the record of one model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.write_text(json.dumps(record(args.model)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
