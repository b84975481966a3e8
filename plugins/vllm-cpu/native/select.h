// The largest of many floats: one, the k-th, the first k.
#ifndef VLLM_CPU_SELECT_H
#define VLLM_CPU_SELECT_H

#include "vmath.h"

VLLM_VARIANT_BEGIN

constexpr int64_t BLOCK = 4096;
constexpr int64_t BUNCH = 64;  // floats whose largest bounds the k-th from below

// Largest of n, and whether there is a NaN among them (then it is not the largest).
static inline float largest(const float *x, int64_t n, bool *bad) {
    vf top[4], low = vf_set(-INFINITY);
    vi wrong = vi_set(0);
    for (int j = 0; j < 4; ++j) top[j] = low;
    int64_t i = 0;
    for (; i + 4 * VF <= n; i += 4 * VF)
        for (int j = 0; j < 4; ++j) {
            vf v = vf_load(x + i + j * VF);
            wrong |= reinterpret_cast<vi>(v != v);
            top[j] = vf_max(v, top[j]);  // the second passes where one is NaN
        }
    float best = vf_top(vf_max(vf_max(top[0], top[1]), vf_max(top[2], top[3])));
    bool nan = false;
    for (; i < n; ++i) {
        nan |= x[i] != x[i];
        best = x[i] > best ? x[i] : best;
    }
    for (int j = 0; j < VF; ++j) nan |= wrong[j] != 0;
    *bad |= nan;
    return best;
}

// Index of the first NaN, else of the first of the largest; what is there goes to `value`.
static inline int64_t first_largest(const float *x, int64_t n, float *value) {
    float best = -INFINITY;
    int64_t block = 0;
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
        bool bad = false;
        float here = largest(x + begin, smaller(BLOCK, n - begin), &bad);
        if (bad) {
            int64_t at = begin;
            while (x[at] == x[at]) ++at;
            *value = x[at];
            return at;
        }
        if (here > best) {
            best = here;
            block = begin;
        }
    }
    *value = best;
    while (x[block] != best) ++block;
    return block;
}

static inline void exchange(float *a, float *b) {
    float c = *a;
    *a = *b;
    *b = c;
}

// Order x so that larger than `pivot` comes first, then equal, then smaller; the bounds of the equal ones.
static inline void split_at(float *x, int64_t n, float pivot, int64_t *begin, int64_t *end) {
    int64_t low = 0, at = 0, high = n;
    while (at < high) {
        if (x[at] > pivot) {
            exchange(x + low++, x + at++);
        } else if (x[at] < pivot) {
            exchange(x + at, x + --high);
        } else {
            ++at;
        }
    }
    *begin = low;
    *end = high;
}

static inline float middle_of(const float *x, int64_t n) {
    float a = x[0], b = x[n / 2], c = x[n - 1];
    return a > b ? (b > c ? b : (a > c ? c : a)) : (a > c ? a : (b > c ? c : b));
}

// The k-th largest, k from 1; x is reordered and holds no NaN.
static inline float kth_largest(float *x, int64_t n, int64_t k) {
    for (;;) {
        if (n == 1) return x[0];
        int64_t begin, end;
        float pivot = middle_of(x, n);
        split_at(x, n, pivot, &begin, &end);
        if (k <= begin) {
            n = begin;
        } else if (k <= end) {
            return pivot;
        } else {
            x += end;
            n -= end;
            k -= end;
        }
    }
}

// Descending; the shorter side goes by recursion, so that the stack stays small.
static inline void sort_descending(float *x, int64_t n) {
    while (n > 1) {
        int64_t begin, end;
        split_at(x, n, middle_of(x, n), &begin, &end);
        if (begin < n - end) {
            sort_descending(x, begin);
            x += end;
            n -= end;
        } else {
            sort_descending(x + end, n - end);
            n = begin;
        }
    }
}

// A lower bound of the k-th largest of x [n], from the largest of each bunch; `room` has place for n / BUNCH + 1 floats.
// Not below the k-th largest by much: few more than k are at least as large.
static inline float bound_of_kth(const float *x, int64_t n, int64_t k, float *room) {
    int64_t count = 0;
    for (int64_t begin = 0; begin < n; begin += BUNCH) {
        bool bad = false;
        room[count++] = largest(x + begin, smaller(BUNCH, n - begin), &bad);
    }
    return k <= count ? kth_largest(room, count, k) : -INFINITY;
}

VLLM_VARIANT_END

#endif
