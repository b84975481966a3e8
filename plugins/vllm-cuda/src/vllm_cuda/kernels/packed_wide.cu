// Product of many rows with a packed weight, for Hopper (sm_90a): out [T, N] = x [T, K] @ weight [N, K].T + bias. ADD: out +=
// that. GATED: weight is [2N, K], and out = f(gate) * up.
//
// A tile is ROWS rows of the weight for TOKENS rows of x. SHARES programs share a tile: each sums a part of K and leaves it in
// `parts`, and once all have, each adds a share of the columns of all parts, in one order. These programs wait for one another,
// so all of a launch must have room at once. GROUPS groups of four warps multiply: rows of the weight are M of wgmma, BANDS
// times 64 of them, and rows of x are N. A warp widens the codes of its own rows in registers, BATCH units of 32 inputs at a
// time, while the products of those before are on the way.
//
// A scale of a row goes to the sum. One of a group goes to the group's sum where it is APART; where that would be more work,
// it is multiplied into the numbers, as if they were widened alone.
//
// A group of warps beside these brings: codes and scales by bulk copies, x four bytes at a time, because the order in which a
// lane has its codes (`packed.cuh`) names the inputs of x in another way than products that read x from shared memory do.
//
// The weight does not depend on the kernel before: its ring is filled before `griddepcontrol.wait`, while that one drains.
//
// While products read the weight from registers, other warps' instructions hardly go on either: a stage takes the time of its
// products and that of widening one after the other. With both operands in shared memory it took no more than the longer one,
// but nobody put the weight there in that trial.
//
// Comes after `ampere.cuh`, `hopper.cuh`, `packed_hopper.cuh`, `epilogue.cuh`, `packed.cuh` and `packed_finish.cuh`. Defined at
// compilation, beside theirs: GROUPS, BANDS, TILES (8 rows of x each), SHARES, STAGES, and the function `multiply`, one
// wgmma of 64 x TOKENS x 16 with the weight in registers.

constexpr int WORKERS = GROUPS * 128, BRINGERS = 128, THREADS = WORKERS + BRINGERS;
constexpr int ROWS = GROUPS * BANDS * 64, COLUMNS = ROWS / HALVES;  // of the weight, and of out
constexpr int BLOCKS = ROWS / 16, HALF_BLOCKS = COLUMNS / 16, TOKENS = TILES * 8;
constexpr int OWN_BLOCKS = BLOCKS / (BRINGERS / 32);  // that a warp brings
constexpr int RECORD = CODE_BYTES + SCALE_BYTES;
constexpr int SPAN = 64;  // inputs of a row of x in 128 bytes, as far as the swizzle reaches
constexpr int X_BYTES = TOKENS * DEPTH * 2, W_BYTES = BLOCKS * RECORD;  // of a stage
constexpr int BATCH = 2;  // units that are multiplied together
constexpr int LINE = line_of(ROWS), STEPS = UNITS / BATCH * BANDS;
// Registers of a thread: where sums take many, those that bring give theirs away.
constexpr int USUAL = 65536 / THREADS / 8 * 8, FEWER = 56, LEFT = (USUAL * THREADS - FEWER * BRINGERS) / WORKERS / 8 * 8;
constexpr int MORE = LEFT < 240 ? LEFT : 240;
constexpr bool APART = SETS && SETS * TILES <= 8;  // multiplications of 4 SETS TILES sums, or of 32 pairs of numbers twice
constexpr bool UNEVEN = BANDS * TILES * (APART ? 2 : 1) > 24;
static_assert(ROWS % (16 * HALVES) == 0 && STEPS % 2 == 0, "a half is of whole blocks");

struct Rings {
    u32 x, weight, full, empty;
};

// What a lane brings of the weight: the records of one block of rows, if the warp has so many.
struct Weights {
    const u8 *codes, *scales;
};

__device__ __forceinline__ void bring_weight(const Rings& rings, int slot, int block, int lane, Weights& weights) {
    const u32 barrier = rings.full + slot * 8, place = rings.weight + slot * W_BYTES + block * RECORD;
    if (lane == 0) barrier_expect(barrier, OWN_BLOCKS * RECORD);
    __syncwarp();
    if (lane < OWN_BLOCKS) {
        copy_bulk(place, weights.codes, CODE_BYTES, barrier);
        if (SETS) copy_bulk(place + CODE_BYTES, weights.scales, SCALE_BYTES, barrier);
    }
    weights.codes += CODE_BYTES, weights.scales += SCALE_BYTES;
}

// A warp brings every fourth row, 128 bytes at a time: lane 16 u + 4 t + j of them has the inputs of word j of the eight that
// lane t of a product has of unit u, and product j / 2 of the unit finds them as word t of its piece j % 2. Pieces of 16 bytes
// are swizzled.
template <bool WHOLE>
__device__ __forceinline__ void bring_x(u32 target, const u16* from, u64 stride, int rows, int columns, int warp, int lane) {
    const int piece = lane / 16 * 4 + lane % 4, place = (piece ^ warp) * 16 + lane / 4 % 4 * 4;
    const u32 even = kept(target + warp * 128 + place), odd = kept(target + warp * 128 + (place ^ 64));
    const bool first = lane * 2 < columns, second = SPAN + lane * 2 < columns;
#pragma unroll
    for (int i = 0; i < TOKENS / 4; ++i) {
        const u32 row = (i % 2 ? odd : even) + i * 512;
        if (i * 4 < rows) {
            if (WHOLE) {
                copy_pair(row, from);
                copy_pair(row + TOKENS * 128, from + SPAN);
            } else {
                copy_pair_or_clear(row, from, first);
                copy_pair_or_clear(row + TOKENS * 128, from + SPAN, second);
            }
        }
        from = kept(from + stride);
    }
}

// Bring `count` stages, each as soon as its place is free. `from` is this lane's first word of x, `stride` that of its rows.
__device__ __forceinline__ void produce(
    const Rings& rings, Weights weights, const u16* from, u64 stride, int rows, int columns, int count, int warp, int lane) {
    const int block = warp * (OWN_BLOCKS) + lane;
    for (int stage = 0; stage < min(STAGES, count); ++stage) bring_weight(rings, stage, block, lane, weights);
    wait_for_previous_kernel();
    for (int index = 0, slot = 0, phase = 1; index < count; ++index) {
        if (index >= STAGES) {
            barrier_wait(rings.empty + slot * 8, phase);
            bring_weight(rings, slot, block, lane, weights);
        }
        const u32 target = rings.x + slot * X_BYTES;
        if (columns >= DEPTH) {
            bring_x<true>(target, from, stride, rows, columns, warp, lane);
        } else {
            bring_x<false>(target, from, stride, rows, columns, warp, lane);
        }
        arrive_with_copies(rings.full + slot * 8);
        from += DEPTH, columns -= DEPTH;
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
    end_group();
    wait_for_groups<0>();
}

// A scale as two numbers whose sum it is, as far as these go: of codes of eight bits, a product with the first is exact before
// it is rounded together with that with the rest.
struct Factor {
    u32 first, rest;
    float whole;
};

__device__ __forceinline__ Factor factor_of(float scale) {
    const u32 first = two_numbers(scale, scale);
    const float rest = scale - widened(first & 0xFFFF);
    return {first, two_numbers(rest, rest), scale};
}

__device__ __forceinline__ u32 scaled(u32 pair, const Factor& factor) {
    if (HALF) return two_numbers(number(pair) * factor.whole, number(pair >> 16) * factor.whole);
    if (SCALE == BFLOAT16) return fused(pair, factor.first, MINUS_NOTHING);
    return fused(pair, factor.first, fused(pair, factor.rest, MINUS_NOTHING));
}

typedef u32 Operand[4];

// What codes of rows g and g + 8 become numbers with.
struct Set {
    Factor low, high;
    u32 minus_low, minus_high;
};

__device__ __forceinline__ Set set_of(const u8* scales, int unit, int g) {
    const Scales found = scales_of(scales, unit / STEP, g);
    return {factor_of(found.low), factor_of(found.high), found.minus_low, found.minus_high};
}

// A unit of a warp's 16 rows as operands of two products.
__device__ __forceinline__ void operands_of(Operand (&operands)[2], const Codes& codes, int unit, const Set& set) {
    u32 low[4], high[4];
    widen(low, codes, unit, true, set.minus_low);
    widen(high, codes, unit, false, set.minus_high);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        operands[i / 2][i % 2 * 2] = SETS && !APART ? scaled(low[i], set.low) : low[i];
        operands[i / 2][i % 2 * 2 + 1] = SETS && !APART ? scaled(high[i], set.high) : high[i];
    }
}

typedef float Sums[BANDS][TILES * 4];

__device__ __forceinline__ void settle(Sums& sums) {
#pragma unroll
    for (int i = 0; i < BANDS * TILES * 4; ++i) settle(sums[i / (TILES * 4)][i % (TILES * 4)]);
}

// Where a unit's codes lie, in 512 bytes of a record.
__device__ __forceinline__ constexpr int piece_of(int unit) { return FORMAT == INT4 ? unit / 2 : unit; }

// Multiply `count` stages, and sum. `place` is that of the warp's first record in a stage of the weight.
__device__ __forceinline__ void consume(Sums& sum, const Rings& rings, const u8* place, int count, int lane) {
    constexpr int PIECES = piece_of(BATCH - 1) + 1;
    Operand operands[2][BATCH][2] = {};
    // Else the compiler clears sums while products are on the way, and waits for each of these.
    settle(sum);
    Sums part = {};  // of a group
    if (APART) settle(part);
    int slot = 0, last = 0;
    u32 phase = 0;
    for (int index = 0; index < count; ++index) {
        barrier_wait(rings.full + slot * 8, phase);
        show_copies();
        const u64 x = descriptor(rings.x + slot * X_BYTES);
        const u8* const stage = place + slot * W_BYTES;
        Codes codes[BANDS][PIECES];
        Set sets[BANDS];
#pragma unroll
        for (int i = 0; i < BANDS * PIECES; ++i) {
            codes[i / PIECES][i % PIECES] = *(const Codes*)(stage + i / PIECES * 4 * RECORD + i % PIECES * 512 + lane * 16);
        }
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int first = step / BANDS * BATCH, band = step % BANDS;
            const u8* const record = stage + band * 4 * RECORD;
            Operand(&mine)[BATCH][2] = operands[step % 2];
            Operand(&other)[BATCH][2] = operands[1 - step % 2];
#pragma unroll
            for (int unit = first; unit < first + BATCH; ++unit) {
                const Codes& held = codes[band][piece_of(unit) - piece_of(first)];
                if (unit % STEP == 0) sets[band] = set_of(record + CODE_BYTES, unit, lane / 4);
                operands_of(mine[unit - first], held, unit, sets[band]);
            }
            if (first + BATCH < UNITS && piece_of(first + BATCH) > piece_of(first)) {
#pragma unroll
                for (int i = 0; i < PIECES; ++i) {
                    codes[band][i] = *(const Codes*)(record + (piece_of(first + BATCH) + i) * 512 + lane * 16);
                }
            }
            begin_multiplying();
#pragma unroll
            for (int unit = first; unit < first + BATCH; ++unit) {
                const u64 from = x + unit / 2 * (TOKENS * 128 / 16) + unit % 2 * 4;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const Operand& a = mine[unit - first][i];
                    multiply(APART ? part[band] : sum[band], a[0], a[1], a[2], a[3], from + 2 * i, !APART || unit % STEP + i);
                }
            }
            close_group_of_products();
            wait_for_groups_of_products<1>();
#pragma unroll
            for (int i = 0; i < BATCH * 8; ++i) settle(other[i / 8][i / 4 % 2][i % 4]);
            if (APART && (first + BATCH) % STEP == 0 && band == BANDS - 1) {
                // The group's last products.
                wait_for_groups_of_products<0>();
                settle(part);
#pragma unroll
                for (int i = 0; i < BANDS * TILES * 4; ++i) {
                    const int of = i / (TILES * 4), j = i % (TILES * 4);
                    sum[of][j] += (j % 4 < 2 ? sets[of].low : sets[of].high).whole * part[of][j];
                }
            }
            // Products of the stage before are done.
            if (step == 0 && index > 0 && lane == 0) barrier_arrive(rings.empty + last * 8);
        }
        last = slot;
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
    wait_for_groups_of_products<0>();
    settle(sum);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    packed_wide(const u8* codes, const u8* scales, const float* row_scale, const u16* x, void* out, const float* bias, int T,
                int N, int K, int x_row, float* parts, u32* locks) {
    const u32 base = shared_address(), barriers = base + STAGES * (X_BYTES + W_BYTES);
    const Rings rings = {base, base + STAGES * X_BYTES, barriers, barriers + STAGES * 8};
    const int rank = blockIdx.x % SHARES, spans = (T + TOKENS - 1) / TOKENS;
    const int token = blockIdx.x / SHARES % spans * TOKENS, tile = blockIdx.x / SHARES / spans;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int records = (K + DEPTH - 1) / DEPTH, begin = records * rank / SHARES, count = records * (rank + 1) / SHARES - begin;

    let_next_kernel_start();
    if (threadIdx.x == WORKERS) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(rings.full + i * 8, BRINGERS + BRINGERS / 32);
            barrier_init(rings.empty + i * 8, GROUPS * 4);
        }
        show_barriers();
    }
    __syncthreads();
    if (threadIdx.x >= WORKERS) {
        if (UNEVEN) keep_registers<FEWER>();
        const int bringer = warp - GROUPS * 4, local = bringer * OWN_BLOCKS + lane;
        const int half = local / HALF_BLOCKS, block = tile * HALF_BLOCKS + local % HALF_BLOCKS;
        // Of a block that is not there the last one is read instead; nobody reads its sums.
        const u64 record = (u64)(half * (N / 16) + min(block, (N - 1) / 16)) * records + begin;
        const Weights weights = {codes + record * CODE_BYTES, scales + record * SCALE_BYTES};
        const u16* const from = x + (u64)(token + bringer) * x_row + begin * DEPTH + lane * 2;
        produce(rings, weights, from, (u64)x_row * 4, T - token - bringer, K - begin * DEPTH, count, bringer, lane);
        return;
    }
    if (UNEVEN) take_registers<MORE>();
    wait_for_previous_kernel();
    Sums sum = {};
    const int group = warp / 4, first = group * BANDS * 4 + warp % 4;
    consume(sum, rings, shared_memory() + STAGES * X_BYTES + first * RECORD, count, lane);
    barrier<WORKERS>(1);
    constexpr int PART = TOKENS * LINE;
    float* const others = parts + (u64)(blockIdx.x / SHARES * SHARES) * PART;
    float* const mine = SHARES > 1 ? others + rank * PART : (float*)shared_memory();
#pragma unroll
    for (int band = 0; band < BANDS; ++band) {
#pragma unroll
        for (int column = 0; column < TILES; ++column) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = (first + band * 4) * 16 + lane / 4 + i / 2 * 8;
                mine[(column * 8 + lane % 4 * 2 + i % 2) * LINE + row] = sum[band][column * 4 + i];
            }
        }
    }
    if (SHARES > 1) show_to_programs();
    barrier<WORKERS>(1);
    if (SHARES > 1) {
        if (threadIdx.x == 0) wait_for_programs(locks + blockIdx.x / SHARES, rank, SHARES);
        barrier<WORKERS>(1);
    }
    u8* const tokens = (u8*)out + (u64)token * N * (WIDE_OUT ? 4 : 2);
    finish<COLUMNS, WORKERS>(
        {tokens, bias, row_scale, min(TOKENS, T - token), N}, rank, SHARES, tile * COLUMNS,
        [&](float(&total)[4], int half, int token, int within) {
            const int place = token * LINE + half * COLUMNS + within;
            if (SHARES > 1) {
                float4 part[SHARES];
#pragma unroll
                for (int i = 0; i < SHARES; ++i) part[i] = read_of_programs(others + i * PART + place);
#pragma unroll
                for (int i = 0; i < SHARES; ++i) {
                    total[0] += part[i].x, total[1] += part[i].y, total[2] += part[i].z, total[3] += part[i].w;
                }
            } else {
                add<false>(total, 0, base + place * 4);
            }
        });
}
