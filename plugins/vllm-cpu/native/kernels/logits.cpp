// logit_adjust, grammar_mask, log_probabilities. Oracle: vllm_core.ops.penalties, vllm_core.ops.sampling.
#include "batch.h"
#include "select.h"
#include "threads.h"

VLLM_VARIANT_BEGIN

// Tokens that occur in the sequence, each once. `marks` int32 [vocab] are zeros before and after: bit 0 says that a token
// occurs, the others count it in the output.
static void penalise(float *logits, int64_t vocab, const int32_t *params, const int32_t *tokens, int64_t length, int32_t *marks) {
    const float repetition = float_of(params[A_REPETITION]), presence = float_of(params[A_PRESENCE]);
    const float frequency = float_of(params[A_FREQUENCY]);
    for (int64_t i = 0; i < length; ++i)
        if (within(tokens[i], vocab)) {
            marks[tokens[i]] |= 1;
            if (i >= params[A_PROMPT_LEN]) marks[tokens[i]] += 2;
        }
    for (int64_t i = 0; i < length; ++i) {
        if (!within(tokens[i], vocab) || !marks[tokens[i]]) continue;
        float &x = logits[tokens[i]];
        const int32_t times = marks[tokens[i]] >> 1;
        marks[tokens[i]] = 0;
        x = x > 0.0f ? x / repetition : x * repetition;
        if (times) {
            x -= frequency * static_cast<float>(times);
            x -= presence;
        }
    }
}

// Record: length n, then n token ids, repeated.
static void forbid_words(float *logits, int64_t vocab, const int32_t *record, int64_t words, const int32_t *tokens, int64_t length) {
    for (int64_t at = 0; at < words;) {
        const int64_t n = record[at];
        if (n < 1 || at + 1 + n > words) return;
        const int32_t *word = record + at + 1, last = word[n - 1];
        bool same = n - 1 <= length;
        for (int64_t i = 0; same && i < n - 1; ++i) same = word[i] == tokens[length - (n - 1) + i];
        if (same && within(last, vocab)) logits[last] = -INFINITY;
        at += 1 + n;
    }
}

static void adjust(const vllm_tail_args *a, int64_t row) {
    const vllm_state *s = a->state;
    const int64_t slot = a->slots[row], length = smaller(a->lengths[row], s->tokens_width), vocab = a->vocab;
    const int32_t *params = s->params + slot * ADMIT_WORDS, *tokens = s->tokens + slot * s->tokens_width;
    const int64_t asked = params[A_FEATURES] & a->features;
    float *logits = a->logits + row * vocab;
    if (asked & F_PENALTIES) {
        int32_t *marks = static_cast<int32_t *>(scratch(2, static_cast<size_t>(vocab) * 4));
        memset(marks, 0, static_cast<size_t>(vocab) * 4);
        penalise(logits, vocab, params, tokens, length, marks);
    }
    if (asked & F_BIAS)
        for (int64_t i = 0; i < smaller(params[A_NUM_BIAS], s->bias_width); ++i) {
            int32_t id = s->bias_ids[slot * s->bias_width + i];
            if (within(id, vocab)) logits[id] += s->bias_values[slot * s->bias_width + i];
        }
    if ((asked & F_MIN_LEN) && a->lengths[row] < params[A_MIN_LEN])
        for (int64_t i = 0; i < smaller(params[A_NUM_STOP], s->stop_width); ++i) {
            int32_t id = s->stop_ids[slot * s->stop_width + i];
            if (within(id, vocab)) logits[id] = -INFINITY;
        }
    if (asked & F_BAD_WORDS)
        forbid_words(logits, vocab, s->bad_words + slot * s->bad_width, smaller(params[A_NUM_BAD], s->bad_width), tokens, length);
}

int32_t logit_adjust(const vllm_tail_args *a) {
    for (int64_t row = 0; row < a->rows; ++row)
        if (!within(a->slots[row], a->state->num_slots + 1) || a->lengths[row] < 0) return VLLM_INVALID;
    parallel_ranges(a->rows, 4, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) adjust(a, row);
    });
    return VLLM_OK;
}

int32_t grammar_mask(const vllm_logits_args *a) {
    const int64_t words = (a->vocab + 31) / 32;
    for (int64_t i = 0; i < a->masked; ++i)
        if (!within(a->index[i], a->rows)) return VLLM_INVALID;
    parallel_ranges(a->masked, 4, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            for (int64_t w = 0; w < words; ++w) {
                const uint32_t word = static_cast<uint32_t>(a->mask[i * words + w]);
                if (word == 0xffffffffu) continue;
                float *logits = a->logits + a->index[i] * a->vocab + w * 32;
                for (int64_t bit = 0; bit < smaller(32, a->vocab - w * 32); ++bit)
                    if (!(word >> bit & 1)) logits[bit] = -INFINITY;
            }
    });
    return VLLM_OK;
}

// log of the sum of exponentials.
static float log_total(const float *x, int64_t n, float most) {
    double sum = 0.0;
    const vf shift = vf_set(most);
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
        const int64_t end = smaller(n, begin + BLOCK);
        vf part = vf_zero();
        for (int64_t i = begin; i < end; i += VF) {
            vf v = i + VF <= end ? vf_load(x + i) : vf_load_part(x + i, end - i, -INFINITY);
            part = vf_add(part, vf_exp(vf_sub(v, shift)));
        }
        sum += static_cast<double>(vf_sum(part));
    }
    return most + static_cast<float>(log(sum));
}

// The k largest in descending order, the lowest index first of equal ones.
static void first_k(const float *x, int64_t n, int64_t k, float total, int32_t *ids, float *top, float *room) {
    const float bound = bound_of_kth(x, n, k, room);
    int64_t kept = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (!(x[i] >= bound) || (kept == k && !(x[i] > top[k - 1]))) continue;
        int64_t at = kept < k ? kept++ : k - 1;
        for (; at > 0 && top[at - 1] < x[i]; --at) {
            top[at] = top[at - 1];
            ids[at] = ids[at - 1];
        }
        top[at] = x[i];
        ids[at] = static_cast<int32_t>(i);
    }
    for (int64_t i = kept; i < k; ++i) {  // only where there are NaN
        top[i] = NAN;
        ids[i] = 0;
    }
    for (int64_t i = 0; i < k; ++i) top[i] -= total;
}

int32_t log_probabilities(const vllm_logits_args *a) {
    if (a->vocab < 1 || a->k < 0 || a->k > a->vocab) return VLLM_INVALID;
    for (int64_t row = 0; row < a->rows; ++row)
        if (!within(a->tokens[row], a->vocab)) return VLLM_INVALID;
    parallel_ranges(a->rows, 1, [&](int64_t begin, int64_t end) {
        float *room = static_cast<float *>(scratch(2, static_cast<size_t>(a->vocab / BUNCH + 1) * 4));
        for (int64_t row = begin; row < end; ++row) {
            const float *x = a->logits + row * a->vocab, chosen = x[a->tokens[row]];
            float most;
            first_largest(x, a->vocab, &most);
            const float total = log_total(x, a->vocab, most);
            int32_t rank = 1;
            for (int64_t i = 0; i < a->vocab; ++i) rank += x[i] > chosen;
            a->chosen[row] = chosen - total;
            a->rank[row] = rank;
            if (a->k) first_k(x, a->vocab, a->k, total, a->top_ids + row * a->k, a->top + row * a->k, room);
        }
    });
    return VLLM_OK;
}

VLLM_VARIANT_END
