"""All layers at once on Hopper: what it is compiled to, and which calls it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vllm_core.api import Accepted, CallSite, DecoderLayers, QuantTensor, Rejected, UnsupportedError
from vllm_core.ops import inputs
from vllm_core.ops.check import Provider
from vllm_cuda import flat, layers, linear, nvrtc, programs
from vllm_cuda.backends import flat as tuning
from vllm_cuda.backends import hopper
from vllm_cuda.backends.offers import FLAT_PROVIDER, offers
from vllm_triton import tuning as active
from vllm_triton.offers import block_bytes_of
from vllm_triton.ops import cache

QWEN3_SMALL, QWEN3_8B, LLAMA_1B = (1024, 3072, 16, 8, 128), (4096, 12288, 32, 8, 128), (2048, 8192, 32, 8, 64)


def form_of(sizes=QWEN3_SMALL, rows=1, layers=28, norm=True, block=64, multiprocessors=132):
    return tuning.form_of(rows, sizes, layers, norm, block, multiprocessors)


FORMS = {
    "Qwen3 0.6B": form_of(),
    "Qwen3 0.6B, four rows": form_of(rows=3),
    "Qwen3 8B": form_of(QWEN3_8B, layers=36),
    "Qwen3 8B, two rows": form_of(QWEN3_8B, rows=2, layers=36),
    "Llama 3.2 1B, small blocks": form_of(LLAMA_1B, layers=16, norm=False, block=16),
    "SmolLM2 135M": form_of((576, 1536, 9, 3, 64), layers=30, norm=False),
}


@pytest.mark.parametrize("name", FORMS)
def test_it_compiles_to_bulk_copies_and_matrix_instructions_without_spills(name, machine_code):
    form = FORMS[name]
    assert form.shared_bytes <= hopper.SHARED_BYTES
    text = machine_code(flat.program_of(form).binary(), form.threads)
    # Four products, of whose stages each has two halves in eight steps.
    assert text.count("HMMA.16816.F32.BF16") == 4 * 2 * 8
    assert all(word in text for word in ("UBLKCP", "SYNCS.PHASECHK", "LDG.E.128.STRONG.GPU", "STG.E.64.STRONG.GPU"))


@pytest.mark.parametrize("name", FORMS)
def test_a_stage_of_the_ring_is_always_the_same_warps(name):
    form = FORMS[name]
    assert form.stages % form.work.warps == form.stages % form.work.bringers == 0
    assert form.stages > form.work.flying * form.work.bringers


@pytest.mark.parametrize("name", FORMS)
def test_what_programs_tell_one_another_has_its_place(name):
    assert sum(FORMS[name].words) * 8 <= 8 << 20
    assert all(count % 2 == 0 for count in FORMS[name].words), "two words are read at once"


@pytest.mark.parametrize(("rows", "padded"), [(1, 1), (2, 2), (3, 4), (4, 4)])
def test_rows_of_a_step_are_those_of_a_form(rows, padded):
    assert form_of(rows=rows).rows == padded


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 0},
        {"rows": 5},
        {"multiprocessors": 114},
        {"sizes": (1024, 3072, 16, 2, 128)},
        {"sizes": (1024, 3072, 16, 8, 96)},
        {"sizes": (1056, 3072, 16, 8, 128)},
        {"sizes": (1024, 3104, 16, 8, 128)},
        {"sizes": (4096, 12288, 64, 64, 128), "rows": 4},
    ],
)
def test_other_steps_are_left_to_the_layers_own_ops(changes):
    assert form_of(**changes) is None


def test_the_ring_must_have_room_beside_the_rest():
    big = (8192, 28672, 64, 16, 128)
    assert form_of(big, layers=80) is not None
    assert form_of(big, rows=2, layers=80) is None


@pytest.fixture
def on_hopper():
    before = list(active._active)
    active.use(hopper.TUNING, hopper.PROGRAMS)
    yield
    active._active[:] = before


def layout_of(group, dtype, size):
    from vllm_core.api import KVLayout

    count = block_bytes_of(group.num_kv_heads, group.head_size, dtype, size)
    return KVLayout(layout_id="here", dtype=dtype, tokens_per_block=size, block_bytes=count)


def no_import(*_):
    """What blocks hold does not matter where nothing is launched."""


PROVIDER = Provider({"linear_pack": linear.linear_pack, "kv_bind": cache.kv_bind, "kv_import": no_import}, layout_of)


class Call:
    """A call whose launch is noted, and runs nothing."""

    def __init__(self, shape="single/plain", dtype="bfloat16", seed=0, **changes):
        self.residual, described, *self.rows = inputs.decode_layers(dtype, seed, shape)
        self.layers: DecoderLayers = replace(PROVIDER.realize(described), **changes)

    def change(self, **changes):
        """In the last layer."""
        *before, last = self.layers.layers
        self.layers = replace(self.layers, layers=(*before, replace(last, **changes)), made={})
        return self

    def launched(self) -> bool:
        with programs.rehearsal():
            done = layers.decode_layers(self.residual, self.layers, *self.rows)
            found = {one.function for one in programs._rehearsed[-1][1]}
        assert found == ({"flat"} if done else set())
        return done


@pytest.fixture
def compiles_nothing(monkeypatch):
    monkeypatch.setattr(programs.Program, "binary", lambda _: b"")


@pytest.mark.usefixtures("on_hopper", "compiles_nothing")
class TestCalls:
    @pytest.mark.parametrize("shape", ["one_token/plain", "single/plain", "singles/plain", "single/q9/k3/h320/plain"])
    @pytest.mark.parametrize("seed", [0, 1])
    def test_plain_ones_are_taken(self, shape, seed):
        assert Call(shape, seed=seed).launched()

    def test_more_rows_are_not(self):
        assert not Call("decode/plain").launched()

    @pytest.mark.parametrize("changes", [{"activation": "gelu"}, {"cos_sin": torch.zeros(300, 2, 16)}])
    def test_other_activations_and_partial_rotations_are_not(self, changes):
        assert not Call(**changes).launched()

    def test_weights_of_other_forms_and_with_a_bias_are_not(self):
        call = Call()
        weight = call.layers.layers[0].down.shared.weight
        assert not Call().change(down=object()).launched()
        assert not Call().change(down=linear.linear_pack(weight, torch.zeros(len(weight)).bfloat16(), ())).launched()
        assert Call().change(down=linear.linear_pack(weight, None, ())).launched()
        assert Call().change(down=linear.linear_pack(weight, None, ()).shared).launched()
        codes = QuantTensor(
            data=torch.zeros(weight.shape, dtype=torch.int8),
            scale=torch.ones(len(weight)),
            format="int8_channel",
            shape=tuple(weight.shape),
        )
        assert not Call().change(down=linear.linear_pack(codes, None, ())).launched()

    def test_caches_of_other_forms_and_of_different_blocks_are_not(self):
        memory = torch.zeros(9, block_bytes_of(2, 64, "bfloat16", 32), dtype=torch.uint8)
        assert not Call().change(kv=object()).launched()
        assert not Call().change(kv=cache.kv_bind(memory, 2, 64, "bfloat16", 32)).launched()
        halves = cache.kv_bind(torch.zeros(9, block_bytes_of(2, 64, "float16", 16), dtype=torch.uint8), 2, 64, "float16", 16)
        assert not Call().change(kv=halves).launched()

    def test_norms_of_some_heads_alone_are_not(self):
        assert not Call().change(k_norm=None).launched()
        assert not Call().change(q_norm=None, k_norm=None).launched()

    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_other_dtypes_are_refused(self, dtype):
        call = Call()
        call.residual = call.residual.to(getattr(torch, dtype))
        with pytest.raises(UnsupportedError, match=dtype):
            call.launched()

    def test_addresses_are_asked_anew_and_a_table_that_a_graph_has_stays(self):
        call = Call()
        assert call.launched()
        stack = call.layers.made["vllm-cuda"]
        (first,) = stack.tables.values()
        assert call.launched()
        assert list(stack.tables.values()) == [first]
        weight = stack.tensors[0]
        weight.data = weight.clone()
        assert call.launched()
        one, other = stack.tables.values()
        assert one is first
        assert (one != other).nonzero().tolist() == [[0]]


def site(**changes) -> CallSite:
    plain = {"op": "decode_layers", "role": "kv.0.full", "dtype": "bfloat16", "kv_dtype": "bfloat16", "head_size": 128}
    return CallSite(**{**plain, **changes})


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"head_size": 64, "tokens_per_block": 16}, True),
        ({"dtype": "float16", "kv_dtype": "float16"}, False),
        ({"kv_dtype": "fp8_e4m3"}, False),
        ({"head_size": 96}, False),
    ],
)
def test_it_is_offered_for_plain_bfloat16(changes, taken, make_facts):
    (offer,) = (one for one in offers(make_facts("sm_90")) if "decode_layers" in one.ops)
    assert offer.provider == FLAT_PROVIDER
    verdict = offer.judge(site(**changes), "sm_90")
    assert isinstance(verdict, Accepted if taken and nvrtc.installed() else Rejected)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_100", "sm_120"])
def test_it_is_offered_on_hopper_alone(architecture, make_facts):
    assert not any("decode_layers" in one.ops for one in offers(make_facts(architecture)))
