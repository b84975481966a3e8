"""The family ``kv`` but for attention: a layer's blocks, and what is written to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_core.api import Rejected, UnsupportedError
from vllm_triton.kernels import codec, rope
from vllm_triton.offers import BLOCK_SIZES, HEAD_SIZES, ITEM_BYTES, block_bytes_of
from vllm_triton.ops.launch import Launch, power_of_2, settled
from vllm_triton.tuning import active

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KINDS = {"fp8": codec.E4M3, "fp8_e4m3": codec.E4M3, "fp8_e5m2": codec.E5M2, "int8": codec.INT8}


@dataclass(frozen=True, slots=True)
class KV:
    """One layer: blocks [num_blocks, 2, Hk, tokens_per_block, D], keys at 0, of dtype or of codes (`kernels.codec`).

    scales float32 [num_blocks, 2, Hk, tokens_per_block] where the kind has them, else the blocks, unread. words is all of the
    memory as int32.
    """

    blocks: Tensor
    scales: Tensor
    words: Tensor
    tokens_per_block: int
    num_heads: int
    head_size: int
    block_stride: int
    scale_stride: int
    kind: int


def kv_bind(memory: Tensor, num_kv_heads: int, head_size: int, dtype: str, tokens_per_block: int) -> KV:
    """View uint8 [num_blocks, block_bytes]. Raises UnsupportedError for what no kernel reads."""
    _supported("KV dtype", dtype, ITEM_BYTES, "choose another --kv-cache-dtype")
    _supported("Head size", head_size, HEAD_SIZES, "use --provider attention=reference")
    _supported("Block size", tokens_per_block, BLOCK_SIZES, "choose another --block-size")
    verdict = active().tried.judge(dtype, head_size=head_size, tokens_per_block=tokens_per_block)
    if isinstance(verdict, Rejected):
        raise UnsupportedError(
            "KV cache was not tried on this architecture",
            on=f"kv_bind, {verdict.need}",
            found=verdict.wanted,
            expected=verdict.supported,
            fix="choose another --kv-cache-dtype or --block-size, or use --provider attention=reference",
        )
    expected = block_bytes_of(num_kv_heads, head_size, dtype, tokens_per_block)
    if memory.shape[1] != expected:
        raise UnsupportedError(
            "KV memory has another layout",
            on=f"kv_bind, {num_kv_heads} heads of {head_size}, {dtype}, {tokens_per_block} tokens",
            found=f"{memory.shape[1]} bytes a block",
            expected=f"{expected} bytes a block",
            fix="allocate what this provider's kv_layout says",
        )
    count, shape = memory.shape[0], (2, num_kv_heads, tokens_per_block, head_size)
    words = memory.view(torch.int32)
    if dtype in _DTYPES:
        blocks = memory.view(_DTYPES[dtype]).view(count, *shape)
        return KV(blocks, blocks, words, tokens_per_block, num_kv_heads, head_size, blocks.stride(0), 0, codec.PLAIN.value)
    kind = _KINDS[dtype].value
    size = 2 * num_kv_heads * tokens_per_block * head_size
    codes = memory.view(torch.int8) if kind == codec.INT8.value else memory
    blocks = codes[:, :size].view(count, *shape)
    scales = memory.view(torch.float32)[:, size // 4 :].view(count, *shape[:3]) if kind == codec.INT8.value else blocks
    return KV(blocks, scales, words, tokens_per_block, num_kv_heads, head_size, expected, expected // 4, kind)


def _supported(what: str, wanted: object, known: object, fix: str) -> None:
    if wanted not in known:  # type: ignore[operator]
        listing = ", ".join(map(str, sorted(known)))  # type: ignore[call-overload]
        raise UnsupportedError(f"{what} has no kernel", on="kv_bind", found=str(wanted), expected=listing, fix=fix)


def kv_write(kv: KV, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Store k and v [T,Hk,D] at ``block * tokens_per_block + offset``."""
    if k.shape[0]:
        launch = _kv_write(k.shape[1:], k.stride(), v.stride(), form_of(kv))
        launch.start((k.shape[0], kv.num_heads, 1), k, v, kv.blocks, kv.scales, slot_mapping)


@settled
def _kv_write(heads: tuple[int, int], k: tuple[int, ...], v: tuple[int, ...], form: tuple[int, ...]) -> Launch:
    count, size = heads
    return Launch(
        rope.kv_write, HK=count, D=size, BLOCK_D=power_of_2(size), num_warps=1, **strides_of(k=k, v=v), **cache_of(form)
    )


def qk_norm_rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor | None,
    interleaved: bool,
    kv: KV,
    slot_mapping: Tensor,
) -> None:
    """Norm and rotate q [T,Hq,D] and k [T,Hk,D] in place, store k and v."""
    if (q_weight is None) != (k_weight is None):
        # No architecture has one alone: the parts serve it.
        from vllm_triton.ops.norm import rms_norm

        for x, weight in ((q, q_weight), (k, k_weight)):
            if weight is not None:
                rms_norm(x, x, weight, eps)
        q_weight = k_weight = None
    _launch(q, k, v, q_weight, k_weight, eps, positions, cos_sin, interleaved, kv, slot_mapping)


def rotary_embedding(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> None:
    """Rotate the first elements of each head of q [T,Hq,D] and k [T,Hk,D] in place."""
    _launch(q, k, k, None, None, 0.0, positions, cos_sin, interleaved, None, positions)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor | None,
    interleaved: bool,
    kv: KV | None,
    slots: Tensor,
) -> None:
    count = q.shape[0]
    if not count:
        return
    strides = q.stride(), k.stride(), v.stride()
    half = None if cos_sin is None else cos_sin.shape[2]
    form = None if kv is None else form_of(kv)
    parts, launch = _heads(q.shape[1:], k.shape[1], strides, None if q_weight is None else eps, half, interleaved, form)
    launch.start(
        (count, parts, 1),
        q,
        k,
        v,
        q if q_weight is None else q_weight,
        q if k_weight is None else k_weight,
        positions,
        positions if cos_sin is None else cos_sin,
        q if kv is None else kv.blocks,
        q if kv is None else kv.scales,
        slots,
    )


@settled
def _heads(
    heads: tuple[int, int],
    num_kv: int,
    strides: tuple[tuple[int, ...], ...],
    eps: float | None,
    half: int | None,
    interleaved: bool,
    form: tuple[int, ...] | None,
) -> tuple[int, Launch]:
    """Programs of a token, and the launch: without a norm, a table or a cache where there is no eps, half or form."""
    num_heads, size = heads
    rotated = size // 2 if half is None else half
    together = _together(num_heads, num_kv)
    launch = Launch(
        rope.qk_norm_rope_kv_write,
        eps=eps or 0.0,
        HQ=num_heads,
        HK=num_kv,
        D=size,
        HALF=rotated,
        BLOCK_HALF=power_of_2(rotated),
        BLOCK_REST=power_of_2(max(1, size - 2 * rotated)),
        HEADS=together,
        NORM=eps is not None,
        ROPE=half is not None,
        INTERLEAVED=interleaved,
        WRITE=form is not None,
        # A power of two, as compilers want it, also for heads of 96 elements.
        num_warps=max(1, min(4, power_of_2(together * size) // 256)),
        **strides_of(**dict(zip("qkv", strides, strict=True))),
        **cache_of(form or (1, 0, 0, codec.PLAIN.value)),
        **active().dependent,
    )
    return (num_heads + num_kv) // together, launch


def form_of(kv: KV) -> tuple[int, int, int, int]:
    """What `cache_of` is settled by."""
    return kv.tokens_per_block, kv.block_stride, kv.scale_stride, kv.kind


def cache_of(form: tuple[int, ...]) -> dict[str, int]:
    """A cache of this form, by the kernels' names."""
    return dict(zip(("TPB", "block_stride", "scale_stride", "KIND"), form, strict=True))


def strides_of(**tensors: tuple[int, ...]) -> dict[str, int]:
    """Of tokens and of heads [T,heads,D], by the kernel's names."""
    return {f"{name}_{of}": stride for name, one in tensors.items() for of, stride in zip(("token", "head"), one, strict=False)}


def _together(num_heads: int, num_kv: int) -> int:
    """Heads of one program: a power of two that divides both numbers, so that none has heads of q and of k."""
    return next(n for n in (8, 4, 2, 1) if num_heads % n == 0 and num_kv % n == 0)


def kv_copy(kv: KV, source: Tensor, target: Tensor) -> None:
    """Copy whole blocks, int64 [N] each."""
    count, size = source.shape[0], kv.words.shape[1]
    if count:
        rope.kv_copy[(count, -(-size // 4096))](kv.words, source, target, size, BLOCK=4096, num_warps=8)


def kv_export(out: Tensor, kv: KV, blocks: Tensor) -> None:
    """Write blocks in the canonical layout: float32 [N,2,tokens_per_block,Hk,D]."""
    if blocks.shape[0]:
        rope.kv_export[_canonical(kv, blocks)](out, kv.blocks, kv.scales, blocks, **_block_shape(kv))


def kv_import(kv: KV, blocks: Tensor, target: Tensor) -> None:
    """The inverse of `kv_export`, rounded to the KV dtype."""
    if target.shape[0]:
        rope.kv_import[_canonical(kv, target)](blocks, kv.blocks, kv.scales, target, **_block_shape(kv))


def _canonical(kv: KV, blocks: Tensor) -> tuple[int, int]:
    return blocks.shape[0], 2 * kv.num_heads


def _block_shape(kv: KV) -> dict[str, int]:
    return {
        "HK": kv.num_heads,
        "D": kv.head_size,
        "BLOCK_D": power_of_2(kv.head_size),
        "BLOCK_T": min(kv.tokens_per_block, 4096 // power_of_2(kv.head_size)),
        "num_warps": 4,
        **cache_of(form_of(kv)),
    }
