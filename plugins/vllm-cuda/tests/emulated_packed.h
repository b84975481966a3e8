// What the emulators of products with packed weights share: types and numbers as the kernels' words have them, and threads as
// fibers of which a seed decides who runs next.

#pragma once

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
// Of the numbers that are widened, a product and its sum are exact in float32; of others they are rounded twice.
static u32 fused(u32 a, u32 b, u32 c) {
    auto one = [](u32 a, u32 b, u32 c) { return number(a) * number(b) + number(c); };
    return two_numbers(one(a, b, c), one(a >> 16, b >> 16, c >> 16));
}

// Threads that wait for all of a group.
struct Meeting {
    int there = 0;
    long round = 0;
};

struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    int block, number;
    bool done = false;
};

static std::vector<Thread> threads;  // of a cluster
static Thread* current;
static ucontext_t scheduler;
static std::mt19937 chance;
static long progress;

static int self() { return current - threads.data(); }
static void yield() { swapcontext(&current->context, &scheduler); }
static void maybe_yield() {
    if (chance() % 8 == 0) yield();
}

static void meet(Meeting& meeting, int all) {
    long round = meeting.round;
    ++progress;
    if (++meeting.there == all) meeting.there = 0, ++meeting.round;
    while (meeting.round == round) yield();
}

static void work();
static void enter() {
    work();
    ++progress;
    current->done = true;
}

// Run `programs` programs from `first` until all of their threads are done; false where all wait for one another. `happens`
// lets something happen that no thread does, if there is anything.
static bool finish_cluster(int first, int programs, int each, bool (*happens)()) {
    threads = std::vector<Thread>(programs * each);
    for (int i = 0; i < programs * each; ++i) {
        Thread& one = threads[i];
        one.block = first + i / each, one.number = i % each;
        one.stack.reset(new char[1 << 16]);
        getcontext(&one.context);
        one.context.uc_stack.ss_sp = one.stack.get();
        one.context.uc_stack.ss_size = 1 << 16;
        one.context.uc_link = &scheduler;
        makecontext(&one.context, enter, 0);
    }
    size_t left = threads.size();
    for (long idle = 0; left;) {
        long before = progress;
        if (happens()) ++progress;
        Thread& one = threads[chance() % threads.size()];
        if (!one.done) {
            current = &one;
            threadIdx.x = one.number, blockIdx.x = one.block;
            swapcontext(&scheduler, &one.context);
            left -= one.done;
        }
        idle = progress == before ? idle + 1 : 0;
        if (idle > (long)threads.size() * 64) return false;
    }
    return true;
}

// Memory of a program, which holds no numbers.
static std::unique_ptr<u8[]> memory_of(int bytes, int alignment, u8*& aligned) {
    std::unique_ptr<u8[]> whole(new u8[bytes + alignment]);
    std::memset(whole.get(), 0xFF, bytes + alignment);
    aligned = whole.get() + (alignment - (uintptr_t)whole.get() % alignment) % alignment;
    return whole;
}
