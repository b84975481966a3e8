// Kernels written in `hopper.cuh`'s words, on the host: every thread is a fiber, and a seed decides who runs next and when a
// copy arrives. Gives what the words promise and no more, so that a kernel that relies on more gives a wrong result on some
// seed, and one that waits for what never comes is found at once.
//
// The kernel's text is included after this as KERNEL. `run` returns 0, or 1 where all threads wait for one another.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads)

typedef uint32_t u32;
typedef uint64_t u64;
typedef uint16_t u16;

struct float2 {
    float x, y;
};

struct TensorMap {
    const u16* data;
    int rows, columns, box_rows;
};

struct Index {
    int x;
};
static Index threadIdx, blockIdx, gridDim;

using std::max;
using std::min;

static float2 make_float2(float x, float y) { return {x, y}; }
// The host's library has a function of the same name.
static float fast_exp(float x) { return std::exp(x); }
#define __expf fast_exp
static float __fdividef(float a, float b) { return a / b; }
static float widened(u32 bits) {
    float value;
    bits <<= 16;
    std::memcpy(&value, &bits, 4);
    return value;
}
static u32 rounded(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static u32 narrowed(float low, float high) { return rounded(low) | rounded(high) << 16; }

struct Barrier {
    int count = 0, pending = 0, bytes = 0;
    u32 phase = 0;
    void settle() {
        if (pending == 0 && bytes == 0) phase ^= 1, pending = count;
    }
};

// Threads that wait for all of a group.
struct Meeting {
    int there = 0;
    long round = 0;
};

struct Block {
    std::vector<unsigned char> memory;
    std::map<u32, Barrier> barriers;
    Meeting meeting;
    std::map<int, Meeting> warps;
};

struct Copy {
    Block* block;
    TensorMap map;
    u32 target, barrier;
    int column, row;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    int block, thread;
    bool done = false;
};

static std::vector<Block> blocks;
static std::deque<Copy> copies;
static std::vector<Fiber> fibers;
static Meeting cluster_meeting;
static ucontext_t scheduler;
static Fiber* current;
static std::mt19937 chance;
static long progress;
static constexpr u32 WHERE = 1 << 24, FIRST = 1024;  // an address holds its block above, and never is 0

static Block& block_of(u32 address) { return blocks[address / WHERE]; }
static unsigned char* at(u32 address) { return block_of(address).memory.data() + address % WHERE; }
static u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }
static void yield() { swapcontext(&current->context, &scheduler); }
static void maybe_yield() {
    if (chance() % 4 == 0) yield();
}

static void meet(Meeting& meeting, int all) {
    long round = meeting.round;
    ++progress;
    if (++meeting.there == all) meeting.there = 0, ++meeting.round;
    while (meeting.round == round) yield();
}

static u32 shared_address() { return blockIdx.x % CLUSTER * WHERE + FIRST; }
static u32 shared_address_of(int rank, u32 address) { return rank * WHERE + address % WHERE; }
static void __syncthreads() { meet(blocks[blockIdx.x % CLUSTER].meeting, BANDS * 128 + 32); }
static void __syncwarp() {}
static void cluster_barrier() { meet(cluster_meeting, CLUSTER * (BANDS * 128 + 32)); }
static void barrier_init(u32 barrier, u32 count) { block_of(barrier).barriers[barrier] = {(int)count, (int)count}; }
static void show_barriers() {}
static void barrier_arrive(u32 barrier) {
    Barrier& found = block_of(barrier).barriers.at(barrier);
    ++progress, --found.pending, found.settle();
    maybe_yield();
}
static void barrier_expect(u32 barrier, u32 bytes) {
    block_of(barrier).barriers.at(barrier).bytes += bytes;
    barrier_arrive(barrier);
}
static void barrier_wait(u32 barrier, u32 parity) {
    maybe_yield();
    while (block_of(barrier).barriers.at(barrier).phase == parity) yield();
}
static u64 read_once() { return 0; }
static u64 read_again() { return 0; }
static void wait_for_previous_kernel() {}
static void let_next_kernel_start() {}
static void bring(u32 target, const TensorMap& map, int column, int row, u32 barrier, u64) {
    copies.push_back({&block_of(target), map, target, barrier, column, row});
    ++progress;
    maybe_yield();
}
static void arrive(const Copy& copy) {
    for (int row = 0; row < copy.map.box_rows; ++row)
        for (int column = 0; column < 64; ++column) {
            bool inside = copy.row + row < copy.map.rows && copy.column + column < copy.map.columns;
            u16 value = inside ? copy.map.data[(size_t)(copy.row + row) * copy.map.columns + copy.column + column] : 0;
            std::memcpy(at(swizzled(copy.target + row * 128 + column * 2)), &value, 2);
        }
    Barrier& barrier = copy.block->barriers.at(copy.barrier);
    ++progress, barrier.bytes -= copy.map.box_rows * 128, barrier.settle();
}
static void store_to_cluster(u32 address, const float* value) {
    std::memcpy(at(address), value, 16);
    maybe_yield();
}
static void add_from_shared(float* sum, u32 address) {
    float value[4];
    std::memcpy(value, at(address), 16);
    for (int i = 0; i < 4; ++i) sum[i] += value[i];
}
static void meet_warp() { meet(blocks[blockIdx.x % CLUSTER].warps[threadIdx.x / 32], 32); }
static void begin_multiplying() { meet_warp(); }
static void wait_for_products() { meet_warp(); }
static void settle(float&) {}
static u64 descriptor(u32 address) { return (u64)address >> 4; }

// This thread's elements of a product of 64 x ROWS x 16.
static void multiply(float (&sum)[ROWS / 2], u64 a, u64 b) {
    auto element = [](u64 tile, int row, int k) {
        u16 bits;
        std::memcpy(&bits, at(swizzled((u32)(tile << 4) + row * 128 + k * 2)), 2);
        return widened(bits);
    };
    int first = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, corner = threadIdx.x % 4 * 2;
    for (int i = 0; i < ROWS / 2; ++i)
        for (int k = 0; k < 16; ++k)
            sum[i] += element(a, first + i / 2 % 2 * 8, k) * element(b, i / 4 * 8 + corner + i % 2, k);
}

#include KERNEL

struct Arguments {
    TensorMap weight, x;
    void* out;
    const u16* bias;
    int T, N, stages, tiles, x_rows;
};
static const Arguments* arguments;

static void enter() {
    const Arguments& a = *arguments;
    few_rows(a.weight, a.x, a.out, a.bias, a.T, a.N, a.stages, a.tiles, a.x_rows);
    ++progress;
    current->done = true;
}

static void resume(Fiber& fiber) {
    current = &fiber;
    threadIdx.x = fiber.thread, blockIdx.x = fiber.block;
    swapcontext(&scheduler, &fiber.context);
}

static bool finish_cluster() {
    size_t left = fibers.size();
    for (long idle = 0; left;) {
        long before = progress;
        if (!copies.empty() && chance() % 8 == 0) {
            // Copies of one thread may arrive in any order.
            size_t which = chance() % copies.size();
            Copy copy = copies[which];
            copies.erase(copies.begin() + which);
            arrive(copy);
        }
        Fiber& fiber = fibers[chance() % fibers.size()];
        if (!fiber.done) resume(fiber), left -= fiber.done;
        idle = progress == before && copies.empty() ? idle + 1 : 0;
        if (idle > (long)fibers.size() * 64) return false;
    }
    return true;
}

extern "C" int run(const u16* weight, const u16* x, void* out, const u16* bias, int T, int N, int K, int shared_bytes, int programs,
                   u32 seed) {
    constexpr int halves = EPILOGUE == 2 ? 2 : 1, columns = ROWS / halves, threads = BANDS * 128 + 32;
    int x_rows = (T + 7) / 8 * 8;
    Arguments given = {{weight, halves * N, K, columns}, {x, T, K, x_rows}, out, bias, T, N, (K + 63) / 64, (N + columns - 1) / columns, x_rows};
    arguments = &given;
    chance.seed(seed);
    gridDim.x = programs;
    for (int first = 0; first < programs; first += CLUSTER) {
        blocks.assign(CLUSTER, {});
        fibers = std::vector<Fiber>(CLUSTER * threads);
        copies.clear(), cluster_meeting = {};
        for (int i = 0; i < CLUSTER; ++i) blocks[i].memory.assign(FIRST + shared_bytes, 0xFF);  // no number
        for (int i = 0; i < CLUSTER * threads; ++i) {
            Fiber& fiber = fibers[i];
            fiber.block = first + i / threads, fiber.thread = i % threads;
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
