// `few_rows.cu` on the host. Its text, after what it needs, is included as KERNEL.

#define PROGRAMS PARTS
#define THREADS (GROUPS * 128 + (TRADE ? 128 : 64))
// The emulator has this name for those of the other operand, x.
static constexpr int WEIGHT_ROWS = ROWS;
#undef ROWS
#define ROWS TOKENS
#include "emulated.cpp"
#undef ROWS
#define ROWS WEIGHT_ROWS

// Eights of rows of both halves in turns; `rows` of the map are those of a half.
static void bring_pairs(u32 target, const TensorMap& map, int column, int eight, u32 barrier, u64 policy) {
    for (int i = 0; i < map.box_rows / 8; ++i) {
        TensorMap part = {map.data + (size_t)(i % 2) * map.rows * map.columns, map.rows, map.columns, 8};
        bring(target + i * 1024, part, column, (eight + i / 2) * 8, barrier, policy);
    }
}
template <int COUNT>
static void keep_registers() {}
template <int COUNT>
static void take_registers() {}
static u32 transposed(u32 word) {
    static u32 words[PROGRAMS][THREADS];
    u32* warp = words[blockIdx.x % PROGRAMS] + threadIdx.x / 32 * 32;
    const int lane = threadIdx.x % 32;
    warp[lane] = word;
    meet_warp();
    u32 found = 0;
    for (int i = 0; i < 2; ++i) {
        const int row = lane % 4 * 2 + i, column = lane / 4;
        found |= (warp[row * 4 + column / 2] >> column % 2 * 16 & 0xFFFF) << i * 16;
    }
    meet_warp();
    return found;
}

static void arrive_in_cluster() {
    ++progress;
    if (++cluster_meeting.there == PROGRAMS * THREADS) ++cluster_meeting.round;
    maybe_yield();
}
static void wait_in_cluster() {
    while (!cluster_meeting.round) yield();
}
static void give(u32 address, const float* value, u32 barrier) {
    std::memcpy(at(address), value, 16);
    Barrier& found = block_of(barrier).barriers.at(barrier);
    ++progress, found.bytes -= 16, found.settle();
    maybe_yield();
}
static Meeting announcements[PROGRAMS];
template <int COUNT>
static void announce() {
    Meeting& meeting = announcements[blockIdx.x % PROGRAMS];
    ++progress;
    if (++meeting.there == COUNT) meeting.there = 0, ++meeting.round;
}
template <int COUNT>
static void await() {
    meet(announcements[blockIdx.x % PROGRAMS], COUNT);
}

#include KERNEL

struct Arguments {
    TensorMap weight, x;
    void* out;
    const u16* bias;
    int T, N, stages, tiles, spans, x_rows;
};
static const Arguments* arguments;

static void work() {
    const Arguments& a = *arguments;
    few_rows(a.weight, a.x, a.out, a.bias, a.T, a.N, a.stages, a.tiles, a.spans, a.x_rows);
}

extern "C" int run(const u16* weight, const u16* x, void* out, const u16* bias, int T, int N, int K, int shared_bytes, int programs,
                   u32 seed) {
    const int x_rows = min(TOKENS, (T + 7) / 8 * 8), spans = (T + TOKENS - 1) / TOKENS;
    const int tiles = (N + COLUMNS - 1) / COLUMNS * spans;
    Arguments given = {{weight, N, K, WEIGHT_ROWS}, {x, T, K, x_rows}, out, bias, T, N, (K + 63) / 64, tiles, spans, x_rows};
    arguments = &given;
    return run_all(programs, shared_bytes, seed);
}
