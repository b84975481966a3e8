// A packed weight as a whole matrix: out [N, K] = its numbers. A warp has one record: 16 rows x 128 inputs.
//
// Comes after `ampere.cuh` and `packed.cuh`. Defined at compilation, beside theirs: DEPENDENT (the chip has dependent launch).

__device__ __forceinline__ void write_row(u16* out, const u32 (&pairs)[4], float scale) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = two_numbers(number(pairs[i]) * scale, number(pairs[i] >> 16) * scale);
    *(uint4*)out = make_uint4(words[0], words[1], words[2], words[3]);
}

extern "C" __global__ void __launch_bounds__(128)
    packed_whole(const u8* codes, const u8* scales, const float* row_scale, u16* out, int N, int K) {
    const int records = (K + DEPTH - 1) / DEPTH, lane = threadIdx.x % 32, g = lane / 4;
    const u64 record = (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const int row = (int)(record / records) * 16 + g, column = (int)(record % records) * DEPTH + lane % 4 * 8;

    if (DEPENDENT) {
        let_next_kernel_start();
        // Memory of out may be what the kernel before still reads.
        wait_for_previous_kernel();
    }
    if (row - g >= N) return;
    const u8* const mine = codes + record * CODE_BYTES + lane * 16;
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
        const int at = column + unit * 32;
        Scales found = scales_of(scales + record * SCALE_BYTES, unit / STEP, g);
        if (!SETS) {
            found.low = row < N ? row_scale[row] : 0;
            found.high = row + 8 < N ? row_scale[row + 8] : 0;
        }
        const Codes held = *(const Codes*)(mine + (FORMAT == INT4 ? unit / 2 : unit) * 512);
        u32 low[4], high[4];
        widen(low, held, unit, true, found.minus_low);
        widen(high, held, unit, false, found.minus_high);
        if (at < K && row < N) write_row(out + (u64)row * K + at, low, found.low);
        if (at < K && row + 8 < N) write_row(out + (u64)(row + 8) * K + at, high, found.high);
    }
}
