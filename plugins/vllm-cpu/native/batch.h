// Layout of the batch state and of the packed difference: vllm_core.api.batch, by the same names.
#ifndef VLLM_CPU_BATCH_H
#define VLLM_CPU_BATCH_H

#include "simd.h"

VLLM_VARIANT_BEGIN

enum { HEADER_WORDS = 16, H_ADMITTED = 1, H_TOKENS = 2, H_BLOCKS = 3, H_EXTRA = 4, H_SCHEDULED = 5, H_NUM_TOKENS = 6, H_NUM_SAMPLED = 7 };

enum {
    ADMIT_WORDS = 24,
    A_SLOT = 0,
    A_NUM_KNOWN = 1,
    A_NUM_COMPUTED = 2,
    A_PROMPT_LEN = 3,
    A_MIN_LEN = 4,
    A_TOP_K = 5,
    A_NUM_STOP = 6,
    A_NUM_BIAS = 7,
    A_NUM_BAD = 8,
    A_SEED_LOW = 9,
    A_SEED_HIGH = 10,
    A_FEATURES = 11,
    A_TEMPERATURE = 12,
    A_TOP_P = 13,
    A_MIN_P = 14,
    A_REPETITION = 15,
    A_PRESENCE = 16,
    A_FREQUENCY = 17
};

enum { F_RANDOM = 1, F_FILTER = 2, F_PENALTIES = 4, F_BIAS = 8, F_MIN_LEN = 16, F_BAD_WORDS = 32 };
enum { E_BIAS = 0, E_STOP = 1, E_BAD_WORD = 2 };

static inline float float_of(int32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline bool within(int64_t value, int64_t limit) { return value >= 0 && value < limit; }

VLLM_VARIANT_END

#endif
