// What products with packed weights do with the sums in shared memory. Comes after `ampere.cuh`, `epilogue.cuh` and
// `packed.cuh`. Defined at compilation, beside theirs: EPILOGUE, BIAS, WIDE_OUT (a float32 out).

constexpr int HALVES = EPILOGUE == GATED ? 2 : 1;

// Floats of a row of sums, for `rows` rows of the weight: four more, so that the lanes of a fragment meet different banks.
__device__ constexpr int line_of(int rows) { return rows + 4; }

struct Output {
    void* out;
    const float *bias, *row_scale;
    int T, N;
};

// Write this program's share of a tile of WIDTH columns from `column` on: `rank` is its number of `programs` that share the
// tile, each with THREADS threads. `read` adds the sums of four columns of a token from one on, of half 0 or 1.
template <int WIDTH, int THREADS, typename Read>
__device__ __forceinline__ void finish(const Output& output, int rank, int programs, int column, Read read) {
    constexpr int QUADS = WIDTH / 4;
    const bool whole = output.N % 4 == 0 && (u64)output.out % 16 == 0;
    for (int i = rank * THREADS + threadIdx.x; i < output.T * QUADS; i += programs * THREADS) {
        const int token = i / QUADS, within = i % QUADS * 4, first = column + within;
        if (first >= output.N) continue;
        const u64 place = (u64)token * output.N + first;
        float total[HALVES][4] = {};
#pragma unroll
        for (int half = 0; half < HALVES; ++half) read(total[half], half, token, within);
        float value[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            value[j] = 0;
            if (first + j >= output.N) continue;
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                if (!SETS) total[half][j] *= output.row_scale[half * output.N + first + j];
                if (BIAS) total[half][j] += output.bias[half * output.N + first + j];
            }
            value[j] = EPILOGUE == GATED ? activated(total[0][j]) * total[HALVES - 1][j] : total[0][j];
            if (EPILOGUE == ADD) value[j] += number(((const u16*)output.out)[place + j]);
        }
        if (whole) {
            if (WIDE_OUT) {
                *(float4*)((float*)output.out + place) = make_float4(value[0], value[1], value[2], value[3]);
            } else {
                const u32 low = two_numbers(value[0], value[1]), high = two_numbers(value[2], value[3]);
                *(uint2*)((u16*)output.out + place) = make_uint2(low, high);
            }
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (first + j >= output.N) continue;
                if (WIDE_OUT) {
                    ((float*)output.out)[place + j] = value[j];
                } else {
                    ((u16*)output.out)[place + j] = (u16)two_numbers(value[j], 0);
                }
            }
        }
    }
}
