// `few_rows.cu` on the host. Its text, after what it needs, is included as KERNEL.

#define PROGRAMS CLUSTER
#define THREADS (BANDS * 128 + 32)
#include "emulated.cpp"

#include KERNEL

struct Arguments {
    TensorMap weight, x;
    void* out;
    const u16* bias;
    int T, N, stages, tiles, x_rows;
};
static const Arguments* arguments;

static void work() {
    const Arguments& a = *arguments;
    few_rows(a.weight, a.x, a.out, a.bias, a.T, a.N, a.stages, a.tiles, a.x_rows);
}

extern "C" int run(const u16* weight, const u16* x, void* out, const u16* bias, int T, int N, int K, int shared_bytes, int programs,
                   u32 seed) {
    constexpr int halves = EPILOGUE == 2 ? 2 : 1, columns = ROWS / halves;
    int x_rows = (T + 7) / 8 * 8;
    Arguments given = {{weight, halves * N, K, columns}, {x, T, K, x_rows}, out, bias, T, N, (K + 63) / 64, (N + columns - 1) / columns, x_rows};
    arguments = &given;
    return run_all(programs, shared_bytes, seed);
}
