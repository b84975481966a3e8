"""Blocks of KV from one engine's cache to another's, so that what one has computed of a prompt is continued by the other.

What travels are whole blocks of the prefix cache. Where both engines keep them in one form they travel raw; else through the
canonical layout of `kv_export` and `kv_import`, which knows no block size, order or dtype: then both may differ. Copies go
from device to device where the source's can, else through the host's pinned memory, which also serves two platforms.

Both engines are of one model, in this process, and idle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from vllm_core.api import Device
from vllm_core.api.batch import NULL_BLOCK
from vllm_core.engine import prefix
from vllm_core.engine.program import ComposedProgram
from vllm_core.errors import MemoryBudgetError, RequestError, UnsupportedError
from vllm_core.layers.rope import inverse_frequencies

if TYPE_CHECKING:
    from vllm_core.engine.binding import BoundOps
    from vllm_core.engine.blocks import BlockPool
    from vllm_core.engine.core import EngineCore
    from vllm_core.engine.kvtables import KVTables
    from vllm_core.engine.memory import GroupMemory

Form = Literal["raw", "canonical"]
Route = Literal["peer", "host"]

STAGE_BYTES = 32 << 20
"""What is on its way at a time; in canonical form at least one block of one layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What was done. The target's cache has ``num_tokens`` of the prompt, of which ``num_copied`` were copied now.

    `size_bytes` left the source's device. `form_reason` and `route_reason` say why not raw, and why not from device to device.
    """

    num_tokens: int
    num_copied: int
    size_bytes: int
    form: Form
    form_reason: str
    route: Route
    route_reason: str


@dataclass(slots=True, kw_only=True, eq=False)
class Side:
    """One engine, as a transfer sees it. `model` is equal for engines whose KV means the same."""

    name: str
    model: tuple[object, ...]
    core: EngineCore
    ops: BoundOps
    device: Device
    groups: Sequence[GroupMemory]
    _stage: torch.Tensor | None = field(default=None, init=False)
    _indices: torch.Tensor | None = field(default=None, init=False)
    _in_rows: dict[int, bool] = field(default_factory=dict, init=False)

    @property
    def tables(self) -> KVTables:
        """Its block tables."""
        return self.core.scheduler.tables

    @property
    def program(self) -> ComposedProgram:
        """Its step program, once it has been checked that the KV lies there."""
        program = self.core.program
        assert isinstance(program, ComposedProgram), "a program that keeps the KV to itself was refused"
        return program

    def op(self, name: str, group: GroupMemory) -> Any:
        """An op of the family ``kv``."""
        return self.ops.get(name, f"kv.{group.spec.index}.{group.spec.kind}")

    def stage(self, shape: Sequence[int]) -> torch.Tensor:
        """float32 of this shape; the same memory for every call."""
        count = math.prod(shape)
        if self._stage is None or self._stage.numel() < count:
            self._stage = self.device.allocate("workspace", (max(count, STAGE_BYTES // 4),), torch.float32)
        return self._stage[:count].view(*shape)

    def indices(self, blocks: Sequence[int]) -> torch.Tensor:
        """int64 on the device; the same memory for every call."""
        if self._indices is None or self._indices.numel() < len(blocks):
            self._indices = self.device.allocate("workspace", (max(1024, len(blocks)),), torch.int64)
        target = self._indices[: len(blocks)]
        target.copy_(torch.tensor(blocks, dtype=torch.int64))
        return target

    def keeps_rows(self, group: GroupMemory) -> bool:
        """Whether a block is a row of its memory, and nothing else is; tried once, since only the provider knows its layout.

        One may as well keep all keys before all values: a row is then a part of other blocks.
        """
        index = group.spec.index
        if index not in self._in_rows:
            self.device.make_current()
            with torch.inference_mode():
                self._in_rows[index] = self._try_rows(group)
        return self._in_rows[index]

    def _try_rows(self, group: GroupMemory) -> bool:
        spec, layout, device = group.spec, group.layout, self.device
        bind, export, take = (self.op(name, group) for name in ("kv_bind", "kv_export", "kv_import"))
        memories = [device.allocate("workspace", (2, layout.block_bytes), torch.uint8) for _ in range(2)]
        sizes = spec.num_kv_heads, spec.head_size, layout.dtype, layout.tokens_per_block
        here, there = (bind(memory, *sizes) for memory in memories)
        blocks = self.indices((0, 1))
        values = device.allocate("workspace", (2, 2, layout.tokens_per_block, spec.num_kv_heads, spec.head_size), torch.float32)

        def contents(kv: Any) -> torch.Tensor:
            export(values, kv, blocks)
            return values.cpu().clone()

        values.copy_(torch.arange(values.numel(), dtype=torch.float32).remainder(7).add(1).view(values.shape))
        take(here, values, blocks)
        before = contents(there)
        memories[1][1].copy_(memories[0][1])
        sent, arrived = contents(here), contents(there)
        return torch.equal(arrived[1], sent[1]) and torch.equal(arrived[0], before[0])


@dataclass(frozen=True, slots=True)
class _Piece:
    """Blocks of one group that are copied together.

    ``skip`` tokens of the first source block come before the first target block.
    """

    source: list[int]
    target: list[int]
    skip: int


class _Copy:
    """From a source's memory to a target's. Raises UnsupportedError for a route that there is not."""

    def __init__(self, source: Device, target: Device, route: Route | Literal["auto"]) -> None:
        self._source, self._target = source, target
        self.route: Route = "host" if route == "host" else "peer"
        self.reason = "asked for" if route == "host" else ""
        self._may_change = route == "auto"
        self._host: torch.Tensor | None = None
        self.size_bytes = 0
        if self.route == "peer" and type(source) is not type(target):
            found = f"{source.facts.device_type} and {target.facts.device_type}"
            if not self._may_change:
                raise UnsupportedError(
                    "Devices do not reach each other",
                    on=f"{source.facts.name} to {target.facts.name}",
                    found=found,
                    expected="two devices of one type",
                    fix='leave route out, or route="host"',
                )
            self.route, self.reason = "host", found

    def __call__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        leaving, arriving = (tensor.view(-1).view(torch.uint8) for tensor in (source, target))
        self.size_bytes += leaving.numel()
        for begin in range(0, leaving.numel(), STAGE_BYTES):
            self._stage(leaving[begin : begin + STAGE_BYTES], arriving[begin : begin + STAGE_BYTES])

    def _stage(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if self.route == "peer":
            try:
                self._source.copy_into_peer(source, target, self._target)
            except UnsupportedError as error:
                if not self._may_change:
                    raise
                self.route, self.reason = "host", error.found
            else:
                return
        if self._host is None:
            self._host = self._target.pinned((STAGE_BYTES,), torch.uint8)
        piece = self._host[: source.numel()]
        piece.copy_(source)
        target.copy_(piece)
        self._target.synchronize()


def send(
    source: Side,
    target: Side,
    tokens: Sequence[int],
    *,
    salt: str = "",
    form: Form | Literal["auto"] = "auto",
    route: Route | Literal["auto"] = "auto",
) -> Transfer:
    """Copy the longest beginning of ``tokens`` that the source has cached, in whole blocks of the target.

    Raises UnsupportedError where the engines cannot exchange KV, or not in this form or by this route; RequestError where one
    is not idle; MemoryBudgetError where the target has too few free blocks.
    """
    _check(source, target)
    why = _why_not_raw(source, target)
    if form == "raw" and why:
        raise _refused("KV cannot travel raw", source, target, why, "one layout, of blocks that are rows", 'form="canonical"')
    raw = not why and form != "canonical"
    digests, own = (_digests(side.tables.size, tokens, salt) for side in (target, source))
    chosen, lacking = _wanted(source.tables, target.tables, own, digests, len(tokens))
    copy = _Copy(source.device, target.device, route)
    given = _allocate(target, chosen, lacking, digests)
    try:
        with torch.inference_mode():
            for index, (indices, blocks) in enumerate(zip(lacking, given, strict=True)):
                most = len(indices) if raw else _most(source, target, index)
                for piece in _pieces(source, target, index, own, indices, blocks, most):
                    if raw:
                        _copy_raw(source, target, index, piece, copy)
                    else:
                        _copy_canonical(source, target, index, piece, copy)
        source.device.synchronize()
        target.device.synchronize()
        for pool, indices, blocks in zip(target.tables.pools, lacking, given, strict=True):
            for at, block in zip(indices, blocks, strict=True):
                pool.register(block, digests[at])
    finally:
        for pool, found, blocks in zip(target.tables.pools, chosen, given, strict=True):
            pool.free(reversed(blocks))
            pool.free(reversed(found))
    size = target.tables.size
    return Transfer(
        num_tokens=len(chosen[0]) * size if chosen else 0,
        num_copied=max((len(indices) for indices in lacking), default=0) * size,
        size_bytes=copy.size_bytes,
        form="raw" if raw else "canonical",
        form_reason=why or ("asked for" if not raw else ""),
        route=copy.route,
        route_reason=copy.reason,
    )


def _check(source: Side, target: Side) -> None:
    for side in (source, target):
        program = side.core.program
        if not isinstance(program, ComposedProgram):
            raise UnsupportedError(
                "KV cannot be transferred",
                on=side.name,
                found=f"{type(program).__name__}, whose workers or platform keep the KV",
                expected="core's step program on one device",
                fix="use engines without --tensor-parallel-size, and --program core",
            )
        if not side.tables.caching:
            raise UnsupportedError(
                "KV cannot be transferred",
                on=side.name,
                found="no prefix cache",
                expected="engines whose blocks are found by their content",
                fix="leave out --no-enable-prefix-caching, and choose one --block-size for all KV groups",
            )
        if side.core.has_work or side.core.is_asleep:
            raise RequestError(
                "Engine is not idle",
                on=side.name,
                found="asleep" if side.core.is_asleep else "unfinished requests",
                expected="an engine between two calls",
                fix="finish or close what runs there first, or wake it up",
            )
    _check_alike(source, target)


def _check_alike(source: Side, target: Side) -> None:
    """That the KV of one means the same to the other."""
    if source.model != target.model or [one.spec for one in source.groups] != [one.spec for one in target.groups]:
        found = f"{source.model}, {target.model}"
        raise _refused("Engines are of different models", source, target, found, "one model", "start both on the same model")
    if _turns(source.program) != _turns(target.program):
        found = f"contexts of {source.program.longest} and {target.program.longest} tokens, by which a RoPE scaling goes"
        fix = "start both with one --max-model-len"
        raise _refused("Keys mean different things", source, target, found, "keys turned alike", fix)


def _turns(program: ComposedProgram) -> list[tuple[list[float], float]]:
    """How fast each layer turns its keys, in radians per token, and by what it scales them."""
    turns = [inverse_frequencies(layer.rope, program.longest) for layer in program.spec.layers if layer.rope is not None]
    return [(frequencies.tolist(), factor) for frequencies, factor in turns]


def _refused(what: str, source: Side, target: Side, found: str, expected: str, fix: str) -> UnsupportedError:
    return UnsupportedError(what, on=f"{source.name} to {target.name}", found=found, expected=expected, fix=fix)


def _why_not_raw(source: Side, target: Side) -> str:
    """What differs between the two layouts; empty where bytes mean the same."""
    for one, other in zip(source.groups, target.groups, strict=True):
        for name in ("layout_id", "dtype", "tokens_per_block", "block_bytes"):
            mine, theirs = getattr(one.layout, name), getattr(other.layout, name)
            if mine != theirs:
                return f"{name} {mine} and {theirs}"
        if not source.keeps_rows(one):
            return f"layout {one.layout.layout_id}, whose blocks are not rows of its memory"
    return ""


def _digests(size: int, tokens: Sequence[int], salt: str) -> list[bytes]:
    """Of all blocks of ``size`` tokens that the tokens fill."""
    found: list[bytes] = []
    prefix.extend(found, tokens, size, salt)
    return found


def _wanted(
    source: KVTables, target: KVTables, own: Sequence[bytes], digests: Sequence[bytes], num_tokens: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Of the longest prefix that the source has, per group: the target's blocks, null where it lacks one or needs none, and
    the indices of those that it lacks. ``own`` are the source's digests, ``digests`` the target's."""
    available = [_available(pool, own, source.size, digests, target.size) for pool in source.pools]
    finders = [(one.get, group.spec.window) for one, group in zip(available, target.groups, strict=True)]
    length, needed = prefix.longest(digests, finders, target.size)
    if length and length * target.size == num_tokens:
        # The prompt ends with a block: who continues it computes its last token again, and so begins a block before.
        _, earlier = prefix.longest(digests[:-1], finders, target.size)
        for blocks, more in zip(needed, earlier, strict=True):
            blocks[: len(more)] = [block or other for block, other in zip(blocks, more, strict=False)]
    chosen: list[list[int]] = []
    lacking: list[list[int]] = []
    for pool, blocks in zip(target.pools, needed, strict=True):
        found = [pool.find(digests[at]) if blocks[at] else None for at in range(length)]
        chosen.append([block or NULL_BLOCK for block in found])
        lacking.append([at for at in range(length) if blocks[at] and found[at] is None])
    return chosen, lacking


def _available(pool: BlockPool, own: Sequence[bytes], own_size: int, digests: Sequence[bytes], size: int) -> dict[bytes, int]:
    """Of the target's blocks, of ``size`` tokens, those whose tokens the source has all: digest -> 1 + index."""
    has = [pool.find(digest) is not None for digest in own]
    found = {}
    for at, digest in enumerate(digests):
        first, last = _covering(at, 1, size, own_size)
        if last <= len(has) and all(has[first:last]):
            found[digest] = 1 + at
    return found


def _covering(at: int, count: int, size: int, other: int) -> tuple[int, int]:
    """Blocks of ``other`` tokens that hold all tokens of blocks ``at .. at + count`` of ``size`` tokens."""
    return at * size // other, -(-(at + count) * size // other)


def _allocate(target: Side, chosen: list[list[int]], lacking: list[list[int]], digests: Sequence[bytes]) -> list[list[int]]:
    """Own what the target has, and blocks for what it lacks. Raises MemoryBudgetError, with nothing owned."""
    pools = target.tables.pools
    for pool, found in zip(pools, chosen, strict=True):
        pool.share(found)
    short = [
        (pool.num_free, len(indices)) for pool, indices in zip(pools, lacking, strict=True) if len(indices) > pool.num_free
    ]
    if short:
        for pool, found in zip(pools, chosen, strict=True):
            pool.free(reversed(found))
        raise MemoryBudgetError(
            "KV cache does not hold the transfer",
            on=f"{target.name}, {len(digests) * target.tables.size} tokens",
            found=f"{short[0][0]} free blocks of {target.tables.size} tokens",
            expected=f"{short[0][1]} blocks",
            fix="send a shorter prompt, or raise --kv-cache-memory-bytes",
        )
    return [pool.allocate(len(indices)) for pool, indices in zip(pools, lacking, strict=True)]


def _most(source: Side, target: Side, index: int) -> int:
    """Blocks of the target that a stage of the source holds in canonical form, with what its first and last block have more."""
    spec, size = source.groups[index].spec, source.tables.size
    tokens = STAGE_BYTES // (2 * 4 * spec.num_kv_heads * spec.head_size)
    return max(1, (tokens - 2 * size) // target.tables.size)


def _pieces(
    source: Side, target: Side, index: int, own: Sequence[bytes], indices: list[int], blocks: list[int], most: int
) -> Iterator[_Piece]:
    """Blocks whose tokens follow each other, up to ``most`` at a time; ``own`` are the source's digests."""
    pool, size, other = source.tables.pools[index], target.tables.size, source.tables.size
    begin = 0
    while begin < len(indices):
        end = begin + 1
        while end < len(indices) and indices[end] == indices[end - 1] + 1 and end - begin < most:
            end += 1
        first, last = _covering(indices[begin], end - begin, size, other)
        found = [pool.find(digest) or NULL_BLOCK for digest in own[first:last]]
        yield _Piece(found, blocks[begin:end], indices[begin] * size - first * other)
        begin = end


def _copy_raw(source: Side, target: Side, index: int, piece: _Piece, copy: _Copy) -> None:
    for layer in source.groups[index].spec.layers:
        mine, theirs = source.program.kv_memory[layer], target.program.kv_memory[layer]
        assert mine is not None, "a layer of a KV group has memory"
        assert theirs is not None, "a layer of a KV group has memory"
        for at, to, count in _runs(piece.source, piece.target):
            copy(mine[at : at + count], theirs[to : to + count])


def _runs(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(source, target, count) of blocks that follow each other in both."""
    begin = 0
    for end in range(1, len(source) + 1):
        if end == len(source) or source[end] != source[end - 1] + 1 or target[end] != target[end - 1] + 1:
            yield source[begin], target[begin], end - begin
            begin = end


def _copy_canonical(source: Side, target: Side, index: int, piece: _Piece, copy: _Copy) -> None:
    group, spec = source.groups[index], source.groups[index].spec
    export, take = source.op("kv_export", group), target.op("kv_import", target.groups[index])
    shape = (len(piece.source), 2, source.tables.size, spec.num_kv_heads, spec.head_size)
    source.device.make_current()
    read = source.indices(piece.source)
    target.device.make_current()
    write = target.indices(piece.target)
    for layer in spec.layers:
        out, arrived = source.stage(shape), target.stage(shape)
        source.device.make_current()
        export(out, source.program.kv[layer], read)
        copy(out, arrived)
        target.device.make_current()
        take(target.program.kv[layer], _regrouped(arrived, piece.skip, len(piece.target), target.tables.size), write)


def _regrouped(blocks: torch.Tensor, skip: int, count: int, size: int) -> torch.Tensor:
    """``count`` blocks of ``size`` tokens from float32 [N,2,tokens_per_block,Hk,D], ``skip`` tokens behind their beginning."""
    if blocks.shape[2] == size:
        return blocks
    tokens = blocks.transpose(1, 2).flatten(0, 1)[skip : skip + count * size]
    return tokens.reshape(count, size, *tokens.shape[1:]).transpose(1, 2).contiguous()
