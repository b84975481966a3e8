// `many_rows.cu` on the host, in bfloat16. Its text, after what it needs, is included as KERNEL.

#define PROGRAMS 2
#define THREADS 288
#include "emulated.cpp"

static float number(u32 bits) { return widened(bits); }
static u32 two_numbers(float low, float high) { return narrowed(low, high); }

#include KERNEL

struct Arguments {
    TensorMap weight, x, out;
    const u16* bias;
    int T, N, height, steps;
};
static const Arguments* arguments;

static void work() {
    const Arguments& a = *arguments;
    many_rows(a.weight, a.x, a.out, a.bias, a.T, a.N, a.height, a.steps);
}

extern "C" int run(const u16* weight, const u16* x, u16* out, const u16* bias, int T, int N, int K, int shared_bytes, int programs,
                   int height, u32 seed) {
    constexpr int halves = EPILOGUE == 2 ? 2 : 1, columns = ROWS / halves;
    Arguments given = {{weight, halves * N, K, ROWS / 2}, {x, T, K, 128}, {out, T, N, 16}, bias, T, N, height, (K + 63) / 64};
    const int tiles = (T + 255) / 256 * ((N + columns - 1) / columns);
    arguments = &given;
    return run_all(min(programs, PROGRAMS * tiles), shared_bytes, seed);
}
