// Attention of rows of several queries over the paged KV, for Hopper (sm_90a), in the way of FlashAttention 3 (Shah et al.
// 2024): out [T, Hq, D] = softmax(q k^T * scale) v, causal. bfloat16 or float16, sums and statistics in float32. With WINDOW a
// query sees the last `window` keys up to its own, with SINKS a float32 logit of each head joins the sum of weights and has no
// value.
//
// A group of four warps has 64 lines: QUERIES queries of one row of the batch, each with the G heads that share a KV head.
// GROUPS such groups are a tile, and attend to KEYS keys at a time. Three warps more bring what they read: one finds the next
// tile (`extend_tiles.cuh`), one brings queries and keys, one values. Programs stay, and take tiles in turn.
//
// A group asks for the scores of its next keys, then for the sum of the values of its last ones, and weighs the former while
// the latter is computed. Groups ask in turn: one has the matrix units while another computes exponents.
//
// SPLIT: both groups have the same queries, and every other tile of keys each, in a stage of its own; the first puts the sums
// of both together. A step of few tiles then keeps twice as many multiprocessors at work.
//
// The cache is [blocks, 2, HK, TPB, D]. What lies beyond a row's length or before its window may be no number: such scores are
// masked, such values cleared before they are multiplied by weights of zero. Blocks beyond a row's keys are not read, copies
// fill in zeros.
//
// Comes after `chip.cuh`, `number.cuh`, `hopper.cuh`, `extend.cuh`, `extend_tiles.cuh`, which says what is defined, and
// `extend_bring.cuh`.

// The score of a key that is not seen.
#define NOTHING __uint_as_float(0xFF800000)

#define LOG2E 1.4426950408889634f

// What scores are multiplied by to be in units of log2, and how many keys a query sees.
struct Rules {
    float scale;
    int window;
};

// Two lines of a thread: the largest score so far, and its part of the sum of weights.
struct Statistics {
    float largest[2], total[2];
};

// Scores in registers become weights; `shrink` is what earlier sums are multiplied by. The thread's last columns are `limit`,
// where MASK. COUNT: how many.
template <bool MASK, int COUNT>
__device__ __forceinline__ void soften(
    float (&score)[SCORES], Statistics& statistics, float (&shrink)[2], const int (&limit)[2], const Rules& rules) {
    const float scale = rules.scale;
    if (MASK) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int column = i / 4 * 8 + i % 2, last = limit[i / 2 % 2];
            if (WINDOW ? (u32)(last - column) >= (u32)rules.window : column > last) score[i] = NOTHING;
        }
    }
#pragma unroll
    for (int line = 0; line < 2; ++line) {
        float highest = statistics.largest[line];
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) highest = fmaxf(highest, fmaxf(score[i + line * 2], score[i + line * 2 + 1]));
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
        // A line sees something of the first tile of keys, but perhaps nothing of the second group's first one, or of one that
        // another line's window begins in.
        const float base = (SPLIT || WINDOW) && highest == NOTHING ? 0 : highest * scale;
        shrink[line] = power_of_2(statistics.largest[line] * scale - base);
        statistics.largest[line] = highest;
        float even = 0, odd = 0;
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            float &first = score[i + line * 2], &second = score[i + line * 2 + 1];
            even += first = power_of_2(first * scale - base);
            odd += second = power_of_2(second * scale - base);
        }
        statistics.total[line] = statistics.total[line] * shrink[line] + (even + odd);
    }
}

// score [64, KEYS] = queries [64, D] @ keys [KEYS, D].T, asked for; HALF_TILE: of the first half of the keys.
template <bool HALF_TILE>
__device__ __forceinline__ void ask_for_scores(float (&sum)[SCORES], u32 queries, u32 keys) {
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        const u64 a = descriptor(queries) + k / 4 * (64 * 8) + k % 4 * 2;
        const u64 b = descriptor(keys) + k / 4 * (KEYS * 8) + k % 4 * 2;
        if (HALF_TILE) {
            k ? score_half(sum, a, b) : score_first_half(sum, a, b);
        } else {
            k ? score(sum, a, b) : score_first(sum, a, b);
        }
    }
    close_group_of_products();
}

// sum [64, D] += weight [64, KEYS] @ values [KEYS, D], asked for; HALF_TILE: of the first half of the keys.
template <bool HALF_TILE>
__device__ __forceinline__ void ask_for_values(float (&sum)[VALUES], const u32 (&weight)[WEIGHTS], u32 values) {
    const u64 b = values_descriptor(values);
#pragma unroll
    for (int k = 0; k < KEYS / (HALF_TILE ? 32 : 16); ++k) {
        weigh(sum, weight[k * 4], weight[k * 4 + 1], weight[k * 4 + 2], weight[k * 4 + 3], b + k * 128);
    }
    close_group_of_products();
}

template <int COUNT>
__device__ __forceinline__ void settle_all(float (&sum)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) settle(sum[i]);
}

// Four lanes with four words each, of one line: afterwards each lane has the words of one number from all.
__device__ __forceinline__ void transpose(u32 (&word)[4], int lane) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const bool upper = lane & step;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int low = step == 1 ? i * 2 : i, high = low + step;
            const u32 other = __shfl_xor_sync(~0u, upper ? word[low] : word[high], step);
            (upper ? word[low] : word[high]) = other;
        }
    }
}

struct Output {
    u16* out;
    int token_stride, head_stride;
    const float* sinks;
};

// Write a thread's two lines, divided by their sums of weights.
__device__ __forceinline__ void finish(
    const float (&sum)[VALUES], const Statistics& statistics, float scale, const Output& output, const Work& work, int band,
    int line, int lane) {
    // Else the compiler keeps what follows of them in registers all the time, has too few, and waits for every product; it does
    // so for seven heads of 64 where it is told this.
    if (D == 128 || G == 8 || WINDOW || SINKS) asm volatile("" : "+r"(line), "+r"(lane));
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
        float total = statistics.total[lower];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        const int mine = line + lower * 8, query = band * QUERIES + mine / G;
        const bool valid = mine < LINES && query < work.left;
        // Above what a power of 2 holds it is infinite: such a sink leaves nothing of the values.
        if (SINKS && valid) {
            total += power_of_2(output.sinks[work.head * G + mine % G] * LOG2E - statistics.largest[lower] * scale);
        }
        const float factor = 1.0f / total;
        u16* const target = output.out + (u64)(work.token + query) * output.token_stride +
                            (u64)(work.head * G + mine % G) * output.head_stride + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < VALUES; i += 16) {
            u32 word[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int at = i + j * 4 + lower * 2;
                word[j] = two_numbers(sum[at] * factor, sum[at + 1] * factor);
            }
            transpose(word, lane);
            if (valid) *(uint4*)(target + i * 2) = make_uint4(word[0], word[1], word[2], word[3]);
        }
    }
}

// A group, as each of its threads has it: its tile, where it is in the rings, scores of the tile of keys that it is at,
// weights of the one before, sums of values.
struct Group {
    const Places& at;
    const Output& output;
    const Rules rules;
    const int number, lane, line;
    const int band;  // of the lines
    Ring<SLOTS> queries = {};
    Ring<SPLIT ? 1 : STAGES> keys = {}, values = {};
    // Tiles of keys: the first that some queries see, the first after those that a window begins in, those up to which all
    // queries see all, those up to which some do; the last one has at most half of its keys, and another before it.
    int first, front, whole, tiles, position[2];
    bool short_end;
    float score[SCORES], sum[VALUES];
    u32 weight[WEIGHTS];
    Statistics statistics;

    __device__ __forceinline__ void take(const Work& work) {
        const int oldest = work.oldest + band * QUERIES, seen = min(oldest + QUERIES, work.keys);
        first = work.first / KEYS, tiles = (work.keys + KEYS - 1) / KEYS;
        short_end = !SPLIT && tiles - first > 1 && seen <= tiles * KEYS - KEYS / 2;
        whole = min(tiles - short_end, (oldest + 1) / KEYS);
        front = min(tiles - short_end, (first_seen(oldest + QUERIES - 1, rules.window) + KEYS - 1) / KEYS);
        position[0] = oldest + line / G, position[1] = oldest + (line + 8) / G;
        barrier_wait(at.q_full + (queries.slot * BANDS + band) * 8, queries.phase);
    }

    // Its stage of keys, and of values.
    __device__ __forceinline__ int key_stage() const { return SPLIT ? number : keys.slot; }
    __device__ __forceinline__ int value_stage() const { return SPLIT ? number : values.slot; }

    template <bool HALF_TILE>
    __device__ __forceinline__ void ask_for_next_scores() {
        barrier_wait(at.k_full + key_stage() * 8, keys.phase);
        await_turn(number);
        begin_multiplying();
        const u32 mine = at.q + (queries.slot * BANDS + band) * Q_BYTES;
        ask_for_scores<HALF_TILE>(score, mine, at.k + key_stage() * KV_BYTES);
    }

    template <bool HALF_TILE>
    __device__ __forceinline__ void ask_for_last_values() {
        barrier_wait(at.v_full + value_stage() * 8, values.phase);
        begin_multiplying();
        ask_for_values<HALF_TILE>(sum, weight, at.v + value_stage() * KV_BYTES);
    }

    template <int LEFT>
    __device__ __forceinline__ void wait_for_scores() {
        wait_for_groups_of_products<LEFT>();
        settle_all(score);
        if (lane == 0) barrier_arrive(at.k_empty + key_stage() * 8);
        keys.advance();
    }

    __device__ __forceinline__ void wait_for_values() {
        wait_for_groups_of_products<0>();
        settle_all(sum);
        if (lane == 0) barrier_arrive(at.v_empty + value_stage() * 8);
        values.advance();
    }

    template <bool MASK, bool HALF_TILE>
    __device__ __forceinline__ void soften_scores(int tile, float (&shrink)[2]) {
        const int corner = tile * KEYS + lane % 4 * 2, limit[2] = {position[0] - corner, position[1] - corner};
        soften<MASK, SCORES / (HALF_TILE ? 2 : 1)>(score, statistics, shrink, limit, rules);
    }

    __device__ __forceinline__ void soften_first_scores(int tile) {
        float shrink[2];
        statistics = {{NOTHING, NOTHING}, {0, 0}};
        // With masks in any case: with both ways the compiler has too few registers, and waits for every product.
        soften_scores<true, false>(tile, shrink);
    }

    __device__ __forceinline__ void narrow_scores() {
#pragma unroll
        for (int i = 0; i < WEIGHTS; ++i) weight[i] = two_numbers(score[i * 2], score[i * 2 + 1]);
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < VALUES; ++i) sum[i] = 0;
    }

    __device__ __forceinline__ void begin(int tile) {
        ask_for_next_scores<false>();
        give_turn((number + 1) % GROUPS);
        wait_for_scores<0>();
        soften_first_scores(tile);
        narrow_scores();
        clear();
    }

    template <bool MASK, bool HALF_TILE>
    __device__ __forceinline__ void step(int tile) {
        float shrink[2];
        ask_for_next_scores<HALF_TILE>();
        ask_for_last_values<false>();
        give_turn((number + 1) % GROUPS);
        wait_for_scores<1>();
        soften_scores<MASK, HALF_TILE>(tile, shrink);
        // Never so; else the compiler computes exponents after the values have come, and the matrix units wait for them.
        if (__any_sync(~0u, statistics.total[0] + statistics.total[1] < 0)) stop();
        wait_for_values();
        narrow_scores();
#pragma unroll
        for (int i = 0; i < VALUES; ++i) sum[i] *= shrink[i / 2 % 2];
    }

    // Every STRIDE-th tile of keys from `tile` up to `end`; the next one. With a third loop, of those that windows begin in, there
    // are too few registers again.
    template <int STRIDE>
    __device__ __forceinline__ int step_over(int tile, int end) {
        if (WINDOW) {
            for (; tile < end; tile += STRIDE) {
                if (tile >= front && tile < whole) {
                    step<false, false>(tile);
                } else {
                    step<true, false>(tile);
                }
            }
        } else {
            for (; tile < whole; tile += STRIDE) step<false, false>(tile);
            for (; tile < end; tile += STRIDE) step<true, false>(tile);
        }
        return tile;
    }

    // All tiles of keys after the first.
    __device__ __forceinline__ void go_on() {
        const int tile = step_over<1>(first + 1, tiles - short_end);
        if (short_end) step<true, true>(tile);
        give_queries_back();
    }

    __device__ __forceinline__ void give_queries_back() {
        if (lane == 0) barrier_arrive(at.q_empty + (queries.slot * BANDS + band) * 8);
        queries.advance();
    }

    // From the last tile of keys of one tile of queries to the first of the next.
    template <bool HALF_TILE>
    __device__ __forceinline__ void change(const Work& work, const Work& next) {
        take(next);
        ask_for_next_scores<false>();
        ask_for_last_values<HALF_TILE>();
        give_turn((number + 1) % GROUPS);
        wait_for_scores<1>();
        const Statistics last = statistics;
        soften_first_scores(first);
        wait_for_values();
        // Weights take half the registers that scores do: writing needs the rest.
        narrow_scores();
        finish(sum, last, rules.scale, output, work, band, line, lane);
        clear();
    }

    template <bool HALF_TILE>
    __device__ __forceinline__ void end(const Work& work) {
        ask_for_last_values<HALF_TILE>();
        wait_for_values();
        finish(sum, statistics, rules.scale, output, work, band, line, lane);
    }

    // Every other tile of keys from the group's first on; as many turns as the first group has.
    __device__ __forceinline__ void attend_to_half() {
        const int tile = first + number;
        if (tile < tiles) {
            begin(tile);
        } else {
            // The row's first tile is its last one: there are no keys for the second group.
            await_turn(number);
            give_turn(0);
            statistics = {{NOTHING, NOTHING}, {0, 0}};
            clear();
        }
        step_over<GROUPS>(tile + GROUPS, tiles);
        const int count = tiles - first;
        if (number < count) {
            ask_for_last_values<false>();
            wait_for_values();
        }
        if (number == 1 && count > 1 && count % 2) {
            await_turn(number);
            give_turn(0);
        }
        give_queries_back();
    }

    // A word of each thread of the second group, which the same thread of the first one takes.
    __device__ __forceinline__ float& left(int index) const { return at.sums[index * 128 + threadIdx.x % 128]; }

    __device__ __forceinline__ void leave_sums() {
        await_others(TAKEN);
#pragma unroll
        for (int i = 0; i < VALUES; ++i) left(i) = sum[i];
#pragma unroll
        for (int i = 0; i < 2; ++i) left(VALUES + i) = statistics.largest[i], left(VALUES + 2 + i) = statistics.total[i];
        tell_others(SUMMED);
    }

    __device__ __forceinline__ void take_sums() {
        float mine[2], theirs[2];
        await_others(SUMMED);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float other = left(VALUES + i), highest = fmaxf(statistics.largest[i], other);
            mine[i] = power_of_2((statistics.largest[i] - highest) * rules.scale);
            theirs[i] = power_of_2((other - highest) * rules.scale);
            statistics.total[i] = statistics.total[i] * mine[i] + left(VALUES + 2 + i) * theirs[i];
            statistics.largest[i] = highest;
        }
#pragma unroll
        for (int i = 0; i < VALUES; ++i) sum[i] = sum[i] * mine[i / 2 % 2] + left(i) * theirs[i / 2 % 2];
        tell_others(TAKEN);
    }
};

__device__ __forceinline__ void attend_in_halves(Group& group) {
    Ring<SLOTS> works;
    if (group.number == 0) tell_others(TAKEN);
    for (;;) {
        const Work work = next_work(group.at, works, group.lane);
        if (!work.keys) return;
        group.take(work);
        group.attend_to_half();
        if (group.number) {
            group.leave_sums();
        } else {
            group.take_sums();
            finish(group.sum, group.statistics, group.rules.scale, group.output, work, 0, group.line, group.lane);
        }
    }
}

__device__ __forceinline__ void attend(Group& group) {
    Ring<SLOTS> works;
    Work work = next_work(group.at, works, group.lane);
    if (!work.keys) return;
    group.take(work);
    group.begin(group.first);
    for (;;) {
        group.go_on();
        const Work next = next_work(group.at, works, group.lane);
        if (!next.keys) break;
        if (group.short_end) {
            group.change<true>(work, next);
        } else {
            group.change<false>(work, next);
        }
        work = next;
    }
    if (group.short_end) {
        group.end<true>(work);
    } else {
        group.end<false>(work);
    }
}

extern "C" __global__ void __launch_bounds__(WORKERS + 128, 1)
    extend(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap cache, u16* out, const int* block_table,
           const int* query_start, const int* seq_lens, int num_rows, int num_blocks, int max_seq_len, int table_stride,
           int out_token, int out_head, float scale, int window, const float* sinks) {
    const Places at = places();
    const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS * BANDS; ++i) {
            barrier_init(at.q_full + i * 8, 1), barrier_init(at.q_empty + i * 8, SPLIT ? GROUPS * 4 : 4);
        }
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(at.k_full + i * 8, 1), barrier_init(at.k_empty + i * 8, READERS);
            barrier_init(at.v_full + i * 8, 1), barrier_init(at.v_empty + i * 8, READERS);
        }
        barrier_init(at.v_landed, 1);
        for (int i = 0; i < SLOTS; ++i) {
            barrier_init(at.work_full + i * 8, 1), barrier_init(at.work_empty + i * 8, GROUPS * 4 + 2);
        }
        show_barriers();
    }
    __syncthreads();
    let_next_kernel_start();
    wait_for_previous_kernel();
    if (warp < WORKERS / 32) {
        take_registers<CONSUMER>();
        const Output output = {out, out_token, out_head, sinks};
        const Rules rules = {scale, window};
        const int number = warp / 4, line = warp % 4 * 16 + lane / 4;
        Group group = {at, output, rules, number, lane, line, SPLIT ? 0 : number};
        if (number == GROUPS - 1) give_turn(0);
        if constexpr (SPLIT) {
            attend_in_halves(group);
        } else {
            attend(group);
        }
    } else {
        keep_registers<PRODUCER>();
        const Cache from = {cache, block_table, table_stride, num_blocks};
        const Rows rows = {query_start, seq_lens, num_rows, (max_seq_len + KEYS - 1) / KEYS, window};
        if (warp == WORKERS / 32) find_all(at, rows, lane);
        if (warp == WORKERS / 32 + 1) produce_keys(at, q, from, lane);
        if (warp == WORKERS / 32 + 2) produce_values(at, from, window, lane);
    }
}
