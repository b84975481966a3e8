// batch_update, build_step, advance: the batch state. One thread: a step's difference is a few hundred words.
// Oracle: vllm_core.ops.batch.
#include "batch.h"

VLLM_VARIANT_BEGIN

// The sections of the packed buffer.
struct Sections {
    const int32_t *admits, *tokens, *blocks, *extras, *steps;
    int64_t num_admits, num_tokens, num_blocks, num_extras, num_steps;

    bool read(const int32_t *packed, int64_t words) {
        if (words < HEADER_WORDS) return false;
        num_admits = packed[H_ADMITTED];
        num_tokens = packed[H_TOKENS];
        num_blocks = packed[H_BLOCKS];
        num_extras = packed[H_EXTRA];
        num_steps = packed[H_SCHEDULED];
        if (num_admits < 0 || num_tokens < 0 || num_blocks < 0 || num_extras < 0 || num_steps < 0) return false;
        admits = packed + HEADER_WORDS;
        tokens = admits + num_admits * ADMIT_WORDS;
        blocks = tokens + num_tokens;
        extras = blocks + num_blocks * 4;
        steps = extras + num_extras * 5;
        return steps + num_steps * 4 <= packed + words;
    }
};

static bool admit(const vllm_state *s, const Sections &parts) {
    const int32_t *tokens = parts.tokens;
    for (int64_t i = 0; i < parts.num_admits; ++i) {
        const int32_t *record = parts.admits + i * ADMIT_WORDS;
        int64_t slot = record[A_SLOT], known = record[A_NUM_KNOWN];
        if (!within(slot, s->num_slots + 1) || !within(known, s->tokens_width + 1)) return false;
        if (tokens + known > parts.blocks) return false;
        memcpy(s->params + slot * ADMIT_WORDS, record, ADMIT_WORDS * 4);
        s->computed[slot] = record[A_NUM_COMPUTED];
        for (int64_t g = 0; g < s->num_groups; ++g)
            memset(s->tables[g] + slot * s->table_widths[g], 0, static_cast<size_t>(s->table_widths[g]) * 4);
        memcpy(s->tokens + slot * s->tokens_width, tokens, static_cast<size_t>(known) * 4);
        tokens += known;
    }
    return true;
}

static bool put_extra(const vllm_state *s, const int32_t *row) {
    int64_t slot = row[1], at = row[2];
    if (!within(slot, s->num_slots + 1)) return false;
    switch (row[0]) {
        case E_BIAS:
            if (!within(at, s->bias_width)) return false;
            s->bias_ids[slot * s->bias_width + at] = row[3];
            s->bias_values[slot * s->bias_width + at] = float_of(row[4]);
            return true;
        case E_STOP:
            if (!within(at, s->stop_width)) return false;
            s->stop_ids[slot * s->stop_width + at] = row[3];
            return true;
        case E_BAD_WORD:
            if (!within(at, s->bad_width)) return false;
            s->bad_words[slot * s->bad_width + at] = row[3];
            return true;
        default: return false;
    }
}

int32_t batch_update(const vllm_update_args *a) {
    const vllm_state *s = a->state;
    Sections parts;
    if (!parts.read(a->packed, a->words) || !admit(s, parts)) return VLLM_INVALID;
    for (int64_t i = 0; i < parts.num_blocks; ++i) {
        const int32_t *row = parts.blocks + i * 4;
        if (!within(row[0], s->num_groups) || !within(row[1], s->num_slots + 1) || !within(row[2], s->table_widths[row[0]]))
            return VLLM_INVALID;
        s->tables[row[0]][row[1] * s->table_widths[row[0]] + row[2]] = row[3];
    }
    for (int64_t i = 0; i < parts.num_extras; ++i)
        if (!put_extra(s, parts.extras + i * 5)) return VLLM_INVALID;
    return VLLM_OK;
}

// Tokens, positions and slots of one row that begins at token `at`. False: a place that the state does not have.
static bool build_row(const vllm_state *s, const vllm_step *step, int64_t slot, int64_t before, int64_t count, int64_t at) {
    if (before < 0 || before + count > s->tokens_width) return false;
    for (int64_t i = 0; i < count; ++i) step->positions[at + i] = static_cast<int32_t>(before + i);
    memcpy(step->token_ids + at, s->tokens + slot * s->tokens_width + before, static_cast<size_t>(count) * 4);
    for (int64_t g = 0; g < s->num_groups; ++g) {
        const int32_t *table = s->tables[g] + slot * s->table_widths[g];
        const int64_t size = s->tokens_per_block[g];
        if (count && (before + count - 1) / size >= s->table_widths[g]) return false;
        for (int64_t i = 0; i < count; ++i) {
            int64_t position = before + i;
            step->slot_mapping[g][at + i] = table[position / size] * size + position % size;
        }
    }
    return true;
}

int32_t build_step(const vllm_build_args *a) {
    const vllm_state *s = a->state;
    const vllm_step *step = a->step;
    Sections parts;
    if (!parts.read(a->packed, a->words)) return VLLM_INVALID;
    const int64_t tokens = a->packed[H_NUM_TOKENS], to_sample = a->packed[H_NUM_SAMPLED];
    int64_t at = 0, sampled = 0;
    step->query_start[0] = 0;
    for (int64_t row = 0; row < parts.num_steps; ++row) {
        const int32_t *record = parts.steps + row * 4;
        const int64_t slot = record[0], count = record[1];
        if (!within(slot, s->num_slots + 1) || count < 0 || at + count > tokens) return VLLM_INVALID;
        const int64_t before = s->computed[slot];
        if (!build_row(s, step, slot, before, count, at)) return VLLM_INVALID;
        at += count;
        step->slots[row] = static_cast<int32_t>(slot);
        step->query_start[row + 1] = static_cast<int32_t>(at);
        step->seq_lens[row] = static_cast<int32_t>(before + count);
        for (int64_t g = 0; g < s->num_groups; ++g) {
            const int64_t columns = step->table_columns[g];
            if (columns > s->table_widths[g]) return VLLM_INVALID;
            memcpy(step->tables[g] + row * columns, s->tables[g] + slot * s->table_widths[g], static_cast<size_t>(columns) * 4);
        }
        if (record[2]) {
            if (sampled == to_sample) return VLLM_INVALID;
            step->sample_rows[sampled] = at - 1;
            step->sample_slots[sampled] = slot;
            step->sample_lengths[sampled++] = static_cast<int32_t>(before + count);
        }
    }
    return at == tokens && sampled == to_sample ? VLLM_OK : VLLM_INVALID;
}

int32_t advance(const vllm_advance_args *a) {
    const vllm_state *s = a->state;
    for (int64_t i = 0; i < a->rows; ++i) {
        if (!within(a->slots[i], s->num_slots + 1)) return VLLM_INVALID;
        s->computed[a->slots[i]] = a->seq_lens[i];
    }
    for (int64_t i = 0; i < a->sampled; ++i) {
        const int64_t slot = a->sample_slots[i];
        if (!within(slot, s->num_slots + 1)) return VLLM_INVALID;
        const int64_t end = s->computed[slot];
        if (within(end, s->tokens_width)) s->tokens[slot * s->tokens_width + end] = a->tokens[i];
    }
    s->computed[s->num_slots] = 0;
    return VLLM_OK;
}

VLLM_VARIANT_END
