// A weight in fp8, in the order that `packed.py` gives its codes, as the matrix that it was: out [N, K] bytes of float8_e4m3fn.
// A warp has one record: 16 rows x 128 inputs. It is read before the kernel that comes first has ended.
//
// Comes after `chip.cuh`. Defined at compilation: DEPENDENT (the chip has dependent launch).

// Four inputs of a word, in order: of bytes 0 and 1 inputs 0 and 2, of bytes 2 and 3 inputs 1 and 3.
__device__ __forceinline__ u32 four_codes(u32 word) {
    const u32 low = word & 0x00FF00FF, high = word >> 8 & 0x00FF00FF;
    const u32 first = (high & 0x00800080) | (high & 0x00070007) << 4 | (low >> 4 & 0x000F000F);
    const u32 second = (high & 0x00080008) << 4 | (high & 0x00700070) | (low & 0x000F000F);
    return __byte_perm(first, second, 0x6420);
}

extern "C" __global__ void __launch_bounds__(128) fp8_codes(const u8* codes, u8* out, int N, int K) {
    const int records = (K + 127) / 128, lane = threadIdx.x % 32;
    const u64 record = (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const int row = (int)(record / records) * 16 + lane / 4, column = (int)(record % records) * 128 + lane % 4 * 8;
    const bool there = row - lane / 4 < N;

    if (DEPENDENT) let_next_kernel_start();
    uint4 held[4];
#pragma unroll
    for (int unit = 0; unit < 4; ++unit) {
        if (there) held[unit] = *(const uint4*)(codes + record * 2048 + unit * 512 + lane * 16);
    }
    // Memory of out may be what the kernel before still reads.
    if (DEPENDENT) wait_for_previous_kernel();
#pragma unroll
    for (int unit = 0; unit < 4; ++unit) {
        const int at = column + unit * 32;
        if (!there || at >= K) continue;
        u8* const to = out + (u64)row * K + at;
        if (row < N) *(uint2*)to = make_uint2(four_codes(held[unit].x), four_codes(held[unit].y));
        if (row + 8 < N) *(uint2*)(to + (u64)8 * K) = make_uint2(four_codes(held[unit].z), four_codes(held[unit].w));
    }
}
