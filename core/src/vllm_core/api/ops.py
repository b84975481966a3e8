"""The one registry of ops: all device code that the engine runs.

Conventions. T tokens of the step, S rows (sequences), R sampled rows, H hidden size, D head size, Hq and Hk query
and KV heads, V vocabulary, P positions in a rotary table. "float" is the model's dtype (float32, bfloat16 or
float16); every reduction is computed in float32. Outputs come first, are preallocated by the caller and marked
``!``. Index tensors live on the device. No op synchronises with the host.
Activations (x, q, k, v, a, b) may be views of wider rows: their last dimension is contiguous, rows may lie further apart,
as q, k and v of one buffer do. All other tensors are contiguous. What an output holds before must not matter. Arguments
marked ``~`` are scratch: what is in them after the call is not defined, and nothing is read from them before but where the
op names them among its inputs. Arguments with ``= None`` come last and are given only where a call site asks for the feature
that they belong to: providers without it need not take them.

Ops of one family share private layouts and are always chosen together.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from vllm_core.api.opspec import EXACT, OpSpec, Tolerance
from vllm_core.errors import UnsupportedError, nearest

INT8_ACTIVATION = "int8_activation"
"""Feature of the families linear and moe: inputs of products with packed weights are rounded to eight bits."""

FP8_ACTIVATION = "fp8_activation"
"""Feature of the family linear: inputs of products with weights in fp8 may be rounded to float8_e4m3fn, with a scale for each
row, or for each 128 inputs of one where the weight has one a square; products with other weights are as without it."""

_ROUNDING = (INT8_ACTIVATION, FP8_ACTIVATION)

_FLOAT = {"float32": Tolerance(1e-5, 1e-5), "bfloat16": Tolerance(1e-2, 1.6e-2), "float16": Tolerance(2e-3, 2e-3)}
_MATMUL = {"float32": Tolerance(1e-4, 1e-4), "bfloat16": Tolerance(2e-2, 2e-2), "float16": Tolerance(4e-3, 4e-3)}
_GATED = {"float32": Tolerance(2e-4, 2e-4), "bfloat16": Tolerance(6e-2, 4e-2), "float16": Tolerance(1e-2, 8e-3)}
"""A product of two products, each rounded before."""
_LAYERS = {"float32": Tolerance(1e-3, 1e-3), "bfloat16": Tolerance(1e-1, 4e-2), "float16": Tolerance(2e-2, 1e-2)}
"""Several layers, whose residual stream and heads are rounded in between."""
_EXACT = {"float32": EXACT, "bfloat16": EXACT, "float16": EXACT}
WHOLES = frozenset({"decode_layers"})
"""Ops in place of others that are chosen anyway: a plan needs nobody for them, and core offers no reference, which would stand
in for what was chosen for the others."""

_REF = "vllm_core.ops"
_GEN = "vllm_core.ops.inputs"


def _spec(
    name: str,
    schema: str,
    doc: str,
    module: str,
    tolerances: Mapping[str, Tolerance] = _FLOAT,
    *,
    family: str | None = None,
    decomposition: tuple[str, ...] = (),
    features: tuple[str, ...] = (),
) -> OpSpec:
    return OpSpec(
        name=name,
        schema=schema,
        doc=doc,
        reference=f"{_REF}.{module}:{name}",
        generator=f"{_GEN}:{name}",
        tolerances=tolerances,
        family=family,  # type: ignore[arg-type]
        decomposition=decomposition,
        features=frozenset(features),
    )


_ALL = (
    _spec(
        "embedding",
        "(float[T,H] out!, int32[T] ids, float[V,H] weight, float scale)",
        "out = weight[ids] * scale.",
        "embedding",
    ),
    _spec(
        "embedding_shard",
        "(float[T,H] out!, int32[T] ids, float[N,H] weight, int first, float scale)",
        "A worker's part of `embedding`, whose weight has the rows first .. first + N of the vocabulary: out = "
        "weight[ids - first] * scale where 0 <= ids - first < N, else 0. The sum over all workers is the embedding.",
        "embedding",
    ),
    _spec(
        "gather_rows",
        "(float[R,H] out!, float[T,H] x, int64[R] rows)",
        "out = x[rows].",
        "embedding",
        _EXACT,
    ),
    _spec("add", "(float[T,H] out!, float[T,H] a, float[T,H] b)", "out = a + b; out may be a or b.", "norm"),
    _spec(
        "rms_norm",
        "(float[...,H] out!, float[...,H] x, float32[H] weight, float eps)",
        "out = x / sqrt(mean(x^2) + eps) * weight, over the last dimension (Zhang and Sennrich 2019). Architectures that "
        "store weight - 1 are loaded with 1 added. out may be x.",
        "norm",
    ),
    _spec(
        "add_rms_norm",
        "(float[T,H] out!, float[T,H] residual!, float[T,H] x, float32[H] weight, float eps)",
        "residual += x; out = rms_norm(residual).",
        "norm",
        decomposition=("add", "rms_norm"),
    ),
    _spec(
        "layer_norm",
        "(float[T,H] out!, float[T,H] x, float32[H] weight, float32[H] bias, float eps)",
        "out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias. out may be x.",
        "norm",
    ),
    _spec(
        "rotary_embedding",
        "(float[T,Hq,D] q!, float[T,Hk,D] k!, int32[T] positions, float32[P,2,R/2] cos_sin, bool interleaved)",
        "Rotates the first R elements of each head in place (Su et al. 2021). cos_sin[p, 0] are cosines, [p, 1] sines, "
        "any scaling included. Not interleaved: element i pairs with i + R/2. Interleaved: 2i with 2i + 1.",
        "rope",
        features=("interleaved",),
    ),
    _spec(
        "gated_activation",
        "(float[T,I] out!, float[T,2I] x, str kind)",
        "out = f(x[:, :I]) * x[:, I:] with f one of silu, gelu (exact), gelu_tanh.",
        "activation",
    ),
    _spec("activation", "(float[T,I] out!, float[T,I] x, str kind)", "out = f(x); out may be x.", "activation"),
    # linear: pack, apply
    _spec(
        "linear_pack",
        "(float[N,K] weight, float[N]? bias, str[] readers) -> Packed",
        "Called once per weight after loading, with the names of all its readers; returns the provider's private form. "
        "May keep the tensor it was given.",
        "linear",
        _EXACT,
        family="linear",
        features=_ROUNDING,
    ),
    _spec(
        "linear",
        "(float[T,N] out!, float[T,K] x, Packed weight)",
        "out = x @ weight.T + bias. out may be float32 where x is narrower (logits): it is then not rounded to x's dtype "
        "where the provider can.",
        "linear",
        _MATMUL,
        family="linear",
        features=_ROUNDING,
    ),
    _spec(
        "linear_add",
        "(float[T,N] residual!, float[T,N] delta~, float[T,K] x, Packed weight)",
        "residual += linear(x). delta is scratch.",
        "linear",
        _MATMUL,
        family="linear",
        features=_ROUNDING,
        decomposition=("linear", "add"),
    ),
    _spec(
        "rms_norm_linear",
        "(float[T,N] out!, float[T,K] normed~, float[T,K] x, float32[K] norm, float eps, Packed weight)",
        "out = linear(rms_norm(x)). normed is scratch.",
        "linear",
        _MATMUL,
        family="linear",
        features=_ROUNDING,
        decomposition=("rms_norm", "linear"),
    ),
    _spec(
        "gated_linear",
        "(float[T,I] out!, float[T,2I] wide~, float[T,K] x, Packed weight, str kind)",
        "out = gated_activation(linear(x), kind). wide is scratch.",
        "linear",
        _GATED,
        family="linear",
        features=_ROUNDING,
        decomposition=("linear", "gated_activation"),
    ),
    _spec(
        "rms_norm_gated_linear",
        "(float[T,I] out!, float[T,2I] wide~, float[T,K] normed~, float[T,K] x, float32[K] norm, float eps, Packed weight, "
        "str kind)",
        "out = gated_activation(linear(rms_norm(x)), kind). wide and normed are scratch.",
        "linear",
        _GATED,
        family="linear",
        features=_ROUNDING,
        decomposition=("rms_norm", "linear", "gated_activation"),
    ),
    # moe: a token's experts, then their gated MLPs: pack, apply
    _spec(
        "moe_route",
        "(int32[T,K] experts!, float32[T,K] weights!, float32[T,E] logits, bool renormalize)",
        "experts are the K largest of each row's E logits, largest first, of equal ones the lower index first; weights their "
        "shares of softmax(logits), divided by their sum if renormalize. Rows with NaN have any experts from 0 to E - 1, and "
        "spoil no other row.",
        "experts",
    ),
    _spec(
        "moe_pack",
        "(float[E 2I,H] gate_up, float[E H,I] down, int num_experts, str[] readers) -> Packed",
        "Called once per layer after loading, with the names of all its readers; returns the provider's private form. Expert e "
        "has the rows e 2I .. (e + 1) 2I of gate_up, its gate before its up projection, and e H .. (e + 1) H of down. May keep "
        "the tensors it was given.",
        "experts",
        _EXACT,
        family="moe",
        features=(INT8_ACTIVATION,),
    ),
    _spec(
        "moe",
        "(float[T,H] out!, float[T K,2I] wide~, float[T K,I] narrow~, float[T K,H] parts~, int32[4 (T K + E)] index~, "
        "float[T,H] x, int32[T,K] experts, float32[T,K] weights, Packed weight, str kind)",
        "out[t] = sum over k of weights[t, k] * down(gated_activation(gate_up(x[t]), kind)) of expert experts[t, k]: summed in "
        "float32, in an order that depends on the token's own experts alone. A token may name an expert twice. wide, narrow, "
        "parts and index are scratch.",
        "experts",
        _GATED,
        family="moe",
        features=(INT8_ACTIVATION,),
    ),
    # kv: bind, write, attention, copy, export, import
    _spec(
        "kv_bind",
        "(uint8[num_blocks, block_bytes] memory!, int num_kv_heads, int head_size, str dtype, int tokens_per_block) -> KV",
        "Called once per layer; returns the provider's private view of the layer's blocks.",
        "attention",
        _EXACT,
        family="kv",
    ),
    _spec(
        "kv_write",
        "(KV kv!, float[T,Hk,D] k, float[T,Hk,D] v, int64[T] slot_mapping)",
        "Stores token t at block slot_mapping[t] // tokens_per_block, offset slot_mapping[t] % tokens_per_block.",
        "attention",
        _EXACT,
        family="kv",
    ),
    _spec(
        "paged_attention",
        "(float[T,Hq,D] out!, float[T,Hq,D] q, KV kv, int32[S+1] query_start, int32[S] seq_lens, int32[S,B] block_table, "
        "int max_query_len, int max_seq_len, float scale, int window, float soft_cap, float32[Hq]? sinks = None)",
        "Causal attention over the paged KV. Row s has queries query_start[s] .. query_start[s+1], which are the last "
        "tokens of a sequence of seq_lens[s] tokens; their own KV is already written. window = 0 means all; w > 0 lets "
        "a query at position p see p-w+1 .. p. soft_cap c > 0 replaces scores s by c * tanh(s / c). Query head h reads "
        "KV head h * Hk // Hq. Blocks wholly behind the window may be the null block. Prefill and decode rows mix freely. "
        "sinks (feature sinks): a logit per query head, neither scaled nor capped, that is part of the softmax's denominator "
        "and has no value (gpt-oss; after Xiao et al. 2023): softmax over [scores, sink], its last column dropped.",
        "attention",
        _FLOAT | {"float32": Tolerance(2e-5, 2e-5)},
        family="kv",
        features=("sliding_window", "soft_cap", "sinks"),
    ),
    _spec(
        "kv_copy",
        "(KV kv!, int64[N] source, int64[N] target)",
        "Copies whole blocks; sources and targets do not overlap.",
        "attention",
        _EXACT,
        family="kv",
    ),
    _spec(
        "kv_export",
        "(float32[N,2,tokens_per_block,Hk,D] out!, KV kv, int64[N] blocks)",
        "Writes blocks in the canonical layout: keys at [:, 0], values at [:, 1].",
        "attention",
        _EXACT,
        family="kv",
    ),
    _spec(
        "kv_import",
        "(KV kv!, float32[N,2,tokens_per_block,Hk,D] blocks, int64[N] target)",
        "The inverse of kv_export, rounded to the KV dtype.",
        "attention",
        _EXACT,
        family="kv",
    ),
    _spec(
        "qk_norm_rope_kv_write",
        "(float[T,Hq,D] q!, float[T,Hk,D] k!, float[T,Hk,D] v, float32[D]? q_weight, float32[D]? k_weight, float eps, "
        "int32[T] positions, float32[P,2,R/2]? cos_sin, bool interleaved, KV kv!, int64[T] slot_mapping)",
        "rms_norm of q and k per head where weights are given, rotary_embedding where a table is given, then kv_write.",
        "attention",
        _FLOAT,
        family="kv",
        decomposition=("rms_norm", "rotary_embedding", "kv_write"),
        features=("interleaved",),
    ),
    _spec(
        "qk_norm_rope_attention",
        "(float[T,Hq,D] out!, float[T,Hq,D] q~, float[T,Hk,D] k~, float[T,Hk,D] v, float32[D]? q_weight, float32[D]? k_weight, "
        "float eps, int32[T] positions, float32[P,2,R/2]? cos_sin, bool interleaved, KV kv!, int64[T] slot_mapping, "
        "int32[S+1] query_start, int32[S] seq_lens, int32[S,B] block_table, int max_query_len, int max_seq_len, float scale, "
        "int window, float soft_cap, float32[Hq]? sinks = None)",
        "qk_norm_rope_kv_write, then paged_attention of the queries that it makes. q and k are inputs, and scratch after. "
        "Where every row has one query, no row attends to a token that another one writes.",
        "attention",
        _MATMUL,
        family="kv",
        decomposition=("qk_norm_rope_kv_write", "paged_attention"),
        features=("interleaved", "sliding_window", "soft_cap", "sinks"),
    ),
    _spec(
        "decode_layers",
        "(float[S,H] residual!, DecoderLayers layers!, int32[S] positions, int64[S] slot_mapping, int32[S] seq_lens, "
        "int32[S,B] block_table) -> bool",
        "All layers of a dense decoder for one token of each row, in place of a call or more of each layer: per layer "
        "rms_norm_linear, qk_norm_rope_attention, linear_add, rms_norm_gated_linear, linear_add. Numbers in between may keep "
        "more bits than the model's dtype has. Returns whether it was done: a provider leaves everything as it is, and says so "
        "without asking the device, where layer after layer is faster, or weights or KV are in a form of another "
        "distribution's. Steps of few rows of the op's shape classes it takes. No row attends to a token that another one "
        "writes.",
        "stack",
        _LAYERS,
    ),
    _spec(
        "encoder_attention",
        "(float[T,Hq,D] out!, float[T,Hq,D] q, float[T,Hk,D] k, float[T,Hk,D] v, int32[S+1] query_start, int max_query_len, "
        "float scale)",
        "Bidirectional attention within each row; no KV cache.",
        "attention",
    ),
    _spec(
        "pool",
        "(float32[S,H] out!, float[T,H] x, int32[S+1] query_start, str kind, bool normalize)",
        "One vector per row: kind mean, cls (first token) or last; then divided by its L2 norm if asked.",
        "pooling",
    ),
    # batch: the device-resident state
    _spec(
        "batch_update",
        "(BatchState state!, int32[W] packed, int[HEADER_WORDS] header)",
        "Applies the packed difference of vllm_core.api.batch: admits, tokens, block rows, extras. header is the buffer's "
        "first words, on the host: shapes come from it without asking the device.",
        "batch",
        _EXACT,
        family="batch",
    ),
    _spec(
        "build_step",
        "(BatchState state, int32[W] packed, int[HEADER_WORDS] header) -> StepInputs",
        "Gathers the step's inputs from the state and the rows of `steps`.",
        "batch",
        _EXACT,
        family="batch",
    ),
    _spec(
        "advance",
        "(BatchState state!, StepInputs inputs, int32[R,1] tokens)",
        "computed[slot] += tokens of the row; each sampled token is appended at the row's new length, if it fits. The padding "
        "slot's computed stays 0, so that captured steps may repeat padded rows for ever.",
        "batch",
        _EXACT,
        family="batch",
    ),
    # tail
    _spec(
        "logit_adjust",
        "(float32[R,V] logits!, BatchState state, int64[R] slots, int32[R] lengths, int features)",
        "lengths are those of the sequences before the sampled token. In this order, for the rows whose own feature bit is "
        "set: repetition penalty over prompt and output (divide positive logits, multiply negative ones), frequency and "
        "presence penalty over output only, logit bias, stop tokens to -inf while shorter than A_MIN_LEN, bad words to -inf "
        "where the sequence ends with all but their last token.",
        "sampling",
    ),
    _spec(
        "grammar_mask",
        "(float32[R,V] logits!, int32[M,ceil(V/32)] mask, int64[M] rows)",
        "Sets logits to -inf where the row's bit is 0; bit b of word w is token 32 w + b.",
        "sampling",
        _EXACT,
    ),
    _spec(
        "sample",
        "(int32[R,1] tokens!, bool[R] nonfinite!, float32[R,V] logits, BatchState state, int64[R] slots, int32[R] lengths, "
        "int features)",
        "temperature 0: the lowest index of the largest logit. Else logits / temperature, top_k, then top_p (the smallest set "
        "of most likely tokens whose probability reaches p) and min_p (probability at least p times the largest) over what "
        "top_k left; ties at a threshold stay. The token is the first, in index order, at which the cumulative probability "
        "exceeds u times its total, with u = uniform(A_SEED_LOW, A_SEED_HIGH, length) from `vllm_core.ops.random`: it "
        "depends on nothing else. `features` is the union over the rows, so that work nobody asked for can be left out. "
        "nonfinite marks rows whose logits hold NaN or +inf, or no finite value.",
        "sampling",
        _EXACT,
    ),
    _spec(
        "log_probabilities",
        "(float32[R,V] logits, int64[R] tokens, int k) -> Logprobs",
        "log_softmax of the logits at the tokens, their rank (1 = largest; ties do not lower it), and the k largest.",
        "sampling",
    ),
    _spec(
        "soft_cap",
        "(float32[R,V] logits!, float cap)",
        "logits = cap * tanh(logits / cap), in place.",
        "activation",
    ),
    # comm: `group` is a Communicator's handle, 0 the group of this rank alone. All ranks call the same ops in the same order.
    _spec(
        "all_reduce",
        "(float[T,H] x!, int group)",
        "x = sum over the group's ranks, with the same bits on every rank.",
        "comm",
        family="comm",
    ),
    _spec(
        "all_gather",
        "(float[T,M] out!, float[T,N] x, int group)",
        "out = concatenation of x over ranks along the last dimension, cut to its first M <= N W columns: a vocabulary that W "
        "ranks cannot share equally ends within the last ones.",
        "comm",
        _EXACT,
        family="comm",
    ),
    _spec(
        "reduce_scatter",
        "(float[T/W,H] out!, float[T,H] x, int group)",
        "out = this rank's rows of the sum over ranks.",
        "comm",
        family="comm",
    ),
    _spec(
        "all_reduce_add_rms_norm",
        "(float[T,H] out!, float[T,H] residual!, float[T,H] x~, float32[H] weight, float eps, int group)",
        "all_reduce of x, then add_rms_norm: residual += x; out = rms_norm(residual). What is left in x is not read.",
        "comm",
        family="comm",
        decomposition=("all_reduce", "add_rms_norm"),
    ),
)

OPS: Mapping[str, OpSpec] = MappingProxyType({spec.name: spec for spec in _ALL})
"""All ops of the current API version, by name."""


def get(name: str) -> OpSpec:
    """Return the specification. Raises UnsupportedError with the nearest name for an unknown one."""
    spec = OPS.get(name)
    if spec is None:
        raise UnsupportedError(
            "Unknown op", on=name, found="not in vllm_core.api.ops", expected="a registered op", fix=nearest(name, OPS)
        )
    return spec


def family_of(name: str) -> tuple[str, ...]:
    """Names of the ops chosen together with ``name``, itself included."""
    family = get(name).family
    return tuple(op for op, spec in OPS.items() if op == name or (family is not None and spec.family == family))
