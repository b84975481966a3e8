"""What a transfer takes, in which form and by which route; whole engines are in `core/tests/llm/test_transfer.py`."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from vllm_core.engine import prefix, transfer
from vllm_core.engine.kvtables import KVTables
from vllm_core.engine.memory import GroupMemory
from vllm_core.engine.request import Request
from vllm_core.errors import UnsupportedError
from vllm_core.ops import attention, layouts

SIZE = 4


class Device:
    """Host memory, copied from device to device in what is asked for."""

    facts = SimpleNamespace(device_type="fake", name="fake")

    def __init__(self) -> None:
        self.copied: list[int] = []

    def allocate(self, pool, shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    def copy_into_peer(self, source, target, peer):
        self.copied.append(source.numel() * source.element_size())
        target.copy_(source)

    def pinned(self, shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    def make_current(self):
        """There is one."""

    def synchronize(self):
        """Copies have ended."""


class OtherDevice(Device):
    """Of another platform."""

    facts = SimpleNamespace(device_type="other", name="other")


def planes(memory, num_kv_heads, head_size, dtype, tokens_per_block):
    """All keys of a layer before all values: a block lies in two places."""
    both = memory.view(-1).view(torch.float32).view(2, len(memory), tokens_per_block, num_kv_heads, head_size)
    return SimpleNamespace(both=both)


def export_planes(out, kv, blocks):
    out.copy_(kv.both[:, blocks].transpose(0, 1))


def import_planes(kv, blocks, target):
    kv.both[:, target] = blocks.transpose(0, 1)


ROWS = {"kv_bind": attention.kv_bind, "kv_export": attention.kv_export, "kv_import": attention.kv_import}
PLANES = {"kv_bind": planes, "kv_export": export_planes, "kv_import": import_planes}


@pytest.fixture
def side(fake):
    """One engine's side, its KV kept by the ops given."""

    def make(ops, dtype="float32"):
        spec = fake.group().spec
        layout = layouts.kv_layout(spec, dtype, SIZE)
        return transfer.Side(
            name="fake:0",
            model=(),
            core=SimpleNamespace(),
            ops=SimpleNamespace(get=lambda name, role: ops[name]),
            device=Device(),
            groups=[GroupMemory(spec, layout)],
        )

    return make


@pytest.fixture
def tables(fake):
    """Tables of a full group and one with a window of two blocks."""
    return lambda: KVTables([fake.group(size=SIZE), fake.group(size=SIZE, window=2 * SIZE, index=1)], caching=True)


def cache(tables, digests, indices):
    """Put blocks into the caches of all groups."""
    for pool, wanted in zip(tables.pools, indices, strict=True):
        blocks = pool.allocate(len(wanted))
        for block, at in zip(blocks, wanted, strict=True):
            pool.register(block, digests[at])
        pool.free(blocks)


@pytest.mark.parametrize("count", range(1, 41))
def test_what_was_sent_of_a_prompt_is_found_when_it_is_continued(fake, tables, count):
    """Also where the prompt fills its blocks: its last token is computed again, so it begins a block before."""
    source, target, tokens = tables(), tables(), list(range(count))
    digests: list[bytes] = []
    prefix.extend(digests, tokens, SIZE, "")
    cache(source, digests, [range(len(digests))] * 2)
    chosen, lacking = transfer._wanted(source, target, digests, digests, count)
    assert len(chosen[0]) == count // SIZE
    cache(target, digests, lacking)
    for asked in (tokens, [*tokens, 0]):
        request = Request(fake.request("a", asked), (0, 1), 2, 64, 0.0)
        assert target.match(request)[0] == (len(asked) - 1) // SIZE


def test_blocks_on_their_way_fit_the_memory_for_them(fake, monkeypatch):
    monkeypatch.setattr(transfer, "STAGE_BYTES", 1 << 13)
    chance = random.Random(3)
    for _ in range(200):
        size, other = chance.choice([4, 8, 12, 20]), chance.choice([4, 8, 12, 20])
        digests = [at.to_bytes(2, "big") for at in range(120 * other // size + 1)]
        pool = SimpleNamespace(find=lambda digest: 1)
        source = SimpleNamespace(
            groups=[SimpleNamespace(spec=fake.group().spec)], tables=SimpleNamespace(size=size, pools=[pool])
        )
        target = SimpleNamespace(tables=SimpleNamespace(size=other))
        first = chance.randrange(20)
        indices = list(range(first, first + chance.randrange(1, 100)))
        most = transfer._most(source, target, 0)
        for piece in transfer._pieces(source, target, 0, digests, indices, indices, most):
            assert len(piece.source) * size * 2 * 8 * 4 <= transfer.STAGE_BYTES


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8", "int8"])
def test_blocks_that_are_rows_of_their_memory_may_travel_raw(side, dtype):
    assert transfer._why_not_raw(side(ROWS, dtype), side(ROWS, dtype)) == ""


def test_blocks_that_lie_in_two_places_do_not_travel_raw(side):
    """A row of the memory is then a part of other blocks."""
    one = side(PLANES)
    assert transfer._why_not_raw(one, side(PLANES)) == "layout core.keys-values.thd, whose blocks are not rows of its memory"
    one.ops = SimpleNamespace()
    assert transfer._why_not_raw(one, side(PLANES)), "tried once"


def test_what_goes_from_device_to_device_goes_in_stages(monkeypatch):
    """A device without a link brings it through memory of its host, as much as it is given at a time."""
    monkeypatch.setattr(transfer, "STAGE_BYTES", 64)
    device = Device()
    copy = transfer._Copy(device, Device(), "auto")
    source, target = torch.arange(50, dtype=torch.float32).view(5, 10), torch.zeros(5, 10)
    copy(source, target)
    assert torch.equal(source, target)
    assert device.copied == [64, 64, 64, 8]
    assert (copy.size_bytes, copy.route) == (200, "peer")


def test_devices_of_two_platforms_go_through_the_host_or_are_refused_by_name():
    assert transfer._Copy(Device(), OtherDevice(), "auto").route == "host"
    with pytest.raises(UnsupportedError, match="fake and other"):
        transfer._Copy(Device(), OtherDevice(), "peer")
