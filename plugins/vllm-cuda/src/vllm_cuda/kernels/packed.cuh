// Packed weights as `vllm_cuda.packed` lays them out, and their codes as numbers. Comes after `ampere.cuh`.
//
// A record is 16 rows x 128 inputs: codes, and SETS sets of scales, each for 128 / SETS inputs. A lane of a warp has rows g
// and g + 8, with g = lane / 4, and of every unit of 32 inputs the eight from 8 * (lane % 4) on. That is what it holds of the
// operand A of two m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"), if x has its inputs in the same order: which
// input goes by which name does not matter to a sum.
//
// Defined at compilation: FORMAT, SETS (0: one scale a row, which goes to the whole sum), SCALE (what a scale is), ZEROS
// (zeros are stored behind the scales; else all are 8), HALF (numbers are float16, not bfloat16).

constexpr int E4M3 = 1, INT8 = 3, INT4 = 4;
constexpr int FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2;
constexpr int DEPTH = 128, UNITS = 4;
constexpr int CODE_BYTES = FORMAT == INT4 ? 1024 : 2048;
constexpr int ITEM_BYTES = SCALE == FLOAT32 ? 4 : 2;
constexpr int ZERO_BYTES = ZEROS ? SETS * 16 : 0;
constexpr int SCALE_BYTES = SETS * 16 * ITEM_BYTES + ZERO_BYTES;
constexpr int STEP = SETS ? UNITS / SETS : UNITS;  // units that share a scale

// An integer of up to 7 bits, put into the last bits of this number, is added to it: of 128 in bfloat16, of 1024 in float16.
constexpr u32 BASE = HALF ? 0x64006400 : 0x43004300, MINUS_BASE = BASE | 0x80008000;
constexpr u32 ONE = HALF ? 0x3C003C00 : 0x3F803F80, MINUS_NOTHING = 0x80008000;

// Eight codes of four bits, less a zero: bits 4 i of the lower half hold code 2 i, those of the upper half code 2 i + 1.
// `minus` is twice -(base + zero).
__device__ __forceinline__ void widen4(u32 (&pairs)[4], u32 word, u32 minus) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = fused(put_into(BASE, word >> 4 * i, 0x000F000F), ONE, minus);
}

// Four codes of eight bits: bytes 0 and 2 are the first pair, 1 and 3 the second. The upper bit stands for -128: taken for
// itself, it adds 128 to the base, in either type.
__device__ __forceinline__ void widen8(u32* pairs, u32 word) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        u32 pair = word >> 8 * i;
        pairs[i] = fused(put_into(BASE, pair, 0x007F007F), ONE, put_into(MINUS_BASE, pair, 0x00800080));
    }
}

// Four codes of e4m3. The first pair lies in each half as a bfloat16 whose exponent is short by 120: sign in bit 15, the rest
// in 10..4. The second has its sign in bit 11, and the rest in 14..12 and 3..0.
__device__ __forceinline__ void widen_fp8(u32* pairs, u32 word) {
    u32 first, second;
    if (HALF) {
        first = put_into(word & 0x80008000, word << 3, 0x3F803F80);
        second = put_into(put_into(word << 4 & 0x80008000, word >> 1, 0x38003800), word << 7, 0x07800780);
    } else {
        first = word & 0x87F087F0;
        second = put_into(word << 4 & 0x80F080F0, word >> 4, 0x07000700);
    }
    const u32 power = HALF ? 0x5C005C00 : 0x7B807B80;  // 2^8: float16 has 8 more in its bias; 2^120
    pairs[0] = fused(first, power, MINUS_NOTHING);
    pairs[1] = fused(second, power, MINUS_NOTHING);
}

// Codes of one lane: of two units in four bits, of one in eight.
struct alignas(16) Codes {
    u32 word[4];
};

// Pairs of a row's eight inputs in a unit; `low` for row g, else g + 8.
__device__ __forceinline__ void widen(u32 (&pairs)[4], const Codes& codes, int unit, bool low, u32 minus) {
    if (FORMAT == INT4) {
        widen4(pairs, codes.word[unit % 2 * 2 + !low], minus);
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 word = codes.word[!low * 2 + i];
            if (FORMAT == INT8) widen8(pairs + 2 * i, word);
            if (FORMAT == E4M3) widen_fp8(pairs + 2 * i, word);
        }
    }
}

// Scales and zeros of rows g and g + 8.
struct Scales {
    float low, high;
    u32 minus_low, minus_high;
};

// Of a set, from the place of a record's scales.
__device__ __forceinline__ Scales scales_of(const u8* record, int set, int g) {
    Scales result = {1, 1, MINUS_BASE | 0x00080008, MINUS_BASE | 0x00080008};
    if (SETS) {
        const int place = set * 8 + g;
        if (SCALE == FLOAT32) {
            float2 both = ((const float2*)record)[place];
            result.low = both.x, result.high = both.y;
        } else {
            u32 both = ((const u32*)record)[place];
            if (SCALE == BFLOAT16) {
                result.low = widened(both), result.high = widened(both >> 16);
            } else {
                result.low = widened_half(both), result.high = widened_half(both >> 16);
            }
        }
        if (ZEROS) {
            u32 both = ((const u16*)(record + SETS * 16 * ITEM_BYTES))[place];
            result.minus_low = MINUS_BASE | (both & 0xFF) * 0x00010001;
            result.minus_high = MINUS_BASE | (both >> 8) * 0x00010001;
        }
    }
    return result;
}
