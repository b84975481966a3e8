// Products of a few rows: each weight is read once, decoded in registers, used for all rows. Bound by memory.
#include "formats.h"
#include "linear.h"

VLLM_VARIANT_BEGIN

namespace {

// How much earlier than needed. That many bytes of a core's share of the bandwidth take longer than memory does to answer.
constexpr int64_t AHEAD = 1024;

// NR rows of the weight at once, for the latency of the sums; M rows of x.
template <class Format, int M, int NR>
VLLM_INLINE void block(const vllm_matrix &w, const Inputs &in, int64_t n, int64_t count, float *out, int64_t stride) {
    constexpr int VECTORS = Format::CHUNK / VF;
    Row rows[NR];
    for (int r = 0; r < NR; ++r) rows[r] = row_of(w, n + (r < count ? r : 0));
    vf sums[NR][M];
    for (int r = 0; r < NR; ++r)
        for (int m = 0; m < M; ++m) sums[r][m] = vf_zero();
    const float *begin[M];
    for (int m = 0; m < M; ++m) begin[m] = in.x + (m < in.rows ? m : in.rows - 1) * in.kp;
    int64_t chunks = (w.k + Format::CHUNK - 1) / Format::CHUNK;
    // Rows are short, and a core's own guesses end with them: what the next NR ones need is asked for now, from their first byte
    // to their last, since these are neighbours.
    int64_t step = w.row_bytes * Format::CHUNK / w.k, asked = Format::CHUNK >= 32 ? step : 4 * step;
    int64_t ahead = NR * w.row_bytes + AHEAD;
    for (int64_t c = 0; c < chunks; ++c) {
        int64_t at = c * VECTORS * VF;
        if (Format::CHUNK >= 32 || c % 4 == 0)
            for (int64_t byte = 0; byte < NR * asked; byte += 64)
                __builtin_prefetch(rows[0].data + c * step * NR + ahead + byte);
#pragma GCC unroll 4
        for (int r = 0; r < NR; ++r)
            Format::decode(rows[r], c, [&](int i, vf weight) __attribute__((always_inline)) {
                for (int m = 0; m < M; ++m) sums[r][m] = vf_fma(weight, vf_load(begin[m] + at + i * VF), sums[r][m]);
            });
    }
    for (int m = 0; m < M && m < in.rows; ++m) {
        float totals[4];
        vf zero = vf_zero();
        vf_sum4(totals, sums[0][m], NR > 1 ? sums[NR > 1 ? 1 : 0][m] : zero, NR > 2 ? sums[NR > 2 ? 2 : 0][m] : zero,
                NR > 3 ? sums[NR > 3 ? 3 : 0][m] : zero);
        for (int r = 0; r < count; ++r) out[m * stride + r] = totals[r];
    }
}

template <class Format, int M, int NR>
void range(const vllm_matrix &w, const Inputs &in, int64_t n0, int64_t n1, float *out, int64_t stride) {
    for (int64_t n = n0; n < n1; n += NR)
        block<Format, M, NR>(w, in, n, n1 - n < NR ? n1 - n : NR, out + (n - n0), stride);
}

}  // namespace

bool multiply_vector(const vllm_matrix &w, const Inputs &in, int64_t n0, int64_t n1, float *out, int64_t stride) {
    return with_format(w.format, [&](auto format) {
        using Format = decltype(format);
        int64_t m = 0;
#ifdef __AVX2__
        for (; m + 2 < in.rows; m += 4) {
            // Three rows are four, the last one twice: a kernel less.
            Inputs part{in.x + m * in.kp, in.kp, in.rows - m};
            range<Format, 4, 2>(w, part, n0, n1, out + m * stride, stride);
        }
#endif
        for (; m < in.rows; ++m) range<Format, 1, 4>(w, Inputs{in.x + m * in.kp, in.kp, 1}, n0, n1, out + m * stride, stride);
    });
}

VLLM_VARIANT_END
