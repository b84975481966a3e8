// `packed_wide.cu` on the host: every thread is a fiber, and a seed decides who runs next and when a copy arrives: those of one
// thread in order, bulk copies in any. Products are computed when they are waited for, as late as can be, and memory holds no
// numbers until something is brought, so that a kernel that reads too early or writes too soon gives a wrong result.
//
// The kernel's files are included after this as EPILOGUE_FILE, PACKED_FILE, FINISH_FILE and KERNEL. `run` returns 0, or 1 where
// all threads wait for one another.

#include <deque>

#include "emulated_packed.h"

static constexpr int ALL = (GROUPS + 1) * 128;
static constexpr u32 WHERE = 1 << 24;  // an address holds its block above

struct Counted {
    int count = 0, pending = 0, bytes = 0;
    u32 phase = 0;
    void settle() {
        if (pending == 0 && bytes == 0) phase ^= 1, pending = count;
    }
};

struct Block {
    std::unique_ptr<u8[]> whole;
    u8* memory;
    std::map<int, Meeting> barriers, warps;
    std::map<u32, Counted> counted;
    float operands[ALL / 32][16][16];
};

// A copy, or an arrival at a barrier where there is no target.
struct Event {
    u8* target;
    const void* source;
    u32 bytes, barrier;
    bool inside;
};

// Two rows of the weight for all rows of x.
struct Product {
    float* sum;
    float rows[2][16];
    u64 x;
    bool more;
    int group;
};

struct Own {
    std::deque<Event> events;
    std::vector<Product> products;
    int groups = 0;
};

static std::vector<Block> blocks;
static std::vector<Own> own;
static std::vector<Event> bulk;
static u32 locks[256];  // one a tile

static Block& block_of(u32 address) { return blocks[address / WHERE]; }
static Block& mine() { return blocks[blockIdx.x % SHARES]; }
static u8* at(u32 address) { return block_of(address).memory + address % WHERE; }
static u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

static u8* shared_memory() { return mine().memory; }
static u32 shared_address() { return blockIdx.x % SHARES * WHERE; }
static void __syncthreads() { meet(mine().barriers[0], ALL); }
template <int COUNT>
static void barrier(int number) {
    meet(mine().barriers[number], COUNT);
}
static void __syncwarp() { meet(mine().warps[threadIdx.x / 32], 32); }
static void wait_for_previous_kernel() {}
static void let_next_kernel_start() {}
template <int COUNT>
static void keep_registers() {}
template <int COUNT>
static void take_registers() {}

static void barrier_init(u32 barrier, u32 count) { block_of(barrier).counted[barrier] = {(int)count, (int)count}; }
static void show_barriers() {}
static void show_copies() {}
static void barrier_arrive(u32 barrier) {
    Counted& found = block_of(barrier).counted.at(barrier);
    ++progress, --found.pending, found.settle();
    maybe_yield();
}
static void barrier_expect(u32 barrier, u32 bytes) {
    block_of(barrier).counted.at(barrier).bytes += bytes;
    barrier_arrive(barrier);
}
static void barrier_wait(u32 barrier, u32 parity) {
    maybe_yield();
    while (block_of(barrier).counted.at(barrier).phase == parity) yield();
}

static const u16* kept(const u16* address) { return address; }
static u32 kept(u32 value) { return value; }
static void copy_bulk(u32 target, const u8* source, u32 bytes, u32 barrier) {
    bulk.push_back({at(target), source, bytes, barrier, true});
    maybe_yield();
}
static void copy_pair_or_clear(u32 target, const void* source, bool inside) {
    own[self()].events.push_back({at(target), source, 4, 0, inside});
    maybe_yield();
}
static void copy_pair(u32 target, const void* source) { copy_pair_or_clear(target, source, true); }
static void arrive_with_copies(u32 barrier) { own[self()].events.push_back({nullptr, nullptr, 0, barrier, true}); }
static void end_group() {}

static void bring(const Event& copy) {
    if (copy.inside) {
        std::memcpy(copy.target, copy.source, copy.bytes);
    } else {
        std::memset(copy.target, 0, copy.bytes);
    }
}
static void next_event(std::deque<Event>& events) {
    const Event event = events.front();
    events.pop_front();
    if (event.target) {
        bring(event);
    } else {
        Counted& found = block_of(event.barrier).counted.at(event.barrier);
        --found.pending, found.settle();
    }
    ++progress;
}
template <int LEFT>
static void wait_for_groups() {
    for (auto& events = own[self()].events; !events.empty();) next_event(events);
}

// Some of a thread's copies arrive, or a bulk copy. Seldom a thread is looked for that has any on their way: all others may be
// waiting for these.
static bool arrive() {
    bool any = false;
    const bool search = chance() % 512 == 0;
    if (search || chance() % 32 == 0) {
        size_t which = chance() % own.size();
        for (size_t i = 0; search && i < own.size() && own[which].events.empty(); ++i) which = (which + 1) % own.size();
        auto& events = own[which].events;
        any = !events.empty();
        for (int i = chance() % 64; i >= 0 && !events.empty(); --i) next_event(events);
    }
    if (!bulk.empty() && chance() % 2 == 0) {
        const size_t which = chance() % bulk.size();
        const Event copy = bulk[which];
        bulk.erase(bulk.begin() + which);
        bring(copy);
        Counted& found = block_of(copy.barrier).counted.at(copy.barrier);
        found.bytes -= copy.bytes, found.settle();
        any = true;
    }
    return any;
}

static u64 descriptor(u32 address) { return address >> 4; }
static void settle(float&) {}
static void settle(u32&) {}
static void begin_multiplying() {}

// PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16": rows and columns of the elements that a lane holds.
static void multiply(float (&sum)[TILES * 4], u32 a0, u32 a1, u32 a2, u32 a3, u64 x, bool more) {
    auto& operands = mine().operands[threadIdx.x / 32];
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const u32 words[4] = {a0, a1, a2, a3};
    for (int i = 0; i < 8; ++i) {
        operands[g + i / 2 % 2 * 8][t * 2 + i % 2 + i / 4 * 8] = number(words[i / 2] >> i % 2 * 16);
    }
    __syncwarp();
    Product product = {sum, {}, x, more, own[self()].groups};
    for (int half = 0; half < 2; ++half) std::memcpy(product.rows[half], operands[g + half * 8], sizeof operands[0]);
    own[self()].products.push_back(product);
    __syncwarp();
}
static void close_group_of_products() { ++own[self()].groups; }
static void compute(const Product& product) {
    for (int i = 0; i < TILES * 4; ++i) {
        const int token = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        if (!product.more) product.sum[i] = 0;
        for (int k = 0; k < 16; ++k) {
            u16 bits;
            std::memcpy(&bits, at(swizzled((u32)(product.x << 4) + token * 128 + k * 2)), 2);
            product.sum[i] += product.rows[i / 2 % 2][k] * number(bits);
        }
    }
}
template <int LEFT>
static void wait_for_groups_of_products() {
    std::vector<Product> left;
    for (const Product& product : own[self()].products) {
        if (product.group >= own[self()].groups - LEFT) {
            left.push_back(product);
        } else {
            compute(product);
        }
    }
    own[self()].products = left;
    __syncwarp();
}

template <bool OTHERS>
static void add(float (&total)[4], int, u32 address) {
    float value[4];
    std::memcpy(value, at(address), 16);
    for (int i = 0; i < 4; ++i) total[i] += value[i];
}

static void show_to_programs() {}
static void wait_for_programs(u32* lock, int rank, int count) {
    const u32 before = *lock;
    *lock += rank ? 1 : 0x80000000 - (count - 1);
    ++progress;
    while (((before ^ *lock) & 0x80000000) == 0) yield();
}
static float4 read_of_programs(const float* from) { return make_float4(from[0], from[1], from[2], from[3]); }

#include EPILOGUE_FILE
#include PACKED_FILE
#include FINISH_FILE
#include KERNEL

struct Arguments {
    const u8 *codes, *scales;
    const float* row_scale;
    const u16* x;
    void* out;
    const float* bias;
    int T, N, K, x_row;
};
static Arguments given;
static std::vector<float> parts;

static void work() {
    const Arguments& a = given;
    packed_wide(a.codes, a.scales, a.row_scale, a.x, a.out, a.bias, a.T, a.N, a.K, a.x_row, parts.data(), locks);
}

extern "C" int run(const u8* codes, const u8* scales, const float* row_scale, const u16* x, void* out, const float* bias,
                   int T, int N, int K, int shared_bytes, int programs, u32 seed) {
    given = {codes, scales, row_scale, x, out, bias, T, N, K, K};
    chance.seed(seed);
    parts.assign((size_t)programs * TOKENS * LINE, NAN);
    for (int first = 0; first < programs; first += SHARES) {
        blocks.clear(), blocks.resize(SHARES);
        own.assign(SHARES * ALL, {});
        bulk.clear();
        for (Block& block : blocks) block.whole = memory_of(shared_bytes, 1024, block.memory);
        if (!finish_cluster(first, SHARES, ALL, arrive)) return 1;
    }
    return 0;
}
