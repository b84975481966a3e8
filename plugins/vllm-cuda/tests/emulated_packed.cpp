// `packed_rows.cu` on the host: every thread is a fiber, and a seed decides who runs next. Copies arrive when they are waited
// for, and not before, and memory holds no numbers until then, so that a kernel that reads too early gives a wrong result.
//
// The kernels' files are included after this as EPILOGUE_FILE, PACKED_FILE, KERNEL and WHOLE_KERNEL. `run` returns 0, or 1
// where all threads wait for one another; `widen_all` runs `packed_whole.cu`, whose threads do not.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
struct uint2 {
    u32 x, y;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

struct Index {
    int x;
};
static Index threadIdx, blockIdx, blockDim;

using std::max;
using std::min;

static float fast_exp(float x) { return std::exp(x); }
#define __expf fast_exp
static float __fdividef(float a, float b) { return a / b; }

static float float_of(u32 bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
static u32 bits_of(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
static float widened(u32 bits) { return float_of(bits << 16); }
static float widened_half(u32 bits) {
    _Float16 value;
    u16 low = bits;
    std::memcpy(&value, &low, 2);
    return value;
}
static float number(u32 bits) { return HALF ? widened_half(bits & 0xFFFF) : widened(bits & 0xFFFF); }
static u32 rounded(float value) {
    if (HALF) {
        _Float16 narrow = value;
        u16 bits;
        std::memcpy(&bits, &narrow, 2);
        return bits;
    }
    u32 bits = bits_of(value);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static u32 two_numbers(float low, float high) { return rounded(low) | rounded(high) << 16; }
static u32 put_into(u32 base, u32 bits, u32 mask) { return base | (bits & mask); }
// Of the numbers that the kernel gives, a product and its sum are exact in float32.
static u32 fused(u32 a, u32 b, u32 c) {
    auto one = [](u32 a, u32 b, u32 c) { return number(a) * number(b) + number(c); };
    return two_numbers(one(a, b, c), one(a >> 16, b >> 16, c >> 16));
}

struct Meeting {
    int there = 0;
    long round = 0;
};

struct Operands {
    u32 a[4], b[2];
};

struct Block {
    std::unique_ptr<u8[]> whole;
    u8* memory;
    std::map<int, Meeting> barriers, warps;
    std::map<int, Operands> operands;
};

struct Copy {
    u8* target;
    const void* source;
    bool inside;
    int group;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    std::vector<Copy> copies;
    int block, thread, groups = 0;
    bool done = false;
};

static std::vector<Block> blocks;
static std::vector<Fiber> fibers;
static Meeting cluster_meeting;
static ucontext_t scheduler;
static Fiber* current;
static std::mt19937 chance;
static long progress;
static constexpr int ALL = ROW_WARPS * PARTS * 32;
static constexpr u32 WHERE = 1 << 24;  // an address holds its block above

static void yield() { swapcontext(&current->context, &scheduler); }

static void meet(Meeting& meeting, int all) {
    long round = meeting.round;
    ++progress;
    if (++meeting.there == all) meeting.there = 0, ++meeting.round;
    while (meeting.round == round) yield();
}

static Block& mine() { return blocks[blockIdx.x % CLUSTER]; }
static u8* shared_memory() { return mine().memory; }
static u32 shared_address() { return blockIdx.x % CLUSTER * WHERE; }
static void __syncthreads() { meet(mine().barriers[0], ALL); }
template <int THREADS>
static void barrier(int number) {
    meet(mine().barriers[number], THREADS);
}
static void __syncwarp() { meet(mine().warps[threadIdx.x / 32], 32); }
static void cluster_barrier() { meet(cluster_meeting, CLUSTER * ALL); }
static void wait_for_previous_kernel() {}
static void let_next_kernel_start() {}

static void copy_or_clear(u32 target, const void* source, bool inside) {
    current->copies.push_back({mine().memory + target % WHERE, source, inside, current->groups});
    if (chance() % 8 == 0) yield();
}
static void copy(u32 target, const void* source) { copy_or_clear(target, source, true); }
static void copy_if(bool wanted, u32 target, const void* source) {
    if (wanted) copy(target, source);
}
static u32 kept(u32 value) { return value; }
static void end_group() { ++current->groups; }
template <int LEFT>
static void wait_for_groups() {
    std::vector<Copy> left;
    for (const Copy& one : current->copies) {
        if (one.group >= current->groups - LEFT) {
            left.push_back(one);
        } else if (one.inside) {
            std::memcpy(one.target, one.source, 16);
        } else {
            std::memset(one.target, 0, 16);
        }
    }
    current->copies = left;
}

// PTX ISA, "Matrix Fragments for mma.m16n8k16": rows and columns of the elements that a lane holds.
static void multiply(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, const float* before) {
    Meeting& meeting = mine().warps[threadIdx.x / 32];
    auto& held = mine().operands;
    const int first = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
    held[threadIdx.x] = {{a0, a1, a2, a3}, {b0, b1}};
    meet(meeting, 32);
    float a[16][16], b[16][8];
    for (int other = 0; other < 32; ++other) {
        const Operands& one = held[first + other];
        const int group = other / 4, within = other % 4;
        for (int i = 0; i < 8; ++i) {
            const int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8, column = within * 2 + (i & 1) + (i >= 4 ? 8 : 0);
            a[row][column] = number(one.a[i / 2] >> i % 2 * 16);
        }
        for (int i = 0; i < 4; ++i) b[within * 2 + (i & 1) + (i >= 2 ? 8 : 0)][group] = number(one.b[i / 2] >> i % 2 * 16);
    }
    for (int i = 0; i < 4; ++i) {
        const int row = i < 2 ? lane / 4 : lane / 4 + 8, column = lane % 4 * 2 + (i & 1);
        float total = before[i];
        for (int k = 0; k < 16; ++k) total += a[row][k] * b[k][column];
        sum[i] = total;
    }
    meet(meeting, 32);
}

template <bool OTHERS>
static void add(float (&total)[4], int rank, u32 address) {
    Block& block = OTHERS ? blocks[rank] : mine();
    float value[4];
    std::memcpy(value, block.memory + address % WHERE, 16);
    for (int i = 0; i < 4; ++i) total[i] += value[i];
}

#include EPILOGUE_FILE
#include PACKED_FILE
#include KERNEL
#include WHOLE_KERNEL

struct Arguments {
    const u8 *codes, *scales;
    const float* row_scale;
    const u16* x;
    void* out;
    const float* bias;
    int T, N, K, x_row;
};
static Arguments given;

static void enter() {
    const Arguments& a = given;
    packed_rows(a.codes, a.scales, a.row_scale, a.x, a.out, a.bias, a.T, a.N, a.K, a.x_row);
    ++progress;
    current->done = true;
}

static bool finish_cluster() {
    size_t left = fibers.size();
    for (long idle = 0; left;) {
        long before = progress;
        Fiber& fiber = fibers[chance() % fibers.size()];
        if (!fiber.done) {
            current = &fiber;
            threadIdx.x = fiber.thread, blockIdx.x = fiber.block;
            swapcontext(&scheduler, &fiber.context);
            left -= fiber.done;
        }
        idle = progress == before ? idle + 1 : 0;
        if (idle > (long)fibers.size() * 64) return false;
    }
    return true;
}

extern "C" int run(const u8* codes, const u8* scales, const float* row_scale, const u16* x, void* out, const float* bias,
                   int T, int N, int K, int shared_bytes, int programs, u32 seed) {
    given = {codes, scales, row_scale, x, out, bias, T, N, K, K};
    chance.seed(seed);
    for (int first = 0; first < programs; first += CLUSTER) {
        blocks.clear(), blocks.resize(CLUSTER);
        fibers = std::vector<Fiber>(CLUSTER * ALL);
        cluster_meeting = {};
        for (Block& block : blocks) {
            block.whole.reset(new u8[shared_bytes + 16]);
            std::memset(block.whole.get(), 0xFF, shared_bytes + 16);  // no number
            block.memory = block.whole.get() + (16 - (uintptr_t)block.whole.get() % 16) % 16;
        }
        for (int i = 0; i < CLUSTER * ALL; ++i) {
            Fiber& fiber = fibers[i];
            fiber.block = first + i / ALL, fiber.thread = i % ALL;
            fiber.stack.reset(new char[1 << 16]);
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.get();
            fiber.context.uc_stack.ss_size = 1 << 16;
            fiber.context.uc_link = &scheduler;
            makecontext(&fiber.context, enter, 0);
        }
        if (!finish_cluster()) return 1;
    }
    return 0;
}

extern "C" void widen_all(const u8* codes, const u8* scales, const float* row_scale, u16* out, int N, int K, int programs) {
    blockDim.x = 128;
    for (blockIdx.x = 0; blockIdx.x < programs; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) packed_whole(codes, scales, row_scale, out, N, K);
}
