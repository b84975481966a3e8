// `packed_rows.cu` on the host: every thread is a fiber, and a seed decides who runs next. Copies arrive when they are waited
// for, and not before, and memory holds no numbers until then, so that a kernel that reads too early gives a wrong result.
//
// The kernels' files are included after this as EPILOGUE_FILE, PACKED_FILE, FINISH_FILE, KERNEL and WHOLE_KERNEL. `run` returns
// 0, or 1 where all threads wait for one another; `widen_all` runs `packed_whole.cu`, whose threads do not.

#include "emulated_packed.h"

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

// Of a thread: its copies on the way.
struct Own {
    std::vector<Copy> copies;
    int groups = 0;
};

static std::vector<Block> blocks;
static std::vector<Own> own;
static Meeting cluster_meeting;
static constexpr int ALL = ROW_WARPS * PARTS * 32;
static constexpr u32 WHERE = 1 << 24;  // an address holds its block above

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
    own[self()].copies.push_back({mine().memory + target % WHERE, source, inside, own[self()].groups});
    maybe_yield();
}
static void copy(u32 target, const void* source) { copy_or_clear(target, source, true); }
static void copy_if(bool wanted, u32 target, const void* source) {
    if (wanted) copy(target, source);
}
static u32 kept(u32 value) { return value; }
static void end_group() { ++own[self()].groups; }
template <int LEFT>
static void wait_for_groups() {
    std::vector<Copy> left;
    for (const Copy& one : own[self()].copies) {
        if (one.group >= own[self()].groups - LEFT) {
            left.push_back(one);
        } else if (one.inside) {
            std::memcpy(one.target, one.source, 16);
        } else {
            std::memset(one.target, 0, 16);
        }
    }
    own[self()].copies = left;
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
#include FINISH_FILE
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

static void work() {
    const Arguments& a = given;
    packed_rows(a.codes, a.scales, a.row_scale, a.x, a.out, a.bias, a.T, a.N, a.K, a.x_row);
}

extern "C" int run(const u8* codes, const u8* scales, const float* row_scale, const u16* x, void* out, const float* bias,
                   int T, int N, int K, int shared_bytes, int programs, u32 seed) {
    given = {codes, scales, row_scale, x, out, bias, T, N, K, K};
    chance.seed(seed);
    for (int first = 0; first < programs; first += CLUSTER) {
        blocks.clear(), blocks.resize(CLUSTER);
        own.assign(CLUSTER * ALL, {});
        cluster_meeting = {};
        for (Block& block : blocks) block.whole = memory_of(shared_bytes, 16, block.memory);
        if (!finish_cluster(first, CLUSTER, ALL, [] { return false; })) return 1;
    }
    return 0;
}

extern "C" void widen_all(const u8* codes, const u8* scales, const float* row_scale, u16* out, int N, int K, int programs) {
    blockDim.x = 128;
    for (blockIdx.x = 0; blockIdx.x < programs; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) packed_whole(codes, scales, row_scale, out, N, K);
}
