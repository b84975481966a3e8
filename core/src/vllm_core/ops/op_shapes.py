"""Which shape classes the generators of `vllm_core.ops.inputs` take, by op."""

from __future__ import annotations

from vllm_core.ops.batch_inputs import STEP_CLASSES, TAIL_CLASSES
from vllm_core.ops.shapes import CLASSES, ENCODER_CLASSES, KV_CLASSES, SINGLE_CLASSES

SHAPE_CLASSES: dict[str, tuple[str, ...]] = {
    name: ENCODER_CLASSES
    if name in ("encoder_attention", "pool")
    else KV_CLASSES
    if name.startswith("kv_")
    or name in ("paged_attention", "qk_norm_rope_kv_write", "qk_norm_rope_attention", "gather_rows", "log_probabilities")
    else SINGLE_CLASSES
    if name == "decode_layers"
    else STEP_CLASSES
    if name in ("batch_update", "build_step", "advance")
    else TAIL_CLASSES
    if name in ("logit_adjust", "sample")
    else CLASSES
    for name in (
        *("embedding", "gather_rows", "add", "rms_norm", "add_rms_norm", "layer_norm", "rotary_embedding"),
        *("gated_activation", "activation", "linear_pack", "linear", "kv_bind", "kv_write", "paged_attention", "kv_copy"),
        *("linear_add", "rms_norm_linear", "gated_linear", "rms_norm_gated_linear", "moe_route", "moe_pack", "moe"),
        *(
            "kv_export",
            "kv_import",
            "qk_norm_rope_kv_write",
            "qk_norm_rope_attention",
            "decode_layers",
            "encoder_attention",
            "pool",
            "batch_update",
            "build_step",
        ),
        *("advance", "logit_adjust", "grammar_mask", "sample", "log_probabilities", "all_reduce", "all_gather"),
        *("reduce_scatter", "all_reduce_add_rms_norm", "embedding_shard", "soft_cap"),
    )
}
"""Shape classes of each op."""
