// Products of many rows whose inputs are bfloat16, by the tiles of AMX: 32 rows of x and 32 of the weight at a time, tiles of 16
// rows and 32 numbers of K. Weights are bfloat16, or of a packed format and rounded to it while their tiles are made, as a model in
// bfloat16 has them.
//
// One factor of a product of tiles is as it lies in memory, the other has pairs of K in its rows and is made by turning a tile: a
// transposition. Of few rows x is turned, and the products afterwards, so that weights are unpacked and multiplied at once; for
// many rows the weights of a task are turned, once, and all rows of x pass over them while they are in the second cache.
#include "int8.h"

#include "linear.h"
#include "panels.h"
#include "processor.h"
#include "threads.h"
#include "tiles.h"
#include "vmath.h"

VLLM_VARIANT_BEGIN

#if defined(VLLM_AVX512) && defined(VLLM_AMX)

namespace {

constexpr int64_t SIDE = TILE_SIDE, NUMBERS = SIDE * 32, AREA = SIDE * SIDE;  // of a tile of factors, of one of sums
constexpr int64_t AHEAD = 2048;  // bytes, as in int8.cpp
constexpr int64_t CACHED = 512 * 1024;  // bytes of unpacked weights that stay in the second cache beside rows of x

void turn_all(uint16_t *tiles, int64_t count) {
    for (int64_t i = 0; i < count; ++i) turn_tile(reinterpret_cast<float *>(tiles + i * NUMBERS));
}

// --- weights: tiles [kp / 32, 16, 32] of up to sixteen rows; the last row stands for those that are not there ------------

void unpack_plain(const vllm_matrix &w, int64_t n, int64_t count, int64_t kp, uint16_t *tiles) {
    for (int64_t r = 0; r < SIDE; ++r) {
        const uint16_t *row = reinterpret_cast<const uint16_t *>(row_of(w, n + (r < count ? r : count - 1)).data);
        uint16_t *to = tiles + r * 32;
        int64_t k = 0;
        for (; k + 32 <= w.k; k += 32, to += NUMBERS) _mm512_storeu_si512(to, _mm512_loadu_si512(row + k));
        if (k == kp) continue;
        memset(to, 0, 64);
        memcpy(to, row + k, static_cast<size_t>(w.k - k) * 2);
    }
}

// A block of 32: numbers of few bits are looked up among the values that the block has.
template <class Format>
VLLM_TARGET("avx512bf16") VLLM_INLINE __m512i rounded(__m256i bytes, __m256 scale, float offset) {
    const __m512 whole = _mm512_set1_ps(offset), first = _mm512_set1_ps(_mm256_cvtss_f32(scale));
    if constexpr (Format::BITS <= 5) {
        const __m512 counts = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512 low = _mm512_fmadd_ps(counts, first, whole);
        const __m512 high = Format::BITS == 5 ? _mm512_fmadd_ps(_mm512_add_ps(counts, _mm512_set1_ps(16)), first, whole) : low;
        return _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(bytes), reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
    } else {
        const __m512 second = Format::BITS == 6 ? _mm512_set1_ps(_mm_cvtss_f32(_mm256_extractf128_ps(scale, 1))) : first;
        const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
        const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
        return reinterpret_cast<__m512i>(
            _mm512_cvtne2ps_pbh(_mm512_fmadd_ps(high, second, whole), _mm512_fmadd_ps(low, first, whole)));
    }
}

// COUNT blocks of a format whose heads are converted together.
template <class Format, int COUNT>
VLLM_TARGET("avx512bf16") VLLM_INLINE void unpack_blocks(const uint8_t *p, uint16_t *to) {
    alignas(32) float facts[8];
    _mm256_store_ps(facts, _mm256_cvtph_ps(Format::template heads<COUNT>(p)));
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; ++i) {
        const float offset = Format::MIN ? facts[2 * i + 1] : facts[2 * i] * Format::OFFSET;
        const __m512i numbers = rounded<Format>(Format::numbers(p + i * Format::BYTES), _mm256_broadcast_ss(facts + 2 * i), offset);
        _mm512_storeu_si512(to + i * NUMBERS, numbers);
    }
}

template <class Format>
VLLM_TARGET("avx512bf16") void unpack_packed(const vllm_matrix &w, int64_t n, int64_t count, uint16_t *tiles) {
    constexpr int BLOCKS = Format::BLOCKS;
    for (int64_t r = 0; r < SIDE; ++r) {
        const Row row = row_of(w, n + (r < count ? r : count - 1));
        uint16_t *to = tiles + r * 32;
        if constexpr (Format::HEADS) {
            const uint8_t *p = row.data;
            int64_t left = w.k / 32;
            for (; left >= 4; left -= 4, p += 4 * Format::BYTES, to += 4 * NUMBERS) {
                // Also what lies behind this row: the next one.
                for (int at = 0; at < 4 * Format::BYTES; at += 64) __builtin_prefetch(p + AHEAD + at);
                unpack_blocks<Format, 4>(p, to);
            }
            if (left >= 2) {
                unpack_blocks<Format, 2>(p, to);
                left -= 2, p += 2 * Format::BYTES, to += 2 * NUMBERS;
            }
            if (left) unpack_blocks<Format, 1>(p, to);
            continue;
        }
        for (int64_t c = 0; c < w.k / (32 * BLOCKS); ++c) {
            __m256i bytes[BLOCKS];
            __m256 scales[BLOCKS];
            float offsets[BLOCKS];
            Format::decode(row, c, [&](int i, __m256i numbers, __m256 scale, float offset) __attribute__((always_inline)) {
                bytes[i] = numbers, scales[i] = scale, offsets[i] = offset;
            });
            for (int i = 0; i < BLOCKS; ++i, to += NUMBERS)
                _mm512_storeu_si512(to, rounded<Format>(bytes[i], scales[i], offsets[i]));
        }
    }
}

void unpack(const vllm_matrix &w, int64_t n, int64_t count, int64_t kp, uint16_t *tiles) {
    if (w.format == VLLM_ROWS_BFLOAT16) return unpack_plain(w, n, count, kp, tiles);
    with_format8(w.format, [&](auto format) { unpack_packed<decltype(format)>(w, n, count, tiles); });
}

// --- products ------------------------------------------------------------------------------------------------------------

// A tile of weights is wanted once a block of x: loaded as a stream it leaves x in the first cache.
#define VLLM_LOAD(TILE, from, stride, WEIGHT)   \
    if (WEIGHT) {                               \
        _tile_stream_loadd(TILE, from, stride); \
    } else {                                    \
        _tile_loadd(TILE, from, stride);        \
    }

// What is asked for while products are made, `step` numbers with each tile.
struct Next {
    const uint16_t *from;
    int64_t step;
};

// Twice sixteen rows of a product's left factor, each row `stride` bytes after the one before.
struct Left {
    const uint16_t *first, *second;
    int64_t stride;
};

// out [2, 2, 16, 16] = LEFT times 16 rows with RIGHT times 16 of the other factor, each of whose sixteens has kp / 32 tiles; FEW:
// the weights are on the left, in tiles, else x as it is. A tile that is loaded takes part in two products.
template <int LEFT, int RIGHT, bool FEW>
VLLM_TARGET("amx-tile,amx-bf16") void multiply(Left left, const uint16_t *right, int64_t kp, float *out, Next next) {
    constexpr int64_t ALONG = FEW ? NUMBERS : 32;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const uint16_t *right2 = right + kp * SIDE;
    for (int64_t i = 0; i < kp * SIDE; i += NUMBERS, left.first += ALONG, left.second += ALONG) {
        for (int64_t at = 0; at < next.step; at += 32) __builtin_prefetch(next.from + at, 0, 2);
        next.from += next.step;
        VLLM_LOAD(4, left.first, left.stride, FEW)
        VLLM_LOAD(6, right + i, 64, !FEW)
        _tile_dpbf16ps(0, 4, 6);
        if (RIGHT > 1) {
            VLLM_LOAD(7, right2 + i, 64, !FEW)
            _tile_dpbf16ps(1, 4, 7);
        }
        if (LEFT > 1) {
            VLLM_LOAD(5, left.second, left.stride, FEW)
            _tile_dpbf16ps(2, 5, 6);
            if (RIGHT > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, out, SIDE * 4);
    if (RIGHT > 1) _tile_stored(1, out + AREA, SIDE * 4);
    if (LEFT > 1) _tile_stored(2, out + 2 * AREA, SIDE * 4);
    if (LEFT > 1 && RIGHT > 1) _tile_stored(3, out + 3 * AREA, SIDE * 4);
}

#undef VLLM_LOAD

template <bool FEW>
void multiply(int64_t lefts, int64_t rights, Left left, const uint16_t *right, int64_t kp, float *out, Next next) {
    if (lefts > 1)
        return rights > 1 ? multiply<2, 2, FEW>(left, right, kp, out, next) : multiply<2, 1, FEW>(left, right, kp, out, next);
    rights > 1 ? multiply<1, 2, FEW>(left, right, kp, out, next) : multiply<1, 1, FEW>(left, right, kp, out, next);
}

VLLM_TARGET("amx-tile") void begin_tiles() {
    const TileConfig config(64);
    _tile_loadconfig(config.written());
}

VLLM_TARGET("amx-tile") void end_tiles() { _tile_release(); }

// finish_block16 for both halves of 32 columns of bfloat16.
VLLM_TARGET("avx512bf16") void finish_pair(const Output &output, int64_t row, int64_t rows, int64_t column, const float *low,
                                           const float *high) {
    uint16_t *to = reinterpret_cast<uint16_t *>(output.data) + row * output.stride + column;
    for (int64_t m = 0; m < rows; ++m, to += output.stride) {
        __m512 a = _mm512_loadu_ps(low + m * SIDE), b = _mm512_loadu_ps(high + m * SIDE);
        if (output.add) a = _mm512_add_ps(a, vf_load_bf16(to)), b = _mm512_add_ps(b, vf_load_bf16(to + SIDE));
        _mm512_storeu_si512(to, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)));
    }
}

// silu(gate) * up to sixteen columns of bfloat16.
VLLM_TARGET("avx512bf16") void finish_silu(const Output &output, int64_t row, int64_t rows, int64_t column, const float *gate,
                                           const float *up) {
    uint16_t *to = reinterpret_cast<uint16_t *>(output.data) + row * output.stride + column;
    for (int64_t m = 0; m < rows; ++m, to += output.stride) {
        const __m512 g = _mm512_loadu_ps(gate + m * SIDE), u = _mm512_loadu_ps(up + m * SIDE);
        // The second operand passes where one is NaN.
        const __m512 x = _mm512_min_ps(_mm512_set1_ps(126.0f), _mm512_mul_ps(g, _mm512_set1_ps(-1.44269504088896341f)));
        const __m512 divisor = _mm512_add_ps(_mm512_set1_ps(1.0f), vf_power_of_two(x)), near = _mm512_rcp14_ps(divisor);
        const __m512 factor = _mm512_mul_ps(near, _mm512_fnmadd_ps(divisor, near, _mm512_set1_ps(2.0f)));
        const __m512 product = _mm512_mul_ps(_mm512_mul_ps(g, factor), u);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(product)));
    }
}

// A pair of sixteens of columns: neighbouring ones, or a gate and what it gates.
struct Pair {
    const Columns &one;
    int64_t sixteens() const { return one.gated || one.count > SIDE ? 2 : 1; }
    int64_t columns(int64_t i) const { return one.count - i * SIDE < SIDE ? one.count - i * SIDE : SIDE; }
    void unpack_to(uint16_t *tiles, int64_t kp, bool turned) const {
        unpack(*one.w, one.n, one.gated ? one.count : columns(0), kp, tiles);
        if (one.gated)
            unpack(*one.gated, one.gated_n, one.count, kp, tiles + kp * SIDE);
        else if (sixteens() > 1)
            unpack(*one.w, one.n + SIDE, columns(1), kp, tiles + kp * SIDE);
        if (turned) turn_all(tiles, sixteens() * kp / 32);
    }
    // Up to 32 rows of x from m0 on: products [2, 2, 16, 16], rows of x first where they are many.
    void multiply_rows(const Inputs16 &in, int64_t m0, const uint16_t *tiles, float *products, Next next) const {
        const int64_t groups = m0 + SIDE < in.rows ? 2 : 1;
        if (turns_x16(in.rows)) {
            const Left weights{tiles, tiles + in.kp * SIDE, 64};
            multiply<true>(sixteens(), groups, weights, in.x + m0 * in.kp, in.kp, products, next);
        } else {
            const Left x{in.sixteen(m0), groups > 1 ? in.sixteen(m0 + SIDE) : nullptr, in.stride * 2};
            multiply<false>(groups, sixteens(), x, tiles, in.kp, products, next);
        }
    }
    void finish_rows(const Inputs16 &in, int64_t m0, float *products, const Output &output) const {
        const bool few = turns_x16(in.rows);
        for (int64_t g = 0; g < 2 && m0 + g * SIDE < in.rows; ++g) {
            float *parts[2];
            for (int64_t i = 0; i < sixteens(); ++i) {
                parts[i] = products + (few ? 2 * i + g : 2 * g + i) * AREA;
                if (few) turn_tile(parts[i]);
            }
            const int64_t first = m0 + g * SIDE, count = in.rows - first < SIDE ? in.rows - first : SIDE;
            if (one.gated && one.activation == VLLM_SILU && !one.bias && one.count == SIDE && output.dtype == VLLM_BFLOAT16) {
                finish_silu(output, first, count, one.column, parts[0], parts[1]);
                continue;
            }
            if (one.gated) gate_panel(one, parts[0], parts[1], SIDE);
            if (!one.gated && one.count == 2 * SIDE && output.dtype == VLLM_BFLOAT16 && !output.bias) {
                finish_pair(output, first, count, one.column, parts[0], parts[1]);
                continue;
            }
            for (int64_t i = 0; i < (one.gated ? 1 : sixteens()); ++i)
                finish_block16(output, first, count, one.column + i * SIDE, parts[i], columns(i));
        }
    }
};

}  // namespace

bool takes_tiles16() { return cpu_has_amx() && cpu_has_avx512bf16(); }

void turn_tiles16(uint16_t *tiles, int64_t count) { turn_all(tiles, count); }

int64_t pairs_together16(int64_t kp) { return CACHED > 4 * SIDE * kp ? CACHED / (4 * SIDE * kp) : 1; }

bool multiply_tiles16(const Columns *list, int64_t count, const Inputs16 &in, const Output &output) {
    const int64_t size = 2 * SIDE * in.kp, together = in.rows > 2 * SIDE ? pairs_together16(in.kp) : 1;
    uint16_t *tiles = static_cast<uint16_t *>(scratch(2, static_cast<size_t>(size * 2 * (together < count ? together : count))));
    if (!tiles) return false;
    // Products are finished when the next ones are under way: what a tile has stored cannot be read for some time.
    alignas(64) float products[2][4 * AREA];
    const Columns *last = nullptr;
    int64_t last_m0 = 0, turn = 0;
    begin_tiles();
    for (int64_t first = 0; first < count; first += together) {
        const int64_t end = first + together < count ? first + together : count;
        for (int64_t i = first; i < end; ++i) Pair{list[i]}.unpack_to(tiles + (i - first) * size, in.kp, !turns_x16(in.rows));
        // Each of them asks for its share of the next rows of x, which may be further away than the second cache, bit by bit: more
        // than a few lines at once would have to wait for each other.
        const int64_t step = (2 * SIDE + end - first - 1) / (end - first) * 32, share = in.kp / 32 * step;
        for (int64_t m0 = 0; m0 < in.rows; m0 += 2 * SIDE) {
            const bool asks = m0 + 2 * SIDE < in.rows && in.stride == in.kp;
            const uint16_t *ahead = in.x + m0 * in.kp + size;
            for (int64_t i = first; i < end; ++i, turn = 1 - turn) {
                const Next next{ahead + (i - first) * share, asks && (i - first) * share < size ? step : 0};
                Pair{list[i]}.multiply_rows(in, m0, tiles + (i - first) * size, products[turn], next);
                if (last) Pair{*last}.finish_rows(in, last_m0, products[1 - turn], output);
                last = list + i, last_m0 = m0;
            }
        }
    }
    if (last) Pair{*last}.finish_rows(in, last_m0, products[1 - turn], output);
    end_tiles();
    return true;
}

#else

bool takes_tiles16() { return false; }
void turn_tiles16(uint16_t *, int64_t) {}
int64_t pairs_together16(int64_t) { return 1; }
bool multiply_tiles16(const Columns *, int64_t, const Inputs16 &, const Output &) { return false; }

#endif

VLLM_VARIANT_END
