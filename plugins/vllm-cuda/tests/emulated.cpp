// Kernels written in `hopper.cuh`'s words, on the host: every thread is a fiber, and a seed decides who runs next and when a
// copy arrives. Gives what the words promise and no more, so that a kernel that relies on more gives a wrong result on some
// seed, and one that waits for what never comes is found at once.
//
// Included before a kernel's text. Defined before it: PROGRAMS (of a cluster), THREADS (of a program), ROWS (of the weight in a
// product). `work` is what every thread does; `finish_cluster` says whether all came to their end.

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

// Its part of a product is computed when a thread waits for it, as late as can be.
struct Product {
    float* sum;
    u64 a, b;
    bool more;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    int block, thread;
    bool done = false;
    std::deque<std::vector<Product>> products = {{}};
    std::deque<int> takes = {0};  // not done yet of each group
    int first_take = 0;           // number of the group at the front
};

struct Take {
    Fiber* fiber;
    int group;
    TensorMap map;
    u32 source;
    int column, row;
    bool add;
};

static std::vector<Block> blocks;
static std::deque<Copy> copies;
static std::deque<Take> takes;
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

static u32 shared_address() { return blockIdx.x % PROGRAMS * WHERE + FIRST; }
static u32 shared_address_of(int rank, u32 address) { return rank * WHERE + address % WHERE; }
static void __syncthreads() { meet(blocks[blockIdx.x % PROGRAMS].meeting, THREADS); }
static void meet_warp() { meet(blocks[blockIdx.x % PROGRAMS].warps[threadIdx.x / 32], 32); }
static void __syncwarp() { meet_warp(); }
static void cluster_barrier() { meet(cluster_meeting, PROGRAMS * THREADS); }
static void prefetch(const TensorMap&) {}
static void barrier_init(u32 barrier, u32 count) { block_of(barrier).barriers[barrier] = {(int)count, (int)count}; }
static void show_barriers() {}
static void barrier_arrive(u32 barrier) {
    Barrier& found = block_of(barrier).barriers.at(barrier);
    ++progress, --found.pending, found.settle();
    maybe_yield();
}
static void barrier_arrive_there(u32 barrier) { barrier_arrive(barrier); }
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
static void bring_to_all(u32 target, const TensorMap& map, int column, int row, u32 barrier, u64, u16 mask) {
    for (int i = 0; i < PROGRAMS; ++i) {
        u32 there = shared_address_of(i, target);
        if (mask >> i & 1) copies.push_back({&block_of(there), map, there, shared_address_of(i, barrier), column, row});
    }
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
static void take(const TensorMap& map, int column, int row, u32 source) {
    ++current->takes.back();
    takes.push_back({current, current->first_take + (int)current->takes.size() - 1, map, source, column, row, false});
}
static void take_and_add(const TensorMap& map, int column, int row, u32 source) {
    take(map, column, row, source), takes.back().add = true;
}
static void close_group_of_takes() { current->takes.push_back(0), ++progress, maybe_yield(); }
template <int LEFT>
static void wait_for_takes() {
    auto& groups = current->takes;
    for (; (int)groups.size() > LEFT + 1; groups.pop_front(), ++current->first_take)
        while (groups.front()) yield();
}
static void done(const Take& take) {
    for (int row = take.row; row < std::min(take.row + take.map.box_rows, take.map.rows); ++row)
        for (int column = take.column; column < std::min(take.column + 64, take.map.columns); ++column) {
            u16 value;
            std::memcpy(&value, at(swizzled(take.source + (row - take.row) * 128 + (column - take.column) * 2)), 2);
            u16& there = const_cast<u16*>(take.map.data)[(size_t)row * take.map.columns + column];
            there = take.add ? rounded(widened(there) + widened(value)) : value;
        }
    ++progress, --take.fiber->takes[take.group - take.fiber->first_take];
}
static void show_to_copies() {}
static void store_matrices(u32 address, const u32 (&word)[4]) {
    static u32 addresses[PROGRAMS][THREADS];
    u32* warp = addresses[blockIdx.x % PROGRAMS] + threadIdx.x / 32 * 32;
    int lane = threadIdx.x % 32;
    warp[lane] = address;
    meet_warp();
    for (int i = 0; i < 4; ++i) std::memcpy(at(warp[i * 8 + lane / 4] + lane % 4 * 4), word + i, 4);
    meet_warp();
}
static void add_from_shared(float* sum, u32 address) {
    float value[4];
    std::memcpy(value, at(address), 16);
    for (int i = 0; i < 4; ++i) sum[i] += value[i];
}
static void begin_multiplying() { meet_warp(); }
static void settle(float&) {}
static u64 descriptor(u32 address) { return (u64)address >> 4; }

// This thread's elements of a product of 64 x ROWS x 16.
static void compute(const Product& product) {
    auto element = [](u64 tile, int row, int k) {
        u16 bits;
        std::memcpy(&bits, at(swizzled((u32)(tile << 4) + row * 128 + k * 2)), 2);
        return widened(bits);
    };
    int first = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, corner = threadIdx.x % 4 * 2;
    for (int i = 0; i < ROWS / 2; ++i) {
        float sum = product.more ? product.sum[i] : 0;
        for (int k = 0; k < 16; ++k)
            sum += element(product.a, first + i / 2 % 2 * 8, k) * element(product.b, i / 4 * 8 + corner + i % 2, k);
        product.sum[i] = sum;
    }
}
static void multiply(float (&sum)[ROWS / 2], u64 a, u64 b, bool more = true) {
    current->products.back().push_back({sum, a, b, more});
}
static void close_group_of_products() { current->products.push_back({}); }
template <int LEFT>
static void wait_for_groups_of_products() {
    for (auto& groups = current->products; (int)groups.size() > LEFT + 1; groups.pop_front())
        for (const Product& product : groups.front()) compute(product);
    meet_warp();
}
static void work();
static void enter() {
    work();
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
        // Seldom while anything else goes on: what it takes may have been overwritten by then.
        if (!takes.empty() && (chance() % 65536 == 0 || idle > (long)fibers.size() * 16)) {
            size_t which = chance() % takes.size();
            done(takes[which]);
            takes.erase(takes.begin() + which);
        }
        Fiber& fiber = fibers[chance() % fibers.size()];
        if (!fiber.done) resume(fiber), left -= fiber.done;
        idle = progress == before && copies.empty() ? idle + 1 : 0;
        if (idle > (long)fibers.size() * 64 && takes.empty()) return false;
    }
    // What has not been read by now is lost.
    return takes.empty();
}

// `programs` programs, cluster by cluster; returns 0, or 1 where all threads wait for one another.
static int run_all(int programs, int shared_bytes, u32 seed) {
    chance.seed(seed);
    gridDim.x = programs;
    for (int first = 0; first < programs; first += PROGRAMS) {
        blocks.assign(PROGRAMS, {});
        fibers = std::vector<Fiber>(PROGRAMS * THREADS);
        copies.clear(), takes.clear(), cluster_meeting = {};
        for (int i = 0; i < PROGRAMS; ++i) blocks[i].memory.assign(FIRST + shared_bytes, 0xFF);  // no number
        for (int i = 0; i < PROGRAMS * THREADS; ++i) {
            Fiber& fiber = fibers[i];
            fiber.block = first + i / THREADS, fiber.thread = i % THREADS;
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
