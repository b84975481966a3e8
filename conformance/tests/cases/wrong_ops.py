"""Ops that are wrong in the ways of real ones, each at an edge that a case is made for."""

from __future__ import annotations

from dataclasses import replace

import torch

from vllm_core.api import UnsupportedError
from vllm_core.ops import attention, batch, embedding, linear, norm, rope, sampling, stack


def add(out, a, b):
    """Right."""
    torch.add(a, b, out=out)


def rounds_the_mean(out, x, weight, eps):
    """Off by more than the tolerance."""
    norm.rms_norm(out, x, weight, eps)
    out.mul_(1.001)


def ignores_strides(out, x, weight, eps):
    """Reads rows as if they lay side by side."""
    flat = torch.as_strided(x, tuple(x.shape), (x.shape[1], 1))
    norm.rms_norm(out, flat, weight, eps)


def clears_first(out, x, weight, eps):
    """Wrong where the output is the input."""
    out.zero_()
    norm.rms_norm(out, x, weight, eps)


def adds_to_what_was_there(out, x, weight, eps):
    """Expects zeros in its output."""
    before = out.clone()
    norm.rms_norm(out, x, weight, eps)
    out.add_(before)


def spoils_an_input(out, x, rows):
    """The result is right, an argument is not what it was."""
    embedding.gather_rows(out, x, rows)
    rows.zero_()


def writes_nothing(*arguments):
    """The result is whatever was there."""


def writes_a_row_too_many(out, a, b):
    """A store without a mask."""
    torch.add(a, b, out=out)
    torch.as_strided(out, (out.numel() + 3,), (1,))[out.numel() :] = 0


_kept = []


def keeps_the_first_input(out, a, b):
    """What a graph does that captured values instead of addresses."""
    _kept.append(a.clone())
    torch.add(_kept[0] if _kept[0].shape == a.shape else a, b, out=out)


def does_all_layers(*arguments):
    """Right."""
    return stack.decode_layers(*arguments)


def leaves_it(*arguments):
    """Declines what it offers."""
    return False


def forgets_the_last_layer(residual, layers, *rows):
    """All but one."""
    return stack.decode_layers(residual, replace(layers, layers=layers.layers[:-1]), *rows)


def writes_no_keys(residual, layers, positions, slots, *rows):
    """The new tokens' keys and values go to the null block."""
    return stack.decode_layers(residual, layers, positions, torch.zeros_like(slots), *rows)


def starts_from_the_first_residual(residual, *arguments):
    """What a graph does that captured values instead of addresses."""
    _kept.append(residual.clone())
    residual.copy_(_kept[0] if _kept[0].shape == residual.shape else residual)
    return stack.decode_layers(residual, *arguments)


def rotates_everything(q, k, positions, cos_sin, interleaved):
    """Takes the whole head where half of it is to be rotated, and knows one pairing."""
    whole = torch.cat((cos_sin, cos_sin), dim=2)[:, :, : q.shape[2] // 2]
    rope.rotary_embedding(q, k, positions, whole, False)


def rotary_that_refuses_pairs(q, k, positions, cos_sin, interleaved):
    """Right: what it does not offer it refuses."""
    if interleaved:
        raise UnsupportedError("Pairs are not interleaved", on="rope", found="interleaved", expected="halves", fix="none")
    rope.rotary_embedding(q, k, positions, cos_sin, interleaved)


def rotary_that_can_do_all(q, k, positions, cos_sin, interleaved):
    """Does what its offer says it cannot."""
    rope.rotary_embedding(q, k, positions, cos_sin, interleaved)


def drops_the_rest_of_a_tile(out, x, weight):
    """Sums over whole tiles of 16 only."""
    whole = x.shape[1] // 16 * 16
    part = linear.Packed(weight.weight[:, :whole], weight.bias, weight.readers)
    linear.linear(out, x[:, :whole], part)


def takes_the_last_of_equal_ones(tokens, nonfinite, logits, state, slots, lengths, features):
    """The largest logit, but not its lowest index."""
    sampling.sample(tokens, nonfinite, logits.flip(1), state, slots, lengths, features)
    tokens.neg_().add_(logits.shape[1] - 1)


def has_its_own_random_numbers(tokens, nonfinite, logits, state, slots, lengths, features):
    """Another generator."""
    sampling.sample(tokens, nonfinite, logits, state, slots, lengths + 1, features)


def forgets_the_last_word(logits, mask, rows):
    """Masks whole words of 32 tokens."""
    whole = logits.shape[1] // 32 * 32
    sampling.grammar_mask(logits[:, :whole], mask[:, : whole // 32], rows)


def forgets_the_token(state, inputs, tokens):
    """Counts, and appends nothing."""
    before = state.tokens.clone()
    batch.advance(state, inputs, tokens)
    state.tokens.copy_(before)


def maps_every_token_to_block_1(state, packed, header):
    """A slot mapping without the block table."""
    inputs = batch.build_step(state, packed, header)
    for mapping, size in zip(inputs.slot_mapping, state.tokens_per_block, strict=True):
        mapping.copy_(size + mapping % size)
    return inputs


def leaves_the_old_blocks(state, packed, header):
    """Admits without clearing the table of the request before."""
    before = [table.clone() for table in state.block_tables]
    batch.batch_update(state, packed, header)
    for table, old in zip(state.block_tables, before, strict=True):
        table.copy_(torch.where(table == 0, old, table))


def raises(*arguments):
    """Fails."""
    raise RuntimeError("kernel table has no entry")


def attention_without_window(*arguments):
    """Sees everything."""
    attention.paged_attention(*arguments[:9], 0, arguments[10])


def attention_without_cap(*arguments):
    """Leaves scores as they are."""
    attention.paged_attention(*arguments[:10], 0.0)


def attention_without_sinks(*arguments):
    """The softmax of the keys alone."""
    attention.paged_attention(*arguments[:11])


def attention_with_sinks_that_count_twice(*arguments):
    """As a kernel does that joins them in each of two spans."""
    attention.paged_attention(*arguments[:11], arguments[11] + 0.6931)


def attention_with_heads_in_turn(out, q, kv, *rest):
    """Query head h reads KV head h % Hk."""
    heads = kv.blocks.shape[2]
    order = torch.arange(q.shape[1]).view(-1, heads).t().flatten()
    turned = torch.empty_like(out)
    attention.paged_attention(turned, q[:, order].contiguous(), kv, *rest)
    out[:, order] = turned


def attention_without_the_last_of_a_block(out, q, kv, query_start, seq_lens, table, *rest):
    """An off-by-one at full blocks: the newest token is not seen."""
    attention.paged_attention(out, q, kv, query_start, seq_lens, table, *rest)
    ends = query_start[1:].long() - 1
    full = (seq_lens % kv.tokens_per_block == 0) & (seq_lens > 1)
    out[ends[full]] *= 0.9


def attention_with_weights_of_zero(out, q, kv, query_start, seq_lens, table, most, longest, scale, window, cap):
    """Multiplies what is behind a sequence by 0 instead of leaving it out."""
    attention.paged_attention(out, q, kv, query_start, seq_lens, table, most, longest, scale, window, cap)
    blocks = kv.blocks[table.long()]
    out += 0.0 * blocks.float().sum()


def attention_of_at_most_1024(out, q, kv, query_start, seq_lens, table, most, longest, scale, window, cap):
    """One tile of keys."""
    attention.paged_attention(out, q, kv, query_start, seq_lens, table, most, longest, scale, window or 1024, cap)
