"""Offers for NVIDIA GPUs. Names and metadata alone: no kernel is imported to answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from vllm_core.api import Accepted, CallSite, DeviceFacts, Offer, Rejected, Verdict
from vllm_core.api.ops import FP8_ACTIVATION
from vllm_cuda.backends import flat, fp8, prompts
from vllm_cuda.backends.families import HOPPER, family_of
from vllm_cuda.nvrtc import installed
from vllm_triton import offers as shared

PROVIDER = "vllm-cuda"
HOPPER_PROVIDER = f"{PROVIDER}-hopper"
FLAT_PROVIDER = f"{PROVIDER}-flat"
PACKED_PROVIDER = f"{PROVIDER}-packed"
FP8_PROVIDER = f"{PROVIDER}-fp8"
_ATTENTION = (PROVIDER, HOPPER_PROVIDER)
OWN = frozenset({*_ATTENTION, *(f"{one}-gather" for one in _ATTENTION), FLAT_PROVIDER, PACKED_PROVIDER, FP8_PROVIDER})
"""Providers whose kernels are all of this distribution and of vllm-triton."""

_COMM = "vllm_cuda.comm"
_DTYPES = frozenset({"float32", "bfloat16", "float16"})
_PRODUCTS = ("linear_pack", "linear", "linear_add", "rms_norm_linear", "gated_linear", "rms_norm_gated_linear")


def offers(device: DeviceFacts) -> Sequence[Offer]:
    """The kernels of vllm-triton, where this distribution has a tuning for the device."""
    family = family_of(device.architecture)
    if device.device_type != "cuda" or family is None:
        return ()
    built = frozenset(family.architectures)
    compiler = installed()
    every = shared.offers(PROVIDER, family.architectures, fresh=True)
    accepts = _compiled(compiler)
    hopper = (flat.offer(FLAT_PROVIDER, accepts), _streamed(compiler), *prompts.offers(HOPPER_PROVIDER, every, accepts))
    return (
        *(hopper if family is HOPPER else ()),
        _packed(compiler, built),
        _rounding(_packed(compiler, built), device),
        *every,
        *_comm(device, built),
    )


def _streamed(compiler: bool) -> Offer:
    """Products whose weights bulk copies bring; those of other shapes go the way of `PROVIDER`."""
    return Offer(
        provider=HOPPER_PROVIDER,
        ops={name: f"vllm_cuda.linear:{name}" for name in _PRODUCTS},
        dtypes=frozenset({"bfloat16", "float16"}),
        architectures=frozenset(HOPPER.architectures),
        priority=10,
        accepts=_compiled(compiler),
    )


def _packed(compiler: bool, built: frozenset[str]) -> Offer:
    """Products with weights of 4 and 8 bits; those with others go the way of `HOPPER_PROVIDER` or `PROVIDER`."""
    return Offer(
        provider=PACKED_PROVIDER,
        ops={name: f"vllm_cuda.packed_linear:{name}" for name in _PRODUCTS},
        dtypes=frozenset({"bfloat16", "float16"}),
        formats=shared.LINEAR_FORMATS,
        architectures=built,
        priority=5,
        accepts=_compiled(compiler),
    )


def _rounding(exact: Offer, device: DeviceFacts) -> Offer:
    """Products with weights in fp8 whose inputs are rounded to it, where that is asked for; others as ``exact`` has them."""

    def accepts(site: CallSite) -> Verdict:
        verdict = fp8.offered(site, device)
        return exact.judge(replace(site, features=frozenset()), device.architecture) if verdict == Accepted() else verdict

    return replace(
        exact,
        provider=FP8_PROVIDER,
        ops={name: f"vllm_cuda.fp8_linear:{name}" for name in _PRODUCTS},
        architectures=fp8.CHIPS,
        features=frozenset({FP8_ACTIVATION}),
        priority=-10,
        accepts=accepts,
        note=fp8.note(device.architecture),
    )


def _compiled(compiler: bool) -> Callable[[CallSite], Verdict]:
    def accepts(site: CallSite) -> Verdict:
        if compiler:
            return Accepted()
        return Rejected("compiler", "NVRTC, which CUDA builds of torch bring along", "none is installed")

    return accepts


def _comm(device: DeviceFacts, built: frozenset[str]) -> Sequence[Offer]:
    """Sums through the peers' memory before NCCL's, where the probe saw that this device reaches its peers."""
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_reduce_add_rms_norm")
    plain = {name: f"{_COMM}:{name}" for name in names}
    through_peers = plain | {name: f"{_COMM}:peer_{name}" for name in names if name != "reduce_scatter"}
    reached = [peer for peer, link in device.links.items() if link.startswith("peer")]
    far = [peer for peer, link in device.links.items() if not link.startswith("peer")]

    def accepts(site: CallSite) -> Verdict:
        return Accepted() if reached and not far else Rejected("peer access", "memory of all peers", _why(device))

    return (
        Offer(
            provider=f"{PROVIDER}-peer", ops=through_peers, dtypes=_DTYPES, architectures=built, priority=10, accepts=accepts
        ),
        Offer(provider=f"{PROVIDER}-nccl", ops=plain, dtypes=_DTYPES, architectures=built),
    )


def _why(device: DeviceFacts) -> str:
    return "; ".join(f"{peer}: {link}" for peer, link in device.links.items()) or "no other GPU is visible"
