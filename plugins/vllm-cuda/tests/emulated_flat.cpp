// `flat.cu` on the host: every thread of every program is a fiber, and a seed decides who runs next and when a copy arrives.
// Gives what the words of the kernel promise and no more, so that a kernel that relies on more gives a wrong result on some
// seed, and one that waits for what never comes is found.
//
// The kernel's text is included after this as KERNEL. `run` returns 0, or 1 where all threads wait for one another.

#include <ucontext.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <vector>

#define __device__
#define __host__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;

struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    u32 x, y;
};
struct alignas(16) uint4 {
    u32 x = 0, y = 0, z = 0, w = 0;
};
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }

struct Index {
    int x;
};
static Index threadIdx, blockIdx;

using std::max;
using std::min;

static float __uint_as_float(u32 bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
static u32 __float_as_uint(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
static float widened(u32 bits) { return __uint_as_float(bits << 16); }
static u32 rounded(float value) {
    const u32 bits = __float_as_uint(value);
    return value != value ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static u32 narrowed(float low, float high) { return rounded(low) | rounded(high) << 16; }
static float power_of_2(float x) { return std::exp2(x); }
static float rsqrtf(float x) { return 1 / std::sqrt(x); }

struct Barrier {
    int count = 0, pending = 0, bytes = 0;
    u32 phase = 0;
    void settle() {
        if (pending == 0 && bytes == 0) phase ^= 1, pending = count;
    }
};

constexpr int WORDS_LEFT = 6;

// Threads that wait for all of a group, and what each leaves for the others.
struct Meeting {
    int there = 0;
    long round = 0;
    std::array<u32, WORDS_LEFT> words[2][32] = {};
};

struct Program {
    std::vector<u8> memory;
    std::map<u32, Barrier> barriers;
    std::map<int, Meeting> warps;
    Meeting everybody, workers;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    int program, thread;
    bool done = false;
};

struct Copy {
    int program;
    u32 target, barrier;
    const u8* source;
    u32 bytes;
};

static constexpr u32 FIRST = 1024;  // an address never is 0
static std::vector<Program> programs;
static std::deque<Copy> copies;
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static Fiber* current;
static std::mt19937 chance;
static long progress;
static bool failed;

static Program& here() { return programs[blockIdx.x]; }
static void yield() { swapcontext(&current->context, &scheduler); }
static void maybe_yield() {
    if (chance() % 4 == 0) yield();
}
static void meet_all(Meeting& meeting, int all) {
    const long round = meeting.round;
    ++progress;
    if (++meeting.there == all) meeting.there = 0, ++meeting.round;
    while (meeting.round == round) yield();
}
template <int COUNT>
static void meet() {
    meet_all(here().workers, COUNT);
}
static void __syncthreads() { meet_all(here().everybody, (WARPS + BRINGERS) * 32); }

static u8* shared_memory() { return here().memory.data() + FIRST; }
static u32 shared_address() { return FIRST; }
static u32 address_of(const void* shared) { return (u32)((const u8*)shared - here().memory.data()); }
static void show_barriers() {}
static u64 read_once() { return 0; }
static void give_up() { failed = true; }

static void barrier_init(u32 barrier, u32 count) { here().barriers[barrier] = {(int)count, (int)count}; }
static void barrier_arrive(u32 barrier) {
    Barrier& found = here().barriers.at(barrier);
    ++progress, --found.pending, found.settle();
    maybe_yield();
}
static void barrier_expect(u32 barrier, u32 bytes) {
    here().barriers.at(barrier).bytes += bytes;
    barrier_arrive(barrier);
}
static void barrier_wait(u32 barrier, u32 parity) {
    maybe_yield();
    while (here().barriers.at(barrier).phase == parity) yield();
}
static void copy_row(u32 target, const void* source, u32 bytes, u32 barrier, u64) {
    copies.push_back({blockIdx.x, target, barrier, (const u8*)source, bytes});
    ++progress;
    maybe_yield();
}
static void arrive(const Copy& copy) {
    Program& program = programs[copy.program];
    std::memcpy(program.memory.data() + copy.target, copy.source, copy.bytes);
    Barrier& barrier = program.barriers.at(copy.barrier);
    ++progress, barrier.bytes -= copy.bytes, barrier.settle();
}

// A word that is there already is no progress to who looks again.
static void put_word(u64* where, u64 word) {
    *where = word;
    ++progress;
    maybe_yield();
}
static void get_words(u64& first, u64& second, const u64* where) {
    yield();
    first = where[0];
    yield();
    second = where[1];
}
static uint4 at_once(u32 address) {
    uint4 words;
    std::memcpy(&words, here().memory.data() + address, 16);
    return words;
}
static uint4 of_cache(const u16* address) {
    uint4 words;
    std::memcpy(&words, address, 16);
    return words;
}
static float2 two_of(const float* address) { return {address[0], address[1]}; }

typedef std::array<u32, WORDS_LEFT> Words;
static const Words (&exchanged(const Words& words))[32] {
    Meeting& warp = here().warps[threadIdx.x / 32];
    const int turn = warp.round % 2;
    warp.words[turn][threadIdx.x % 32] = words;
    meet_all(warp, 32);
    return warp.words[turn];
}
static void __syncwarp() { exchanged({}); }
static float __shfl_xor_sync(u32, float value, int mask) {
    return __uint_as_float(exchanged({__float_as_uint(value)})[threadIdx.x % 32 ^ mask][0]);
}
static float __shfl_down_sync(u32, float value, int step) {
    return __uint_as_float(exchanged({__float_as_uint(value)})[min(31, threadIdx.x % 32 + step)][0]);
}
static void mma(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const auto& words = exchanged({a0, a1, a2, a3, b0, b1});
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4, lower = i / 2, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            const u32 a = words[row * 4 + k % 8 / 2][lower + k / 8 * 2], b = words[column * 4 + k % 8 / 2][4 + k / 8];
            sum[i] += widened(k % 2 ? a >> 16 : a & 0xFFFF) * widened(k % 2 ? b >> 16 : b & 0xFFFF);
        }
    }
}

#include KERNEL

static const Given* given_all;

static void enter() {
    flat(*given_all);
    ++progress;
    current->done = true;
}

// `poison` fills shared memory, which holds anything when a program begins.
extern "C" int run(const Given* given, int shared_bytes, u8 poison, u32 seed) {
    constexpr int EACH_PROGRAM = (WARPS + BRINGERS) * 32;
    given_all = given, chance.seed(seed), progress = 0, failed = false;
    copies.clear(), fibers.clear(), programs.clear();
    programs.resize(GRID);
    for (Program& program : programs) program.memory.assign(FIRST + shared_bytes, poison);
    fibers.resize(GRID * EACH_PROGRAM);
    for (size_t index = 0; index < fibers.size(); ++index) {
        Fiber& fiber = fibers[index];
        fiber.program = (int)index / EACH_PROGRAM, fiber.thread = (int)index % EACH_PROGRAM;
        fiber.stack.reset(new char[64 << 10]);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get(), fiber.context.uc_stack.ss_size = 64 << 10;
        fiber.context.uc_link = &scheduler;
        makecontext(&fiber.context, enter, 0);
    }
    size_t left = fibers.size();
    for (long idle = 0; left && !failed;) {
        const long start = progress;
        if (!copies.empty() && chance() % 8 == 0) {
            const size_t which = chance() % copies.size();
            const Copy copy = copies[which];
            copies.erase(copies.begin() + which);
            arrive(copy);
        }
        Fiber& fiber = fibers[chance() % fibers.size()];
        if (!fiber.done) {
            current = &fiber;
            threadIdx.x = fiber.thread, blockIdx.x = fiber.program;
            swapcontext(&scheduler, &fiber.context);
            left -= fiber.done;
        }
        idle = progress == start ? idle + 1 : 0;
        if (copies.empty() && idle > (long)fibers.size() * 64) return 1;
    }
    return failed || !copies.empty();
}
