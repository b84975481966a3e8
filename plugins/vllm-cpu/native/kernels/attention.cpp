// paged_attention and encoder_attention. Oracle: vllm_core.ops.attention.
//
// Tasks are tiles of queries of one row for one KV head; where there are fewer than threads could take, one span of keys of
// such a tile each, and the spans are merged afterwards. attend.h keeps the bits the same.
#include "attend16.h"
#include "attend_words.h"
#include "processor.h"
#include "threads.h"

VLLM_VARIANT_BEGIN

#if defined(__AVX2__) || defined(__aarch64__)
constexpr bool HAS_VECTORS = true;
#else
constexpr bool HAS_VECTORS = false;
#endif

enum { TASKS = 0, PARTIAL = 1, WORK = 2, GATHERED = 3, PANELS = 4 };  // slots of scratch

// How a tile's products are made.
enum class By { FLOATS, TILES, WORDS };

struct Task {
    int64_t row, head;
    int64_t begin, count;  // queries of the row
    int64_t span_begin, span_end;
    int64_t partial;  // first of its spans in the partial sums; -1: merged and written by the task
};

// What paged_attention and encoder_attention have in common.
struct Call {
    void *out;
    const void *q;
    const int32_t *query_start;
    const int32_t *seq_lens;  // NULL: as many keys as queries
    int64_t out_stride, q_stride, rows, group, kv_heads, size, window;
    int32_t dtype;
    bool causal;
    float scale, cap;
    const float *sinks;  // [kv_heads * group], or NULL
    By by;               // of tiles of enough rows; others are made by floats
    int64_t width() const { return (size + VF - 1) / VF * VF; }
    int64_t queries(int64_t row) const { return query_start[row + 1] - query_start[row]; }
    int64_t length(int64_t row) const { return seq_lens ? seq_lens[row] : queries(row); }
    // Without a cache every tile gathers all its keys and values: a larger one makes more of them.
    int64_t tile() const {
        const int64_t most = by == By::TILES ? TILE_ROWS16 : by == By::WORDS ? TILE_ROWS_WORDS : causal ? TILE_ROWS : 4 * TILE_ROWS;
        return larger(1, most / group);
    }
    By by_rows(int64_t count) const {
        const int64_t least = by == By::TILES ? LEAST_ROWS16 : by == By::WORDS ? LEAST_ROWS_WORDS : 0;
        return count < least ? By::FLOATS : by;
    }
    // How numbers of 16 bits are multiplied, where some row has enough queries.
    void choose() {
#ifdef VLLM_TILES16
        if (dtype == VLLM_BFLOAT16 && size % 32 == 0 && cpu_has_amx() && cpu_has_avx512bf16()) by = By::TILES;
#endif
#ifdef VLLM_WORDS
        if (by == By::FLOATS && dtype == VLLM_BFLOAT16) by = By::WORDS;
#endif
        int64_t most = 0;
        for (int64_t row = 0; row < rows; ++row) most = larger(most, smaller(queries(row), tile()));
        by = by_rows(most * group);
    }
    // Rows of memory of a tile.
    int64_t rows_of_tile() const { return (tile() * group + TILE_SIDE - 1) / TILE_SIDE * TILE_SIDE; }
    int64_t first(int64_t position) const { return window ? larger(0, position - window + 1) : 0; }
};

// Rows' floats of a tile in scratch, cut into its arrays.
struct Work {
    float *q, *scores, *steps;
    int64_t *first, *last;
    Sums all, span;
    bool make(const Call &call) {
        int64_t rows = call.rows_of_tile(), width = call.width();
        int64_t floats = rows * (call.size + CHUNK + 2 * width + 5) + 16 * 9;
        char *base = static_cast<char *>(scratch(WORK, static_cast<size_t>(floats * 4 + rows * 16)));
        if (!base) return false;
        first = reinterpret_cast<int64_t *>(base);
        last = first + rows;
        float *at = reinterpret_cast<float *>(last + rows);
        auto take = [&](int64_t n) {
            float *here = at;
            at += (n + 15) / 16 * 16;
            return here;
        };
        scores = take(rows * CHUNK);
        q = take(rows * call.size);
        all.value = take(rows * width);
        span.value = take(rows * width);
        all.most = take(rows);
        all.weight = take(rows);
        span.most = take(rows);
        span.weight = take(rows);
        steps = take(rows);
        return true;
    }
    uint16_t *narrow() const { return reinterpret_cast<uint16_t *>(q); }
};

// Queries in float, times the scale; as they are, or as words, where `by` takes them so.
static void gather_queries(const Call &call, const Task &task, const Work &work, By by) {
    const int64_t item = item_bytes(call.dtype), begin = call.query_start[task.row] + task.begin;
    const int64_t before = call.length(task.row) - call.queries(task.row);
    for (int64_t i = 0; i < task.count; ++i) {
        const char *q = static_cast<const char *>(call.q) + ((begin + i) * call.q_stride + task.head * call.group * call.size) * item;
        const int64_t count = call.group * call.size;
        if (by == By::TILES) {
            memcpy(work.narrow() + i * count, q, static_cast<size_t>(count * item));
        } else if (by == By::FLOATS) {
            float *to = work.q + i * count;
            widen(to, q, call.dtype, count);
            for (int64_t j = 0; j < count; ++j) to[j] *= call.scale;
        }
#ifdef VLLM_WORDS
        for (int64_t r = i * call.group; by == By::WORDS && r < (i + 1) * call.group; ++r) {
            float *wide = work.q + call.rows_of_tile() * call.size / 2;  // words take half of the memory
            widen(wide, q + (r - i * call.group) * call.size * item, call.dtype, call.size);
            words_of_query(wide, call.size, call.scale, work.narrow() + r * call.size, work.steps + r);
        }
#endif
        int64_t position = before + task.begin + i;
        for (int64_t g = 0; g < call.group; ++g) {
            work.first[i * call.group + g] = call.causal ? call.first(position) : 0;
            work.last[i * call.group + g] = call.causal ? position : call.length(task.row) - 1;
        }
    }
}

// Sums of a tile before its spans are merged into them: nothing, or the sink of each row's head, which so counts once.
static void start(const Call &call, const Task &task, const Sums &sums) {
    const int64_t used = task.count * call.group;
    clear(sums, used, call.width());
    for (int64_t r = 0; call.sinks && r < used; ++r) {
        sums.most[r] = call.sinks[task.head * call.group + r % call.group];
        sums.weight[r] = 1.0f;
    }
}

static void write_rows(const Call &call, const Task &task, const Sums &sums) {
    const int64_t item = item_bytes(call.dtype), begin = call.query_start[task.row] + task.begin, width = call.width();
    for (int64_t i = 0; i < task.count; ++i)
        for (int64_t g = 0; g < call.group; ++g) {
            int64_t r = i * call.group + g;
            float *value = sums.value + r * width;
            scale_row(value, width, 1.0f / sums.weight[r]);
            int64_t at = (begin + i) * call.out_stride + (task.head * call.group + g) * call.size;
            narrow(static_cast<char *>(call.out) + at * item, value, call.dtype, call.size);
        }
}

static Sums partial_of(float *base, int64_t index, int64_t rows, int64_t width) {
    float *at = base + index * rows * (width + 2);
    return Sums{at, at + rows, at + 2 * rows};
}

// Run all tasks. `work(task, tile, span, sums)` attends one span.
template <class Attend>
static int32_t run(const Call &call, const Attend &attend) {
    const int64_t tile = call.tile(), width = call.width(), threads = num_threads();
    int64_t tiles = 0, spans = 0, keys = 0;
    for (int64_t row = 0; row < call.rows; ++row) {
        int64_t n = call.queries(row), length = call.length(row);
        if (n < 0 || length < n) return VLLM_INVALID;
        int64_t count = (n + tile - 1) / tile * call.kv_heads;
        tiles += count;
        spans += count * ((length + SPAN - 1) / SPAN);
        keys += count * length;
    }
    if (!tiles) return VLLM_OK;
    // Spans apart only where whole tiles would leave threads idle.
    const bool split = threads > 1 && tiles < 4 * threads && spans > tiles;
    const int64_t most = split ? spans : tiles, rows = call.rows_of_tile();
    Task *tasks = static_cast<Task *>(scratch(TASKS, static_cast<size_t>(most) * sizeof(Task)));
    float *partial = split ? static_cast<float *>(scratch(PARTIAL, static_cast<size_t>(spans * rows * (width + 2)) * 4)) : nullptr;
    if (!tasks || (split && !partial)) return VLLM_FAILED;
    int64_t count = 0, next = 0;
    for (int64_t row = call.rows - 1; row >= 0; --row) {
        int64_t n = call.queries(row), before = call.length(row) - n;
        for (int64_t begin = n ? (n - 1) / tile * tile : -1; begin >= 0; begin -= tile)  // the longest first
            for (int64_t head = 0; head < call.kv_heads; ++head) {
                int64_t queries = smaller(tile, n - begin);
                int64_t from = call.causal ? call.first(before + begin) / SPAN : 0;
                int64_t to = call.causal ? (before + begin + queries + SPAN - 1) / SPAN : (n + SPAN - 1) / SPAN;
                if (!split) {
                    tasks[count++] = Task{row, head, begin, queries, from, to, -1};
                } else {
                    for (int64_t span = from; span < to; ++span)
                        tasks[count++] = Task{row, head, begin, queries, span, span + 1, next++};
                }
            }
    }
    bool failed = false;
    auto one = [&](int64_t index) {
        const Task &task = tasks[index];
        Work work;
        if (!work.make(call)) {
            failed = true;
            return;
        }
        const int64_t used = task.count * call.group;
        const By by = call.by_rows(used);
        gather_queries(call, task, work, by);
        const bool narrow = by != By::FLOATS;
        Tile shape{narrow ? nullptr : work.q, narrow ? work.narrow() : nullptr, work.steps, work.first, work.last, work.scores,
                   used, call.size, width, call.cap};
        const int64_t low = work.first[0], high = work.last[used - 1] + 1;
        if (task.partial >= 0) {
            Sums sums = partial_of(partial, task.partial, rows, width);
            attend(task, shape, larger(low, task.span_begin * SPAN), smaller(high, task.span_end * SPAN), sums);
            return;
        }
        int64_t span = task.span_begin;
        // What the first span is merged into is nothing, where there is no sink.
        if (call.sinks || span == task.span_end)
            start(call, task, work.all);
        else
            attend(task, shape, larger(low, span * SPAN), smaller(high, (span + 1) * SPAN), work.all), ++span;
        for (; span < task.span_end; ++span) {
            attend(task, shape, larger(low, span * SPAN), smaller(high, (span + 1) * SPAN), work.span);
            merge(work.all, work.span, used, width);
        }
        write_rows(call, task, work.all);
    };
    // Below this a second thread costs more than it brings.
    if (keys * call.group * call.size * tile < 65536) {
        for (int64_t i = 0; i < count; ++i) one(i);
    } else {
        parallel(count, one);
    }
    if (failed) return VLLM_FAILED;
    for (int64_t i = 0; split && i < count;) {
        const Task &task = tasks[i];
        const int64_t used = task.count * call.group;
        Work work;
        if (!work.make(call)) return VLLM_FAILED;
        start(call, task, work.all);
        for (; i < count && tasks[i].row == task.row && tasks[i].head == task.head && tasks[i].begin == task.begin; ++i)
            merge(work.all, partial_of(partial, tasks[i].partial, rows, width), used, width);
        write_rows(call, task, work.all);
    }
    return VLLM_OK;
}

// Keys and values of a chunk as floats, keys [D, CHUNK], values [CHUNK, width]; zeros beyond D.
static void point(Chunk<Float32> &chunk, const float *keys, const float *values, int64_t width) {
    chunk.stride = CHUNK;
    for (int g = 0; g < GROUPS; ++g) chunk.keys[g] = keys + g * VF;
    for (int t = 0; t < CHUNK; ++t) chunk.values[t] = values + t * width;
}

static float *gathered(int64_t size, int64_t width) {
    return static_cast<float *>(scratch(GATHERED, static_cast<size_t>(CHUNK * (size + width)) * 4));
}

// Whether products of numbers of 16 bits may take an element's keys and values: it is as coarse as they are.
template <class E>
constexpr bool IS_NARROW = sizeof(typename E::T) == 2;

// Blocks in place: whole vectors of keys and values lie together.
template <class E>
static int32_t paged_in_place(const vllm_attention_args *a, const Call &call) {
    const vllm_kv *kv = a->kv;
    const int64_t size = kv->tokens_per_block;
    return run(call, [&](const Task &task, const Tile &tile, int64_t begin, int64_t end, const Sums &sums) {
        const int32_t *table = a->block_table + task.row * a->table_stride;
        Chunk<E> chunk;
        chunk.stride = size;
        auto fetch = [&](int64_t at, int from, int to, Chunk<E> &c) {
            for (int t = from / VF * VF; t < to; t += VF) {
                Plane<E> plane(kv, table[(at + t) / size], task.head);
                int64_t offset = (at + t) % size;
                c.keys[t / VF] = plane.keys + offset;
                for (int i = 0; i < VF; ++i) c.values[t + i] = plane.values + (offset + i) * call.size;
                if (E::scaled) {
                    memcpy(c.key_scale + t, plane.key_scale + offset, VF * 4);
                    memcpy(c.value_scale + t, plane.value_scale + offset, VF * 4);
                }
            }
        };
#ifdef VLLM_TILES16
        if constexpr (IS_NARROW<E>) {
            if (tile.narrow && call.by == By::TILES) {
                uint16_t *panels = static_cast<uint16_t *>(scratch(PANELS, static_cast<size_t>(panels16(call.size)) * 2));
                attend_span16<E>(tile, call.scale, begin, end, sums, fetch, chunk, panels);
                return;
            }
        }
#endif
#ifdef VLLM_WORDS
        if constexpr (IS_NARROW<E>) {
            if (tile.narrow) {
                int32_t *panels = static_cast<int32_t *>(scratch(PANELS, static_cast<size_t>(Words::numbers(call.size)) * 4));
                attend_span_words<E>(tile, begin, end, sums, fetch, chunk, panels);
                return;
            }
        }
#endif
        attend_span<E>(tile, begin, end, sums, fetch, chunk);
    });
}

// Any block and head size: a chunk is gathered as floats first.
template <class E>
static int32_t paged_gathered(const vllm_attention_args *a, const Call &call) {
    const vllm_kv *kv = a->kv;
    const int64_t size = kv->tokens_per_block, width = call.width();
    return run(call, [&](const Task &task, const Tile &tile, int64_t begin, int64_t end, const Sums &sums) {
        const int32_t *table = a->block_table + task.row * a->table_stride;
        float *keys = gathered(call.size, width), *values = keys + CHUNK * call.size;
        Chunk<Float32> chunk;
        point(chunk, keys, values, width);
        auto fetch = [&](int64_t at, int from, int to, Chunk<Float32> &) {
            for (int t = from / VF * VF; t < (to + VF - 1) / VF * VF; ++t) {
                bool seen = t >= from && t < to;
                Plane<E> plane(kv, seen ? table[(at + t) / size] : 0, task.head);
                int64_t offset = (at + t) % size;
                float key_scale = seen && E::scaled ? plane.key_scale[offset] : 1.0f;
                float value_scale = seen && E::scaled ? plane.value_scale[offset] : 1.0f;
                for (int64_t i = 0; i < call.size; ++i) {
                    keys[i * CHUNK + t] = seen ? E::get(plane.keys[i * size + offset]) * key_scale : 0.0f;
                    values[t * width + i] = seen ? E::get(plane.values[offset * call.size + i]) * value_scale : 0.0f;
                }
                for (int64_t i = call.size; i < width; ++i) values[t * width + i] = 0.0f;
            }
        };
        attend_span<Float32>(tile, begin, end, sums, fetch, chunk);
    });
}

static bool is_valid(const vllm_attention_args *a) {
    const vllm_kv *kv = a->kv;
    if (a->q_heads < 1 || a->q_heads % kv->num_heads || a->window < 0 || a->rows < 0) return false;
    for (int64_t row = 0; row < a->rows; ++row) {
        int64_t length = a->seq_lens[row], queries = a->query_start[row + 1] - a->query_start[row];
        if (queries < 0 || length < queries) return false;
        if (!queries) continue;
        int64_t first = a->window ? larger(0, length - queries - a->window + 1) : 0;
        int64_t end = (length + kv->tokens_per_block - 1) / kv->tokens_per_block;
        if (end > a->table_stride) return false;
        for (int64_t i = first / kv->tokens_per_block; i < end; ++i) {
            int32_t block = a->block_table[row * a->table_stride + i];
            if (block < 0 || block >= kv->num_blocks) return false;
        }
    }
    return true;
}

int32_t paged_attention(const vllm_attention_args *a) {
    const vllm_kv *kv = a->kv;
    if (!is_float(static_cast<int32_t>(a->dtype))) return VLLM_UNSUPPORTED;
    if (!is_valid(a)) return VLLM_INVALID;
    Call call{a->out, a->q, a->query_start, a->seq_lens, a->out_stride, a->q_stride, a->rows, a->q_heads / kv->num_heads,
              kv->num_heads, kv->head_size, a->window, static_cast<int32_t>(a->dtype), true, static_cast<float>(a->scale),
              static_cast<float>(a->soft_cap), a->sinks, By::FLOATS};
    const bool in_place = kv->tokens_per_block % VF == 0 && kv->head_size % VF == 0;
    return with_element(kv->dtype, [&](auto element) -> int32_t {
        typedef decltype(element) E;
        // Eight-bit floats are converted once a tile rather than once a row. The variant for any CPU always gathers: so it has one
        // set of kernels, not one for each element.
        if constexpr (HAS_VECTORS && (sizeof(typename E::T) > 1 || E::scaled)) {
            if (in_place) {
                if (IS_NARROW<E>) call.choose();
                return paged_in_place<E>(a, call);
            }
        }
        return paged_gathered<E>(a, call);
    });
}

int32_t encoder_attention(const vllm_encoder_args *a) {
    const int32_t dtype = static_cast<int32_t>(a->dtype);
    if (!is_float(dtype)) return VLLM_UNSUPPORTED;
    if (a->k_heads < 1 || a->q_heads % a->k_heads || a->rows < 0) return VLLM_INVALID;
    Call call{a->out, a->q, a->query_start, nullptr, a->out_stride, a->q_stride, a->rows, a->q_heads / a->k_heads, a->k_heads,
              a->head_size, 0, dtype, false, static_cast<float>(a->scale), 0.0f, nullptr, By::FLOATS};
    const int64_t width = call.width(), item = item_bytes(dtype);
    return run(call, [&](const Task &task, const Tile &tile, int64_t begin, int64_t end, const Sums &sums) {
        float *keys = gathered(call.size, width), *values = keys + CHUNK * call.size;
        Chunk<Float32> chunk;
        point(chunk, keys, values, width);
        const int64_t first = a->query_start[task.row];
        auto fetch = [&](int64_t at, int from, int to, Chunk<Float32> &) {
            for (int t = from; t < to; ++t) {
                float *row = values + t * width;
                int64_t token = first + at + t, head = task.head * call.size;
                widen(row, static_cast<const char *>(a->k) + (token * a->k_stride + head) * item, dtype, call.size);
                for (int64_t i = 0; i < call.size; ++i) keys[i * CHUNK + t] = row[i];
                widen(row, static_cast<const char *>(a->v) + (token * a->v_stride + head) * item, dtype, call.size);
                for (int64_t i = call.size; i < width; ++i) row[i] = 0.0f;
            }
            for (int t = to; t < (to + VF - 1) / VF * VF; ++t)
                for (int64_t i = 0; i < call.size; ++i) keys[i * CHUNK + t] = 0.0f;
        };
        attend_span<Float32>(tile, begin, end, sums, fetch, chunk);
    });
}

VLLM_VARIANT_END
