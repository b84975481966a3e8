// Integer products of many rows: sixteen rows of the weight are unpacked into the first cache, transposed so that each lane
// is a column of the product, then all rows of x pass over them.
//
// AVX2 has no product of bytes that adds into 32 bits, only pairs into 16 (maddubs), which saturate: weights of four bits are
// summed there over a whole block, those of five and six over as many steps as cannot overflow, and those of eight are
// widened and take the product of 16 bits, at half the rate. With VNNI all formats are bytes that are never negative. The tiles
// of AMX multiply signed bytes, sixteen rows of x at a time.
#include "int8.h"

#include "linear.h"
#include "processor.h"
#include "threads.h"
#include "tiles.h"
#include "vmath.h"

VLLM_VARIANT_BEGIN

#ifdef __AVX2__

namespace {

constexpr int COLUMNS = PANEL_COLUMNS;

// How a format lies in a panel. SPLIT: scales of a block. WIDE: numbers of 16 bits. GROUP: steps of four numbers of K whose
// sums of pairs stay within 16 bits.
template <class Format>
struct Form {
    static constexpr int SPLIT = Format::BITS == 6 ? 2 : 1;
#ifdef VLLM_VNNI
    static constexpr bool WIDE = false;
    static constexpr int GROUP = 8, ROWS = 8;
    static constexpr int LIFT = Format::SIGNED ? (Format::BITS == 6 ? 32 : 128) : 0;  // what makes a number not negative
#else
    static constexpr bool WIDE = Format::BITS == 8;
    static constexpr int GROUP = Format::BITS == 4 ? 8 : Format::BITS == 5 ? 4 : 2;
    static constexpr int ROWS = WIDE || GROUP == 8 ? 4 : 2;  // what the registers hold
    static constexpr int LIFT = Format::BITS == 6 ? 32 : 0;
#endif
    static constexpr bool OFFSET = !Format::SIGNED || LIFT;
    static constexpr int64_t BYTES = COLUMNS * (WIDE ? 64 : 32);  // of a block of 32 numbers of K
};

// The offset that a format's scale is multiplied with, where its numbers have a constant one.
template <class Format>
constexpr int constant_offset() {
    if constexpr (Format::HEADS) {
        return Format::MIN ? 0 : static_cast<int>(Format::OFFSET);
    } else {
        return 0;
    }
}

// The same for tiles of AMX: numbers are signed, so that a constant offset is in them.
template <class Format>
struct Tiled {
    static constexpr int SPLIT = Form<Format>::SPLIT, ROWS = TILE_ROWS8, LIFT = constant_offset<Format>();
    static constexpr bool WIDE = false, OFFSET = !Format::SIGNED && !LIFT;
    static constexpr int64_t BYTES = COLUMNS * 32;
};

// bytes [blocks, steps, columns, 4 or 2 numbers]; scale, offset [blocks * SPLIT, columns].
struct Panel {
    uint8_t *bytes;
    float *scale;
    float *offset;
};

// Eight rows of one block, as bytes in the order of K, to eight of the panel's columns.
template <class F>
VLLM_INLINE void place(const __m256i *rows, uint8_t *to) {
    __m256i part[8];
    if constexpr (F::WIDE) {
        for (int half = 0; half < 2; ++half) {
            for (int r = 0; r < 8; ++r)
                part[r] = _mm256_cvtepi8_epi16(half ? _mm256_extracti128_si256(rows[r], 1) : _mm256_castsi256_si128(rows[r]));
            transpose8(part);
            for (int s = 0; s < 8; ++s)
                _mm256_store_si256(reinterpret_cast<__m256i *>(to + (8 * half + s) * COLUMNS * 4), part[s]);
        }
    } else {
        const __m256i lift = _mm256_set1_epi8(static_cast<char>(F::LIFT));
        for (int r = 0; r < 8; ++r) part[r] = F::LIFT ? _mm256_add_epi8(rows[r], lift) : rows[r];
        transpose8(part);
        for (int s = 0; s < 8; ++s) _mm256_store_si256(reinterpret_cast<__m256i *>(to + s * COLUMNS * 4), part[s]);
    }
}

// Halves in the low words of eight dwords.
VLLM_INLINE __m256 low_halves(__m256i words) {
    words = _mm256_and_si256(words, _mm256_set1_epi32(0xffff));
    return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

// Scales and offsets of eight rows' blocks that begin at p[r] + at, from the halves there.
template <class Format, class F>
VLLM_INLINE void place_heads(const uint8_t *const *p, int64_t at, float *scales, float *offsets) {
    int32_t heads[8];
    for (int r = 0; r < 8; ++r) memcpy(heads + r, p[r] + at, 4);
    const __m256i words = _mm256_setr_epi32(heads[0], heads[1], heads[2], heads[3], heads[4], heads[5], heads[6], heads[7]);
    const __m256 scale = low_halves(words);
    _mm256_store_ps(scales, scale);
    if constexpr (F::OFFSET) {
        __m256 offset = _mm256_mul_ps(scale, _mm256_set1_ps(Format::OFFSET - static_cast<float>(F::LIFT)));
        if constexpr (Format::MIN) offset = low_halves(_mm256_srli_epi32(words, 16));
        _mm256_store_ps(offsets, offset);
    }
}

// Rows n .. n + count - 1 of the weight; the last one stands for those that are not there.
template <class Format, class F>
void unpack(const vllm_matrix &w, int64_t n, int64_t count, const Panel &panel) {
    constexpr int SPLIT = F::SPLIT, BLOCKS = Format::BLOCKS;
    const int64_t chunks = w.k / (32 * BLOCKS);
    for (int64_t first = 0; first < COLUMNS; first += 8) {
        Row rows[8];
        for (int64_t r = 0; r < 8; ++r) rows[r] = row_of(w, n + (first + r < count ? first + r : count - 1));
        if constexpr (Format::HEADS) {
            const uint8_t *p[8];
            for (int r = 0; r < 8; ++r) p[r] = rows[r].data;
            for (int64_t c = 0; c < chunks; ++c) {
                const int64_t at = c * Format::BYTES;
                __m256i bytes[8];
                for (int r = 0; r < 8; ++r) bytes[r] = Format::numbers(p[r] + at);
                place<F>(bytes, panel.bytes + c * F::BYTES + first * 4);
                place_heads<Format, F>(p, at, panel.scale + c * COLUMNS + first, panel.offset + c * COLUMNS + first);
            }
            continue;
        }
        for (int64_t c = 0; c < chunks; ++c) {
            __m256i bytes[BLOCKS][8];
            for (int64_t r = 0; r < 8; ++r)
                Format::decode(rows[r], c, [&](int i, __m256i numbers, __m256 scale, float offset) __attribute__((always_inline)) {
                    bytes[i][r] = numbers;
                    int64_t at = (c * BLOCKS + i) * SPLIT * COLUMNS + first + r;
                    for (int s = 0; s < SPLIT; ++s) {
                        float own = s ? _mm_cvtss_f32(_mm256_extractf128_ps(scale, 1)) : _mm256_cvtss_f32(scale);
                        panel.scale[at + s * COLUMNS] = own;
                        panel.offset[at + s * COLUMNS] = offset - static_cast<float>(F::LIFT) * own;
                    }
                });
            for (int i = 0; i < BLOCKS; ++i)
                place<F>(bytes[i], panel.bytes + (c * BLOCKS + i) * F::BYTES + first * 4);
        }
    }
}

// Four numbers of K of row m, or two of 16 bits; `x` is at the step's numbers of the group.
VLLM_INLINE int32_t four_at(const uint8_t *x, int m) {
    int32_t bits;
    memcpy(&bits, x + m * 4, 4);
    return bits;
}

// Where the sum of x over a scale's numbers stands in a block's facts.
template <class Format>
constexpr int sum_at(int part) {
    return Form<Format>::SPLIT == 2 ? 8 + 4 * part : 4;
}

#ifdef VLLM_VNNI

// out [ROWS, 16] = products over all blocks; the rows are two groups.
template <class Format>
void multiply(const Group8 *groups, const Panel &panel, int64_t blocks, float *out) {
    constexpr int ROWS = Form<Format>::ROWS, SPLIT = Form<Format>::SPLIT, STEPS = 8 / SPLIT;
    const uint8_t *x[2] = {groups[0].numbers, groups[1].numbers}, *w = panel.bytes;
    const float *facts[2] = {groups[0].facts, groups[1].facts}, *scales = panel.scale, *offsets = panel.offset;
    __m512 sums[ROWS];
    for (int m = 0; m < ROWS; ++m) sums[m] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; ++b) {
        for (int part = 0; part < SPLIT; ++part) {
            __m512i dots[ROWS];
            for (int m = 0; m < ROWS; ++m) dots[m] = _mm512_setzero_si512();
            for (int s = part * STEPS; s < (part + 1) * STEPS; ++s) {
                const __m512i weight = _mm512_loadu_si512(w + s * COLUMNS * 4);
                for (int m = 0; m < ROWS; ++m)
                    dots[m] = _mm512_dpbusd_epi32(dots[m], weight, _mm512_set1_epi32(four_at(x[m / 4] + s * 16, m % 4)));
            }
            const __m512 scale = _mm512_loadu_ps(scales), offset = _mm512_loadu_ps(offsets);
            for (int m = 0; m < ROWS; ++m) {
                const float *own = facts[m / 4] + m % 4;
                __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(own[0]));
                sums[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[m]), both, sums[m]);
                if (Form<Format>::OFFSET) sums[m] = _mm512_fmadd_ps(offset, _mm512_set1_ps(own[sum_at<Format>(part)]), sums[m]);
            }
            scales += COLUMNS, offsets += COLUMNS;
        }
        w += Form<Format>::BYTES;
        for (int g = 0; g < 2; ++g) x[g] += 128, facts[g] += FACTS8;
    }
    for (int m = 0; m < ROWS; ++m) _mm512_storeu_ps(out + m * COLUMNS, sums[m]);
}

#else

// A sum that is to be in its register now: a compiler that knows integer sums to be associative would first make all products
// of a block, and has no registers for them.
VLLM_INLINE void settle(__m256i &sum) { __asm__("" : "+x"(sum)); }

// Sums of products of one scale's numbers in 32 bits.
template <class Format>
VLLM_INLINE void dot_rows(const uint8_t *x, const uint8_t *w, __m256i dots[][2]) {
    constexpr int ROWS = Form<Format>::ROWS, STEPS = 8 / Form<Format>::SPLIT;
    if constexpr (Form<Format>::WIDE) {
        for (int m = 0; m < ROWS; ++m) dots[m][0] = dots[m][1] = _mm256_setzero_si256();
#pragma GCC unroll 16
        for (int s = 0; s < 2 * STEPS; ++s) {
            const __m256i *from = reinterpret_cast<const __m256i *>(w + s * COLUMNS * 4);
            __m256i w0 = _mm256_load_si256(from), w1 = _mm256_load_si256(from + 1);
            for (int m = 0; m < ROWS; ++m) {
                __m256i pair = _mm256_set1_epi32(four_at(x + s * 16, m));
                dots[m][0] = _mm256_add_epi32(dots[m][0], _mm256_madd_epi16(w0, pair));
                dots[m][1] = _mm256_add_epi32(dots[m][1], _mm256_madd_epi16(w1, pair));
                settle(dots[m][0]), settle(dots[m][1]);
            }
        }
    } else {
        constexpr int GROUP = Form<Format>::GROUP;
        const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 4
        for (int first = 0; first < STEPS; first += GROUP) {
            __m256i pairs[ROWS][2];
#pragma GCC unroll 8
            for (int s = first; s < first + GROUP; ++s) {
                const __m256i *from = reinterpret_cast<const __m256i *>(w + s * COLUMNS * 4);
                __m256i w0 = _mm256_load_si256(from), w1 = _mm256_load_si256(from + 1);
                for (int m = 0; m < ROWS; ++m) {
                    __m256i four = _mm256_set1_epi32(four_at(x + s * 16, m));
                    __m256i p0 = _mm256_maddubs_epi16(w0, four), p1 = _mm256_maddubs_epi16(w1, four);
                    pairs[m][0] = s == first ? p0 : _mm256_add_epi16(pairs[m][0], p0);
                    pairs[m][1] = s == first ? p1 : _mm256_add_epi16(pairs[m][1], p1);
                    settle(pairs[m][0]), settle(pairs[m][1]);
                }
            }
            for (int m = 0; m < ROWS; ++m)
                for (int h = 0; h < 2; ++h) {
                    __m256i sum = _mm256_madd_epi16(pairs[m][h], ones);
                    dots[m][h] = first ? _mm256_add_epi32(dots[m][h], sum) : sum;
                }
        }
    }
}

// out [ROWS, 16] = products over all blocks. The sums are kept in `out`: registers are for the block's.
template <class Format>
void multiply(const Group8 *group, const Panel &panel, int64_t blocks, float *out) {
    constexpr int ROWS = Form<Format>::ROWS, SPLIT = Form<Format>::SPLIT;
    constexpr int64_t X_BYTES = (Form<Format>::WIDE ? 256 : 128) / SPLIT;  // of one scale's numbers in a group
    const uint8_t *x = group->numbers, *w = panel.bytes;
    const float *facts = group->facts, *scales = panel.scale, *offsets = panel.offset;
    for (int i = 0; i < ROWS * COLUMNS; i += 8) _mm256_store_ps(out + i, _mm256_setzero_ps());
    for (int64_t b = 0; b < blocks; ++b) {
        for (int part = 0; part < SPLIT; ++part) {
            __m256i dots[ROWS][2];
            dot_rows<Format>(x, w, dots);
            for (int m = 0; m < ROWS; ++m) {
                const __m256 step = _mm256_broadcast_ss(facts + m);
                for (int h = 0; h < 2; ++h) {
                    float *sum = out + m * COLUMNS + 8 * h;
                    __m256 both = _mm256_mul_ps(step, _mm256_load_ps(scales + 8 * h));
                    __m256 next = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[m][h]), both, _mm256_load_ps(sum));
                    if (Form<Format>::OFFSET) {
                        const __m256 total = _mm256_broadcast_ss(facts + sum_at<Format>(part) + m);
                        next = _mm256_fmadd_ps(total, _mm256_load_ps(offsets + 8 * h), next);
                    }
                    _mm256_store_ps(sum, next);
                }
            }
            x += X_BYTES, w += Form<Format>::BYTES / SPLIT, scales += COLUMNS, offsets += COLUMNS;
        }
        facts += FACTS8;
        // The sums are in memory now; a compiler that kept them in registers, too, would move them twice.
        __asm__ __volatile__("" ::: "memory");
    }
}

#endif

// Memory of a panel, whatever its format.
int64_t panel_bytes(int64_t k) { return k / 32 * COLUMNS * (64 + 2 * 2 * 4); }

template <class F>
Panel panel_in(char *memory, int64_t k) {
    const int64_t blocks = k / 32, scales = blocks * F::SPLIT * COLUMNS;
    float *scale = reinterpret_cast<float *>(memory + blocks * F::BYTES);
    return Panel{reinterpret_cast<uint8_t *>(memory), scale, scale + scales};
}

// The group that row m is in; from its third row on where m is that.
template <class Format>
Group8 group_at(const Rows8 &in, int64_t m) {
    const int64_t blocks = in.k / 32, group = m / 4, within = m % 4;
    const uint8_t *numbers = Form<Format>::WIDE ? in.wide + group * in.k * 8 : in.q + group * in.k * 4;
    return Group8{numbers + within * 4, in.facts + group * blocks * FACTS8 + within};
}

// How a form's products begin and end on a thread, and pass over rows m0 .. m0 + ROWS - 1 of x.
template <class Format>
void begin(Form<Format>) {}
template <class Format>
void end(Form<Format>) {}

template <class Format>
void pass(Form<Format>, const Rows8 &in, int64_t m0, const Panel &panel, int64_t blocks, float *out) {
    Group8 groups[2];
    for (int64_t g = 0; g < 2; ++g) groups[g] = group_at<Format>(in, m0 + 4 * g < in.rows ? m0 + 4 * g : m0);
    multiply<Format>(groups, panel, blocks, out);
}

#ifdef VLLM_AMX

template <class Format>
VLLM_TARGET("amx-tile") void begin(Tiled<Format>) {
    const TileConfig config(32 / Tiled<Format>::SPLIT);
    _tile_loadconfig(config.written());
}
template <class Format>
VLLM_TARGET("amx-tile") void end(Tiled<Format>) {
    _tile_release();
}

// Products of 16 rows and the panel's 16 columns over the numbers of one scale, integers; PART: which of a block's scales.
// The instructions have the tiles' numbers in them.
#define VLLM_DOTS(PART, SUMS, A, B, dots) \
    _tile_zero(SUMS);                     \
    _tile_loadd(A, x, 32);                \
    _tile_loadd(B, w, COLUMNS * 4);       \
    _tile_dpbssd(SUMS, A, B);             \
    _tile_stored(SUMS, dots, COLUMNS * 4); \
    w += COLUMNS * K_BYTES;               \
    x += PART + 1 < SPLIT ? K_BYTES : X_BYTES - PART % SPLIT * K_BYTES

// out [16, 16] = products over all blocks. Those of the next numbers are in the tiles while these are scaled.
template <class Format>
VLLM_TARGET("amx-tile,amx-int8") void pass(Tiled<Format>, const Rows8 &in, int64_t m0, const Panel &panel, int64_t blocks, float *out) {
    typedef Tiled<Format> F;
    constexpr int SPLIT = F::SPLIT, K_BYTES = 32 / SPLIT, X_BYTES = TILE_ROWS8 * 32;
    const int64_t count = blocks * SPLIT;
    const uint8_t *x = in.q + m0 * in.k, *w = panel.bytes;
    const float *facts = in.facts + m0 / TILE_ROWS8 * blocks * TILE_FACTS8, *scales = panel.scale, *offsets = panel.offset;
    alignas(64) int32_t even[TILE_SIDE * TILE_SIDE], odd[TILE_SIDE * TILE_SIDE];
    __m512 sums[TILE_SIDE];
    for (int m = 0; m < TILE_SIDE; ++m) sums[m] = _mm512_setzero_ps();
    auto add = [&](const int32_t *dots, int part) __attribute__((always_inline)) {
        const float *totals = facts + (SPLIT == 1 ? 1 : 2 + part) * TILE_ROWS8;
        const __m512 scale = _mm512_loadu_ps(scales), offset = _mm512_loadu_ps(offsets);
        for (int m = 0; m < TILE_SIDE; ++m) {
            const __m512 dot = _mm512_cvtepi32_ps(_mm512_loadu_si512(dots + m * TILE_SIDE));
            sums[m] = _mm512_fmadd_ps(dot, _mm512_mul_ps(scale, _mm512_set1_ps(facts[m])), sums[m]);
            if (F::OFFSET) sums[m] = _mm512_fmadd_ps(offset, _mm512_set1_ps(totals[m]), sums[m]);
        }
        scales += COLUMNS, offsets += COLUMNS;
        if (SPLIT == 1 || part) facts += TILE_FACTS8;
    };
    VLLM_DOTS(0, 0, 4, 6, even);
    for (int64_t i = 0; i < count; i += 2) {
        if (i + 1 < count) {
            VLLM_DOTS(1, 1, 5, 7, odd);
        }
        add(even, 0);
        if (i + 1 == count) break;
        if (i + 2 < count) {
            VLLM_DOTS(0, 0, 4, 6, even);
        }
        add(odd, 1);
    }
    for (int m = 0; m < TILE_SIDE; ++m) _mm512_storeu_ps(out + m * COLUMNS, sums[m]);
}

#undef VLLM_DOTS

#endif

// The weights of the panel that this thread will probably have next, asked for while the rows of x pass over this one: rows are
// too short for the core's own guesses.
class Ahead {
  public:
    Ahead(const vllm_matrix &w, int64_t n, const vllm_matrix *gated, int64_t gated_n, int64_t times)
        : first(row_of(w, n + num_threads() * COLUMNS).data),
          second(gated ? row_of(*gated, gated_n + num_threads() * COLUMNS).data : nullptr),
          left(COLUMNS * w.row_bytes),
          step((left / times + LINE) / LINE * LINE) {}
    VLLM_INLINE void ask() {
        for (int64_t at = 0; at < step && left > 0; at += LINE, left -= LINE, first += LINE) {
            __builtin_prefetch(first, 0, 2);
            if (second) __builtin_prefetch(second, 0, 2), second += LINE;
        }
    }

  private:
    static constexpr int64_t LINE = 64;
    const uint8_t *first, *second;
    int64_t left, step;
};

template <class Format, class F>
void multiply_format(const Columns &one, const Rows8 &in, const Output &output, char *memory) {
    constexpr int ROWS = F::ROWS;
    const int64_t blocks = in.k / 32;
    Panel panel = panel_in<F>(memory, in.k), gated{};
    unpack<Format, F>(*one.w, one.n, one.count, panel);
    if (one.gated) {
        gated = panel_in<F>(memory + panel_bytes(in.k), in.k);
        unpack<Format, F>(*one.gated, one.gated_n, one.count, gated);
    }
    alignas(64) float products[ROWS * COLUMNS], factors[ROWS * COLUMNS];
    Ahead ahead(*one.w, one.n, one.gated, one.gated_n, (in.rows + ROWS - 1) / ROWS);
    begin(F{});
    for (int64_t m0 = 0; m0 < in.rows; m0 += ROWS) {
        ahead.ask();
        pass(F{}, in, m0, panel, blocks, products);
        if (one.gated) {
            pass(F{}, in, m0, gated, blocks, factors);
            gate_panel(one, products, factors, ROWS);
        }
        for (int64_t m = 0; m < ROWS && m0 + m < in.rows; ++m)
            finish(output, m0 + m, one.column, products + m * COLUMNS, one.count);
    }
    end(F{});
}

}  // namespace

bool takes_wide8(int32_t format) {
    bool wide = false;
    with_format8(format, [&](auto known) { wide = Form<decltype(known)>::WIDE; });
    return wide;
}

bool takes_tiles8() {
#ifdef VLLM_AMX
    return cpu_has_amx_int8();
#else
    return false;
#endif
}

bool multiply_columns8(const Columns &one, const Rows8 &in, const Output &output) {
    char *memory = static_cast<char *>(scratch(2, static_cast<size_t>(panel_bytes(in.k) * (one.gated ? 2 : 1))));
    return memory && with_format8(one.w->format, [&](auto known) {
               using Format = decltype(known);
#ifdef VLLM_AMX
               if (takes_tiles8()) return multiply_format<Format, Tiled<Format>>(one, in, output, memory);
#endif
               multiply_format<Format, Form<Format>>(one, in, output, memory);
           });
}

#else

bool takes_wide8(int32_t) { return false; }
bool takes_tiles8() { return false; }
bool multiply_columns8(const Columns &, const Rows8 &, const Output &) { return false; }

#endif

VLLM_VARIANT_END
