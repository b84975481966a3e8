// Products of many rows: a tile of the weight is decoded into the cache, then every row of x passes over it. Bound by FMA.
#include "formats.h"
#include "linear.h"
#include "threads.h"

VLLM_VARIANT_BEGIN

namespace {

// Rows of x and of the weight whose sums are in registers together.
constexpr int MR = VF == 16 ? 6 : 3, NR = 4;

// Numbers of K after which rows of x are looked at anew, so that NR rows of the tile and MR of x stay in the first cache.
constexpr int64_t K_STEP = 768;

// Rows of x that pass over the whole tile before the next ones: they stay in the second cache.
constexpr int64_t M_STEP = 48;

template <int M>
VLLM_INLINE void sums_of(const float *x, int64_t kp, const float *tile, vf sums[M][NR], int64_t k0, int64_t k1) {
#pragma GCC unroll 4
    for (int64_t k = k0; k < k1; k += VF) {
        // One vector of the weight at a time: with AVX2 all registers are taken.
        vf value[M];
        for (int m = 0; m < M; ++m) value[m] = vf_load(x + m * kp + k);
#pragma GCC unroll 8
        for (int n = 0; n < NR; ++n) {
            vf weight = vf_load(tile + n * kp + k);
            for (int m = 0; m < M; ++m) sums[m][n] = vf_fma(weight, value[m], sums[m][n]);
        }
    }
}

// M rows of x times NR rows of the tile, K from k0 on; `kept` carries the sums from one step of K to the next.
template <int M>
void multiply(const float *x, int64_t kp, const float *tile, float *kept, int64_t k0, int64_t k1, float *out, int64_t ldo) {
    vf sums[M][NR];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < NR; ++n) sums[m][n] = k0 ? vf_load(kept + (m * NR + n) * VF) : vf_zero();
    sums_of<M>(x, kp, tile, sums, k0, k1);
    if (k1 < kp) {
        for (int m = 0; m < M; ++m)
            for (int n = 0; n < NR; ++n) vf_store(kept + (m * NR + n) * VF, sums[m][n]);
        return;
    }
    for (int m = 0; m < M; ++m) vf_sum4(out + m * ldo, sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
}

void multiply_rows(int64_t m, const float *x, int64_t kp, const float *tile, float *kept, int64_t k0, int64_t k1, float *out,
                   int64_t ldo) {
    switch (m) {
        case 1: return multiply<1>(x, kp, tile, kept, k0, k1, out, ldo);
        case 2: return multiply<2>(x, kp, tile, kept, k0, k1, out, ldo);
        case 3: return multiply<3>(x, kp, tile, kept, k0, k1, out, ldo);
        case 4: return multiply<(MR < 4 ? MR : 4)>(x, kp, tile, kept, k0, k1, out, ldo);
        case 5: return multiply<(MR < 5 ? MR : 5)>(x, kp, tile, kept, k0, k1, out, ldo);
        default: return multiply<MR>(x, kp, tile, kept, k0, k1, out, ldo);
    }
}

template <class Format>
void decode_rows(const vllm_matrix &w, int64_t n0, int64_t n1, int64_t padded, float *tile, int64_t kp) {
    int64_t chunks = (w.k + Format::CHUNK - 1) / Format::CHUNK;
    for (int64_t n = n0; n < n1; ++n) {
        Row row = row_of(w, n);
        float *out = tile + (n - n0) * kp;
        for (int64_t c = 0; c < chunks; ++c)
            Format::decode(row, c, [&](int i, vf weight) { vf_store(out + c * Format::CHUNK + i * VF, weight); });
    }
    memset(tile + (n1 - n0) * kp, 0, static_cast<size_t>((padded - (n1 - n0)) * kp) * 4);
}

}  // namespace

bool multiply_tile(const Columns &one, const Inputs &in, const Output &output) {
    const vllm_matrix &w = *one.w;
    const int64_t kp = in.kp, width = one.count, padded = (width + NR - 1) / NR * NR, all = one.gated ? 2 * padded : padded;
    const float *tile;
    if (!one.gated && w.format == VLLM_ROWS_FLOAT32 && w.k == kp && w.row_bytes == kp * 4 && padded == width) {
        tile = static_cast<const float *>(w.data) + one.n * kp;
    } else {
        float *decoded = static_cast<float *>(scratch(2, static_cast<size_t>(all * kp) * 4));
        if (!decoded || !with_format(w.format, [&](auto format) {
                decode_rows<decltype(format)>(w, one.n, one.n + width, padded, decoded, kp);
                if (one.gated)
                    decode_rows<decltype(format)>(*one.gated, one.gated_n, one.gated_n + width, padded, decoded + padded * kp, kp);
            }))
            return false;
        tile = decoded;
    }
    // Products of one block of rows, and the sums between two steps of K.
    size_t products_bytes = static_cast<size_t>(M_STEP * all) * 4;
    char *memory = static_cast<char *>(scratch(3, products_bytes + static_cast<size_t>(M_STEP * all * VF) * 4));
    if (!memory) return false;
    float *products = reinterpret_cast<float *>(memory), *kept = reinterpret_cast<float *>(memory + products_bytes);
    for (int64_t m0 = 0; m0 < in.rows; m0 += M_STEP) {
        int64_t m1 = m0 + M_STEP < in.rows ? m0 + M_STEP : in.rows;
        for (int64_t k0 = 0; k0 < kp; k0 += K_STEP) {
            int64_t k1 = k0 + K_STEP < kp ? k0 + K_STEP : kp;
            for (int64_t n = 0; n < all; n += NR)
                for (int64_t m = m0; m < m1; m += MR)
                    multiply_rows(m1 - m < MR ? m1 - m : MR, in.x + m * kp, kp, tile + n * kp,
                                  kept + ((m - m0) * all + n * MR) * VF, k0, k1, products + (m - m0) * all + n, all);
        }
        for (int64_t m = m0; m < m1; ++m) {
            float *row = products + (m - m0) * all, *factors = row + padded;
            if (one.gated) {
                for (int64_t i = 0; one.bias && i < width; ++i) row[i] += one.bias[i], factors[i] += one.gated_bias[i];
                gate_row(one.activation, row, factors, width, row);
            }
            store(output, m, one.column, row, width);
        }
    }
    return true;
}

VLLM_VARIANT_END
