// `fp8_codes.cu` on the host, KERNEL its file: threads of it do not meet, and are run one after the other.

#include <cstdint>

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(threads)

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;

struct Index {
    int x;
};
static Index threadIdx, blockIdx, blockDim;

struct uint2 {
    u32 x, y;
};
struct uint4 {
    u32 x, y, z, w;
};
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static void let_next_kernel_start() {}
static void wait_for_previous_kernel() {}

// PTX ISA, "prmt": each four bits of ``selector`` name a byte of the two words.
static u32 __byte_perm(u32 low, u32 high, u32 selector) {
    const u64 both = (u64)high << 32 | low;
    u32 found = 0;
    for (int i = 0; i < 4; ++i) found |= (u32)(both >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
    return found;
}

#include KERNEL

extern "C" void run(int blocks, int threads, const u8* codes, u8* out, int rows, int columns) {
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) fp8_codes(codes, out, rows, columns);
    }
}
