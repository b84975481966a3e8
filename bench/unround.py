"""A float32 GGUF file of a Llama model whose weights lie on no grid of four bits, though the source's did.

    python bench/unround.py SOURCE.gguf OUT.gguf

What rounding costs can only be measured on weights that were not rounded before: those of a Q4_1 file are found again by
rounding to Q4_1. So factors are moved between layers where the function stays what it is: from a norm's weight to the columns
of the products that read it, from rows of the values' projection to columns of the output's, from rows of `up` to columns of
`down`. They are drawn from 2^-0.2 .. 2^0.2, each neighbour another: enough to leave no block of weights on its old steps, and
so little that a block's numbers stay as alike as a model's are.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Values = dict[str, NDArray[np.float32]]
SPREAD = 0.2


def scatter(values: Values, heads: int, kv_heads: int, layers: int, seed: int = 0) -> None:
    """Move factors in place; ``values`` are float32 by GGUF names, matrices [rows, columns]."""
    random = np.random.default_rng(seed)

    def draw(size: int) -> NDArray[np.float32]:
        return np.exp2(random.uniform(-SPREAD, SPREAD, size)).astype(np.float32)

    for layer in range(layers):

        def of(name: str, layer: int = layer) -> NDArray[np.float32]:
            return values[f"blk.{layer}.{name}.weight"]

        for norm, readers in (("attn_norm", ("attn_q", "attn_k", "attn_v")), ("ffn_norm", ("ffn_gate", "ffn_up"))):
            factors = draw(len(of(norm)))
            of(norm)[:] *= factors
            for reader in readers:
                of(reader)[:] /= factors
        factors = draw(len(of("attn_v")))
        of("attn_v")[:] *= factors[:, None]
        # Each head of keys and values serves heads / kv_heads of the queries, one after the other.
        served = np.repeat(factors.reshape(kv_heads, -1), heads // kv_heads, axis=0).reshape(-1)
        of("attn_output")[:] /= served
        factors = draw(len(of("ffn_up")))
        of("ffn_up")[:] *= factors[:, None]
        of("ffn_down")[:] /= factors


def main() -> None:
    """Read, scatter, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    reader = gguf.GGUFReader(arguments.source)
    values: Values = {
        tensor.name: np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32) for tensor in reader.tensors
    }

    def number(key: str) -> int:
        return int(reader.fields[f"llama.{key}"].contents())

    scatter(values, number("attention.head_count"), number("attention.head_count_kv"), number("block_count"))
    writer = gguf.GGUFWriter(arguments.out, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            _copy(writer, field)
    for name, array in values.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy(writer: gguf.GGUFWriter, field: Any) -> None:
    kind = field.types[0]
    inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
    writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)


if __name__ == "__main__":
    main()
