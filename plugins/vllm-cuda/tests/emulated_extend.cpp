// `extend.cu` on the host: every thread is a fiber, and a seed decides who runs next, when a copy arrives, and whether
// products are computed when they are asked for or when they are waited for. Gives what the words of the kernel promise and no
// more, so that a kernel that relies on more gives a wrong result on some seed, and one that waits for what never comes is
// found.
//
// The kernel's text is included after this as KERNEL. `run` returns 0, or 1 where all threads wait for one another.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
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
#define __launch_bounds__(...)

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

struct alignas(16) uint4 {
    u32 x, y, z, w;
};
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

// Of numbers of 16 bits: sizes, and strides in numbers, of the second dimension and the third.
struct TensorMap {
    const u16* data;
    int size[3];
    long stride[2];
    int box[3];
};

struct Index {
    int x;
};
static Index threadIdx, blockIdx, gridDim;

using std::max;
using std::min;

static float __uint_as_float(u32 bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
static u32 rounded(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    if (value != value) return 0x7FC0;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static u32 two_numbers(float low, float high) { return rounded(low) | rounded(high) << 16; }
static float number(u32 bits) { return __uint_as_float(bits << 16); }
static void stop() { std::abort(); }
static float power_of_2(float x) { return std::exp2(x); }

struct Barrier {
    int count = 0, pending = 0, bytes = 0;
    u32 phase = 0;
    void settle() {
        if (pending == 0 && bytes == 0) phase ^= 1, pending = count;
    }
};

// Threads that wait for all of a group, and what each leaves for the others.
struct Meeting {
    int there = 0;
    long round = 0;
    u32 word[2][32] = {};
};

struct Product {
    int count;  // sums of a thread
    bool scores;
    float* sum;
    u64 a, b;
    u32 weight[4][4];
    bool anew;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    int thread;
    bool done = false;
    std::deque<std::vector<Product>> groups;
    std::vector<Product> open;
};

struct Copy {
    TensorMap map;
    u32 target, barrier;
    int x, y, z;
};

static constexpr u32 FIRST = 1024;  // an address never is 0
static constexpr int ALL = GROUPS * 128 + 128;
static std::vector<u8> memory;
static std::map<u32, Barrier> barriers;
static std::map<int, Meeting> others, warps;
static Meeting everybody;
static std::deque<Copy> copies;
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static Fiber* current;
static std::mt19937 chance;
static long progress;
static bool late;  // copies arrive when all threads wait

static u8* at_address(u32 address) { return memory.data() + address; }
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

static u8* shared_memory() { return memory.data() + FIRST; }
static u32 shared_address() { return FIRST; }
static void __syncthreads() { meet(everybody, ALL); }
static void barrier_init(u32 barrier, u32 count) { barriers[barrier] = {(int)count, (int)count}; }
static void show_barriers() {}
static void show_to_copies() {}
static void wait_for_previous_kernel() {}
static void let_next_kernel_start() {}
template <int COUNT>
static void take_registers() {}
template <int COUNT>
static void keep_registers() {}
static void barrier_arrive(u32 barrier) {
    Barrier& found = barriers.at(barrier);
    ++progress, --found.pending, found.settle();
    maybe_yield();
}
static void barrier_expect(u32 barrier, u32 bytes) {
    barriers.at(barrier).bytes += bytes;
    barrier_arrive(barrier);
}
static void barrier_wait(u32 barrier, u32 parity) {
    maybe_yield();
    while (barriers.at(barrier).phase == parity) yield();
}
// A meeting of two groups, of which one does not wait.
static void await_others(int number) { meet(others[number], 256); }
static void tell_others(int number) {
    Meeting& meeting = others[number];
    ++progress;
    if (++meeting.there == 256) meeting.there = 0, ++meeting.round;
}
static void await_turn(int group) {
    if (TURNS) await_others(1 + group);
}
static void give_turn(int group) {
    if (TURNS) tell_others(1 + group);
}

static void bring_box(u32 target, const TensorMap& map, int x, int y, int z, u32 barrier) {
    copies.push_back({map, target, barrier, x, y, z});
    ++progress;
    maybe_yield();
}
static void arrive(const Copy& copy) {
    const TensorMap& map = copy.map;
    u32 place = copy.target;
    for (int k = 0; k < map.box[2]; ++k)
        for (int j = 0; j < map.box[1]; ++j)
            for (int i = 0; i < map.box[0]; ++i, place += 2) {
                int x = copy.x + i, y = copy.y + j, z = copy.z + k;
                bool inside = x < map.size[0] && y < map.size[1] && z < map.size[2];
                u16 value = inside ? map.data[x + y * map.stride[0] + z * map.stride[1]] : 0;
                std::memcpy(at_address(swizzled(place)), &value, 2);
            }
    Barrier& barrier = barriers.at(copy.barrier);
    ++progress, barrier.bytes -= place - copy.target, barrier.settle();
}

// What each lane of a warp leaves, to all of them.
static std::vector<u32> exchanged(u32 word) {
    Meeting& warp = warps[threadIdx.x / 32];
    const int turn = warp.round % 2;
    warp.word[turn][threadIdx.x % 32] = word;
    meet(warp, 32);
    return std::vector<u32>(warp.word[turn], warp.word[turn] + 32);
}
static u32 bits_of(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
static void __syncwarp() { exchanged(0); }
static u32 __shfl_xor_sync(u32, u32 value, int mask) { return exchanged(value)[threadIdx.x % 32 ^ mask]; }
static float __shfl_xor_sync(u32, float value, int mask) {
    return __uint_as_float(exchanged(bits_of(value))[threadIdx.x % 32 ^ mask]);
}
static int __shfl_up_sync(u32, int value, int step) { return exchanged(value)[max(0, threadIdx.x % 32 - step)]; }
static int __shfl_sync(u32, int value, int lane) { return exchanged(value)[lane]; }
static int __reduce_add_sync(u32, int value) {
    int sum = 0;
    for (u32 one : exchanged(value)) sum += (int)one;
    return sum;
}
static u32 __ballot_sync(u32, bool value) {
    u32 bits = 0, lane = 0;
    for (u32 one : exchanged(value)) bits |= one << lane++;
    return bits;
}
static bool __any_sync(u32 mask, bool value) { return __ballot_sync(mask, value) != 0; }
static int __ffs(u32 bits) { return __builtin_ffs((int)bits); }

static u64 descriptor(u32 address) { return (u64)address >> 4; }
static u64 values_descriptor(u32 address) { return (u64)address >> 4; }
static float element(u32 place) {
    u16 bits;
    std::memcpy(&bits, at_address(swizzled(place)), 2);
    return number(bits);
}

// A thread's elements of a product.
static void compute(const Product& product) {
    const int line = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, corner = threadIdx.x % 4 * 2;
    const u32 a = (u32)(product.a << 4), b = (u32)(product.b << 4);
    for (int i = 0; i < product.count; ++i) {
        const int lower = i / 2 % 2, column = i / 4 * 8 + corner + i % 2;
        float sum = product.anew ? 0 : product.sum[i];
        for (int k = 0; k < 16; ++k) {
            if (product.scores) {
                sum += element(a + (line + lower * 8) * 128 + k * 2) * element(b + column * 128 + k * 2);
            } else {
                const u32 pair = product.weight[k % 8 / 2][k / 8 * 2 + lower];
                const u32 value = b + column / 64 * KEYS * 128 + k * 128 + column % 64 * 2;
                sum += number(k % 2 ? pair >> 16 : pair & 0xFFFF) * element(value);
            }
        }
        product.sum[i] = sum;
    }
}
static void begin_multiplying() { exchanged(0); }
static void ask(int keys, float* sum, u64 a, u64 b, bool anew) {
    current->open.push_back({keys / 2, true, sum, a, b, {}, anew});
}
static void score_first(float (&sum)[KEYS / 2], u64 a, u64 b) { ask(KEYS, sum, a, b, true); }
static void score(float (&sum)[KEYS / 2], u64 a, u64 b) { ask(KEYS, sum, a, b, false); }
static void score_first_half(float (&sum)[KEYS / 2], u64 a, u64 b) { ask(KEYS / 2, sum, a, b, true); }
static void score_half(float (&sum)[KEYS / 2], u64 a, u64 b) { ask(KEYS / 2, sum, a, b, false); }
static void weigh(float (&sum)[D / 2], u32 a, u32 b, u32 c, u32 d, u64 values) {
    Product product = {D / 2, false, sum, 0, values, {}, false};
    const u32 mine[4] = {a, b, c, d};
    for (int word = 0; word < 4; ++word) {
        std::vector<u32> all = exchanged(mine[word]);
        for (int lane = 0; lane < 4; ++lane) product.weight[lane][word] = all[threadIdx.x % 32 / 4 * 4 + lane];
    }
    current->open.push_back(product);
}
static void compute_first_group() {
    for (const Product& product : current->groups.front()) compute(product);
    current->groups.pop_front();
}
static void close_group_of_products() {
    current->groups.push_back(std::move(current->open));
    current->open.clear();
    if (chance() % 2) compute_first_group();
}
template <int LEFT>
static void wait_for_groups_of_products() {
    maybe_yield();
    while ((int)current->groups.size() > LEFT) compute_first_group();
    exchanged(0);
}
static void settle(float&) {}

#include KERNEL

struct Arguments {
    TensorMap q, cache;
    u16* out;
    const int *block_table, *query_start, *seq_lens;
    int num_rows, num_blocks, max_seq_len, table_stride, out_token, out_head;
    float scale;
    int window;
    const float* sinks;
};
static const Arguments* arguments;

static void enter() {
    const Arguments& a = *arguments;
    extend(a.q, a.cache, a.out, a.block_table, a.query_start, a.seq_lens, a.num_rows, a.num_blocks, a.max_seq_len,
           a.table_stride, a.out_token, a.out_head, a.scale, a.window, a.sinks);
    ++progress;
    current->done = true;
}

static bool finish_program() {
    size_t left = fibers.size();
    for (long idle = 0; left;) {
        long before = progress;
        if (!copies.empty() && (late ? idle > (long)fibers.size() * 8 : chance() % 8 == 0)) {
            // Copies of one thread may arrive in any order.
            size_t which = chance() % copies.size();
            Copy copy = copies[which];
            copies.erase(copies.begin() + which);
            arrive(copy);
        }
        Fiber& fiber = fibers[chance() % fibers.size()];
        if (!fiber.done) {
            current = &fiber;
            threadIdx.x = fiber.thread;
            swapcontext(&scheduler, &fiber.context);
            left -= fiber.done;
        }
        idle = progress == before ? idle + 1 : 0;
        if (copies.empty() && idle > (long)fibers.size() * 64) return false;
    }
    return true;
}

// q [T, heads, D] of a wider row of numbers, out [T, heads, D], cache [blocks, 2, HK, TPB, D].
extern "C" int run(const u16* q, int q_token, const u16* cache, int num_blocks, u16* out, const int* block_table,
                   int table_stride, const int* query_start, const int* seq_lens, int num_rows, int num_tokens,
                   int max_seq_len, float scale, int window, const float* sinks, int shared_bytes, int programs, u32 seed) {
    const int heads = HK * G;
    const TensorMap queries = {q, {D, heads, num_tokens}, {D, q_token}, {64, G, 64 / G}};
    const TensorMap blocks = {cache, {D, 2 * HK * TPB, num_blocks}, {D, 2 * HK * TPB * D}, {64, TPB < KEYS ? TPB : KEYS, 1}};
    Arguments given = {queries, blocks, out, block_table, query_start, seq_lens, num_rows, num_blocks, max_seq_len,
                       table_stride, heads * D, D, scale, window, sinks};
    arguments = &given;
    chance.seed(seed);
    late = seed % 2;
    gridDim.x = programs;
    for (int program = 0; program < programs; ++program) {
        memory.assign(FIRST + shared_bytes, 0xFF);  // no number
        barriers.clear(), others.clear(), warps.clear(), copies.clear(), everybody = {};
        fibers = std::vector<Fiber>(ALL);
        blockIdx.x = program;
        for (int i = 0; i < ALL; ++i) {
            Fiber& fiber = fibers[i];
            fiber.thread = i;
            fiber.stack.reset(new char[1 << 16]);
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.get();
            fiber.context.uc_stack.ss_size = 1 << 16;
            fiber.context.uc_link = &scheduler;
            makecontext(&fiber.context, enter, 0);
        }
        if (!finish_program()) return 1;
    }
    return 0;
}
