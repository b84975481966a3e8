"""The device's process: weights, KV cache and batch state live here, and steps of fixed sizes run.

``python -m vllm_toy_static.remote FD MODEL`` serves the connection FD for the model's description in JSON. The
"compiler" composes core's references over buffers of one size; like any compiler of static graphs it takes no other.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
from torch import Tensor

from vllm_core.api import OPS, BatchState, Logprobs, StepInputs
from vllm_core.api import batch as layout
from vllm_toy_static.wire import Array, Reserve, Result, Run, Weight, receive, send

ops = {name: cache(OPS[name].load_reference) for name in OPS}


class Remote:
    """One model on the device."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.weights: dict[str, Tensor] = {}
        self.steps: dict[tuple[int, int], Step] = {}

    def load(self, weight: Weight) -> None:
        self.weights[weight.name] = torch.from_numpy(weight.value.array())

    def reserve(self, sizes: Reserve) -> None:
        spec, rows, size = self.spec, sizes.num_slots + 1, sizes.tokens_per_block

        def table(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype)

        self.state = BatchState(
            num_slots=sizes.num_slots,
            tokens=table(sizes.max_model_len + 1),
            computed=table(),
            params=table(layout.ADMIT_WORDS),
            bias_ids=table(layout.MAX_BIAS),
            bias_values=table(layout.MAX_BIAS, dtype=torch.float32),
            stop_ids=table(layout.MAX_STOP),
            bad_words=table(layout.MAX_BAD_WORDS),
            block_tables=(table(-(-sizes.max_model_len // size) + 1),),
            tokens_per_block=(size,),
        )
        shape = (spec["num_kv_heads"], spec["head_size"], "float32", size)
        memory = (sizes.num_blocks, 2 * size * spec["num_kv_heads"] * spec["head_size"] * 4)
        self.kv = [ops["kv_bind"]()(torch.zeros(memory, dtype=torch.uint8), *shape) for _ in spec["layers"]]
        self.positions = _rotary_table(spec, sizes.max_model_len + 2)

    def run(self, run: Run) -> Result:
        """Apply the difference, pad the step to its compiled size, run it, cut the results."""
        assert run.packed is not None, "a step has its difference"
        packed = torch.from_numpy(run.packed.array())
        header = packed[: layout.HEADER_WORDS].tolist()
        ops["batch_update"]()(self.state, packed, header)
        inputs = ops["build_step"]()(self.state, packed, header)
        step = self.steps.setdefault((run.rows, run.tokens), Step(self, run.rows, run.tokens))
        hidden = step.forward(step.padded(inputs))
        count = header[layout.H_NUM_SAMPLED]
        tokens, nonfinite, raw = step.sample(hidden, inputs, run)
        ops["advance"]()(self.state, inputs, tokens[:count])
        logprobs = ops["log_probabilities"]()(raw[:count], tokens[:count, 0].long(), run.num_logprobs)
        return Result(
            Array.of(tokens[:count].numpy()),
            Array.of(nonfinite[:count].numpy()),
            _arrays(logprobs) if run.features & layout.F_LOGPROBS else None,
            self._prompt(step, hidden, inputs, run),
        )

    def _prompt(self, step: Step, hidden: Tensor, inputs: StepInputs, run: Run) -> tuple[Array, ...] | None:
        """Log-probabilities of each following token, for all tokens of the rows that want them."""
        slots = torch.repeat_interleave(inputs.slots, inputs.query_start.diff(), output_size=inputs.num_tokens).long()
        wanted = (self.state.params[slots, layout.A_FEATURES] & layout.F_PROMPT_LOGPROBS) != 0
        if not run.features & layout.F_PROMPT_LOGPROBS or not wanted.any():
            return None
        following = self.state.tokens[slots, (inputs.positions + 1).long()].long()[wanted]
        logits = step.logits(hidden[: inputs.num_tokens][wanted])
        return _arrays(ops["log_probabilities"]()(logits, following, run.num_logprobs))


class Step:
    """A step compiled for `rows` sequences and `tokens` tokens; one more row takes the padding."""

    def __init__(self, remote: Remote, rows: int, tokens: int) -> None:
        self.remote, self.rows, self.tokens = remote, rows, tokens

    def padded(self, inputs: StepInputs) -> StepInputs:
        """The inputs at the compiled size: padding writes to the null block, and reads from it."""
        spare = self.tokens - inputs.num_tokens
        table = _pad(inputs.block_tables[0], self.rows + 1)
        return replace(
            inputs,
            token_ids=_pad(inputs.token_ids, self.tokens),
            positions=_pad(inputs.positions, self.tokens),
            query_start=torch.cat(
                [_pad(inputs.query_start, self.rows + 1, inputs.num_tokens), torch.tensor([self.tokens])]
            ).int(),
            seq_lens=torch.cat([_pad(inputs.seq_lens, self.rows), torch.tensor([spare])]).int(),
            slot_mapping=(_pad(inputs.slot_mapping[0], self.tokens),),
            block_tables=(torch.nn.functional.pad(table, (0, self.remote.state.block_tables[0].shape[1] - table.shape[1])),),
        )

    def forward(self, x: StepInputs) -> Tensor:
        """Hidden states [tokens, H] after the final norm."""
        assert (len(x.token_ids), len(x.seq_lens)) == (self.tokens, self.rows + 1), "compiled for another size"
        spec, w, eps = self.remote.spec, self.remote.weights, self.remote.spec["norm_eps"]
        heads, kv_heads, width = spec["num_heads"], spec["num_kv_heads"], spec["head_size"]
        longest = self.remote.state.tokens.shape[1]
        residual = w["embed_tokens.weight"][x.token_ids.long()]
        for index, kv in enumerate(self.remote.kv):
            name = f"layers.{index}."
            hidden = self._norm(residual, f"{name}input_layernorm.weight")
            q, k, v = (hidden @ w[f"{name}self_attn.{one}_proj.weight"].T for one in "qkv")
            q, k, v = q.view(-1, heads, width), k.view(-1, kv_heads, width), v.view(-1, kv_heads, width)
            rope = (x.positions, self.remote.positions, spec["layers"][index]["rope"]["interleaved"])
            ops["qk_norm_rope_kv_write"]()(q, k, v, None, None, eps, *rope, kv, x.slot_mapping[0])
            attended = torch.empty_like(q)
            shape = (x.query_start, x.seq_lens, x.block_tables[0], self.tokens, longest)
            ops["paged_attention"]()(attended, q, kv, *shape, width**-0.5, 0, 0.0)
            residual = residual + attended.flatten(1) @ w[f"{name}self_attn.o_proj.weight"].T
            hidden = self._norm(residual, f"{name}post_attention_layernorm.weight")
            gate, up = (hidden @ w[f"{name}mlp.{one}_proj.weight"].T for one in ("gate", "up"))
            residual = residual + (torch.nn.functional.silu(gate) * up) @ w[f"{name}mlp.down_proj.weight"].T
        return self._norm(residual, "norm.weight")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        out = torch.empty_like(x)
        ops["rms_norm"]()(out, x, self.remote.weights[name], self.remote.spec["norm_eps"])
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, V]."""
        w = self.remote.weights
        return hidden @ w["embed_tokens.weight" if self.remote.spec["tied_embeddings"] else "lm_head.weight"].T

    def sample(self, hidden: Tensor, inputs: StepInputs, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens and flags of `rows` rows, and the logits before anything adjusted them."""
        state = self.remote.state
        raw = self.logits(hidden[_pad(inputs.sample_rows, self.rows)])
        logits, slots = raw.clone(), _pad(inputs.sample_slots, self.rows, state.num_slots)
        rest = (state, slots, _pad(inputs.sample_lengths, self.rows), run.features)
        ops["logit_adjust"]()(logits, *rest)
        if run.masks:
            masks = torch.stack([torch.from_numpy(mask.array()) for mask in run.masks.values()])
            ops["grammar_mask"]()(logits, masks, torch.tensor(list(run.masks)))
        tokens, nonfinite = torch.zeros(self.rows, 1, dtype=torch.int32), torch.zeros(self.rows, dtype=torch.bool)
        ops["sample"]()(tokens, nonfinite, logits, *rest)
        return tokens, nonfinite, raw


def _pad(tensor: Tensor, length: int, value: int = 0) -> Tensor:
    return torch.cat([tensor, tensor.new_full((length - len(tensor), *tensor.shape[1:]), value)])


def _rotary_table(spec: dict[str, Any], positions: int) -> Tensor:
    rope = spec["layers"][0]["rope"]
    frequencies = rope["theta"] ** (-torch.arange(0, rope["rotary_dim"], 2, dtype=torch.float64) / rope["rotary_dim"])
    angles = torch.arange(positions)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()], 1).float()


def _arrays(value: Logprobs) -> tuple[Array, ...]:
    return tuple(Array.of(one.numpy()) for one in (value.chosen, value.rank, value.top_ids, value.top))


@torch.inference_mode()
def serve(connection: Connection, remote: Remote) -> None:
    """Answer each `Run`; what fails is said in the answer to the next one. Ends with the engine."""
    while True:
        try:
            message = receive(connection)
        except EOFError:
            return
        match message:
            case Weight():
                remote.load(message)
            case Reserve():
                remote.reserve(message)
            case Run():
                try:
                    result = remote.run(message)
                except Exception as error:  # noqa: BLE001 - it is the engine's to know, and the device goes on
                    result = Result(error=f"{type(error).__name__}: {error}")
                send(connection, result)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), Remote(msgspec.json.decode(sys.argv[2])))
