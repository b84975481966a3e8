// sample. Each row depends on itself alone. Oracle: vllm_core.ops.sampling, vllm_core.ops.random.
#include "batch.h"
#include "select.h"
#include "threads.h"

VLLM_VARIANT_BEGIN

constexpr int64_t PART = 1024;      // weights that are summed before a sum is taken in double
constexpr int64_t CLASSES = 2048;   // of weights 0 .. 1 by exponent and four bits

// Philox4x32-10 (Salmon et al. 2011): first word for the counter (position, 0, 0, 0).
static uint32_t philox(uint32_t low, uint32_t high, uint32_t position) {
    uint32_t c0 = position, c1 = 0, c2 = 0, c3 = 0;
    for (int round = 0; round < 10; ++round) {
        uint64_t p0 = static_cast<uint64_t>(c0) * 0xD2511F53u, p1 = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
        c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ low;
        c1 = static_cast<uint32_t>(p1);
        c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ high;
        c3 = static_cast<uint32_t>(p0);
        low += 0x9E3779B9u;
        high += 0xBB67AE85u;
    }
    return c0;
}

// The k-th largest of x [n]; `room` has place for 2 n floats.
static float kth_of(const float *x, int64_t n, int64_t k, float *room) {
    float bound = bound_of_kth(x, n, k, room);
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i)
        if (x[i] >= bound) room[count++] = x[i];
    return kth_largest(room, count, k);
}

// Sum of the weights of at least `least`, of one part.
static float part_sum(const float *x, int64_t n, float least) {
    vf sum = vf_zero(), low = vf_set(least);
    int64_t i = 0;
    for (; i + VF <= n; i += VF) {
        vf v = vf_load(x + i);
        sum = vf_add(sum, vf_of(vi_of(v) & ~vi_less(v, low)));
    }
    float rest = 0.0f;
    for (; i < n; ++i)
        if (x[i] >= least) rest += x[i];
    return vf_sum(sum) + rest;
}

static double sum_of(const float *x, int64_t n, float least) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i += PART) sum += static_cast<double>(part_sum(x + i, smaller(PART, n - i), least));
    return sum;
}

// The smallest weight in the smallest set of largest ones whose sum reaches `share` of all.
static float nucleus(const float *x, int64_t n, double share, float *room) {
    double sums[CLASSES] = {};
    double all = 0.0;
    for (int64_t i = 0; i < n; ++i) {
        int32_t bits;
        memcpy(&bits, x + i, 4);
        sums[bits >> 19] += static_cast<double>(x[i]);
    }
    for (int64_t c = 0; c < CLASSES; ++c) all += sums[c];
    double wanted = share * all, before = 0.0;
    float smallest = 1.0f;
    for (int64_t c = CLASSES - 1; c >= 0 && before < wanted; --c) {
        if (sums[c] == 0.0) continue;
        int64_t count = 0;
        float least = float_of(static_cast<int32_t>(c << 19));
        if (before + sums[c] < wanted) {  // the whole class
            before += sums[c];
            smallest = least;
            continue;
        }
        for (int64_t i = 0; i < n; ++i) {
            int32_t bits;
            memcpy(&bits, x + i, 4);
            if (bits >> 19 == c) room[count++] = x[i];
        }
        sort_descending(room, count);
        for (int64_t i = 0; i < count && before < wanted; ++i) {
            smallest = room[i];
            before += static_cast<double>(room[i]);
        }
    }
    return smallest;
}

// The first token at which the cumulative weight exceeds u times its sum. `most` is the row's largest logit.
static int64_t draw(const float *logits, int64_t n, float most, const int32_t *params, bool filter, double u, float *x) {
    float *room = x + n, temperature = float_of(params[A_TEMPERATURE]), lowest = -INFINITY;
    int64_t i = 0;
    for (; i + VF <= n; i += VF) vf_store(x + i, vf_div(vf_load(logits + i), vf_set(temperature)));
    for (; i < n; ++i) x[i] = logits[i] / temperature;
    const float top = most / temperature;
    if (filter && params[A_TOP_K] > 0 && params[A_TOP_K] < n) lowest = kth_of(x, n, params[A_TOP_K], room);
    const vf low = vf_set(lowest), shift = vf_set(top);
    for (i = 0; i < n; i += VF) {
        vf v = i + VF <= n ? vf_load(x + i) : vf_load_part(x + i, n - i, -INFINITY);
        vf weight = vf_of(vi_of(vf_exp(vf_sub(v, shift))) & ~vi_less(v, low));
        i + VF <= n ? vf_store(x + i, weight) : vf_store_part(x + i, weight, n - i);
    }
    float least = 0.0f;
    if (filter) {
        least = float_of(params[A_MIN_P]);
        const float top_p = float_of(params[A_TOP_P]);
        if (top_p < 1.0f) {
            float smallest = nucleus(x, n, static_cast<double>(top_p), room);
            least = smallest > least ? smallest : least;
        }
    }
    const double wanted = u * sum_of(x, n, least);
    double before = 0.0;
    int64_t last = 0;  // the last token with a weight in a part that rounding brought up to what is wanted
    for (int64_t begin = 0; begin < n; begin += PART) {
        const int64_t end = smaller(n, begin + PART);
        const double sum = static_cast<double>(part_sum(x + begin, end - begin, least));
        if (before + sum > wanted) {
            double here = before;
            for (int64_t t = begin; t < end; ++t) {
                if (!(x[t] >= least) || x[t] == 0.0f) continue;
                last = t;
                here += static_cast<double>(x[t]);
                if (here > wanted) return t;
            }
            return last;
        }
        before += sum;
    }
    return last;
}

int32_t sample(const vllm_tail_args *a) {
    const vllm_state *s = a->state;
    if (a->vocab < 1 || a->rows < 0) return VLLM_INVALID;
    for (int64_t row = 0; row < a->rows; ++row)
        if (!within(a->slots[row], s->num_slots + 1)) return VLLM_INVALID;
    parallel_ranges(a->rows, larger(1, 131072 / a->vocab), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const float *logits = a->logits + row * a->vocab;
            float most;
            int64_t token = first_largest(logits, a->vocab, &most);
            const bool finite = most - most == 0.0f;
            const int32_t *params = s->params + a->slots[row] * ADMIT_WORDS;
            if ((a->features & F_RANDOM) && finite && float_of(params[A_TEMPERATURE]) > 0.0f) {
                float *room = static_cast<float *>(scratch(2, static_cast<size_t>(3 * a->vocab) * 4));
                uint32_t word = philox(static_cast<uint32_t>(params[A_SEED_LOW]), static_cast<uint32_t>(params[A_SEED_HIGH]),
                                       static_cast<uint32_t>(a->lengths[row]));
                bool filter = (a->features & F_FILTER) && (params[A_FEATURES] & F_FILTER);
                token = draw(logits, a->vocab, most, params, filter, word * 0x1p-32, room);
            }
            a->tokens[row] = static_cast<int32_t>(token);
            a->nonfinite[row] = !finite;
        }
    });
    return VLLM_OK;
}

VLLM_VARIANT_END
