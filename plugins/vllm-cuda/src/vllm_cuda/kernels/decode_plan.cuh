// Which keys a program of attention of single queries (`decode.cu`) attends to. All keys of all rows and KV heads are one
// sequence, in boxes of `KEYS`: row by row, in a row head by head. Every program has as many boxes of it, from wherever its
// part begins: a row and head whose boxes lie in several programs is put together in the end.
//
// A program takes those that it shares with others first, so that they are put together while others are still attended to.
//
// Defined at compilation: HK, ROWS (of a lane, a multiple of 4).

constexpr int KEYS = 16;  // of a box, which is the work of one warp
static_assert(ROWS % 4 == 0, "four are read at once");

struct Rows {
    const int *query_start, *seq_lens;
    int count, tokens, longest;  // rows, tokens of all of them, and keys that a row has place for
};

// A lane's rows, from `lane * ROWS` on: their lengths, 0 but for rows of one query, and tokens; boxes of all rows before, of
// these, and of all.
struct Lengths {
    int length[ROWS], token[ROWS];
    int before, own, total;
};

__device__ __forceinline__ int boxes_of(int length) { return (length + KEYS - 1) / KEYS; }

// Words `at` to `at + 3` of `count`, at a multiple of 16 bytes; 0 behind the last.
__device__ __forceinline__ int4 four_of(const int* words, int at, int count) {
    if (at + 4 <= count) return fetched((const int4*)(words + at));
    int4 four = {0, 0, 0, 0};
    if (at < count) four.x = fetched(words + at);
    if (at + 1 < count) four.y = fetched(words + at + 1);
    if (at + 2 < count) four.z = fetched(words + at + 2);
    return four;
}

// Read anew: lengths and tokens alone. Before the kernel before has ended they may be anything: nothing is found with them
// that is not there.
__device__ __forceinline__ Lengths lengths_of(const Rows& rows, int lane) {
    Lengths lengths;
    int start[ROWS + 1], length[ROWS];
    start[ROWS] = fetched(rows.query_start + min(lane * ROWS + ROWS, rows.count));
#pragma unroll
    for (int i = 0; i < ROWS; i += 4) {
        const int row = lane * ROWS + i;
        const int4 four = four_of(rows.seq_lens, row, rows.count), starts = four_of(rows.query_start, row, rows.count + 1);
        length[i] = four.x, length[i + 1] = four.y, length[i + 2] = four.z, length[i + 3] = four.w;
        start[i] = starts.x, start[i + 1] = starts.y, start[i + 2] = starts.z, start[i + 3] = starts.w;
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const bool single = lane * ROWS + i < rows.count && start[i + 1] - start[i] == 1;
        lengths.length[i] = single ? max(0, min(length[i], rows.longest)) : 0;
        lengths.token[i] = single ? max(0, min(start[i], rows.tokens - 1)) : 0;
    }
    return lengths;
}

__device__ __forceinline__ void add_up(Lengths& lengths, int lane) {
    lengths.own = 0;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) lengths.own += boxes_of(lengths.length[i]) * HK;
    int sum = lengths.own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    lengths.before = sum - lengths.own;
    lengths.total = __shfl_sync(~0u, sum, 31);
}

__device__ __forceinline__ bool are_same(const Lengths& a, const Lengths& b) {
    bool same = true;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) same &= a.length[i] == b.length[i] && a.token[i] == b.token[i];
    return __all_sync(~0u, same);
}

// A row and head: its length, token and first box in the sequence of all.
struct Unit {
    int row, head, length, token, offset;
};

__device__ __forceinline__ Unit unit_of(const Lengths& lengths, int box, int lane) {
    const bool mine = box >= lengths.before && box < lengths.before + lengths.own;
    const int owner = __ffs(__ballot_sync(~0u, mine)) - 1;
    int row = 0, length = 0, token = 0, offset = 0, at = lengths.before;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int boxes = boxes_of(lengths.length[i]) * HK;
        if (box >= at && box < at + boxes) {
            row = lane * ROWS + i, length = lengths.length[i], token = lengths.token[i], offset = at;
        }
        at += boxes;
    }
    row = __shfl_sync(~0u, row, owner), length = __shfl_sync(~0u, length, owner);
    token = __shfl_sync(~0u, token, owner), offset = __shfl_sync(~0u, offset, owner);
    const int boxes = boxes_of(length), head = (box - offset) / boxes;
    return {row, head, length, token, offset + head * boxes};
}

// Boxes of a row and head that a program has: `count` from `first` on. They are one of `pieces`, number `piece`; none: the
// end.
struct Segment {
    int row, head, length, token, first, count, piece, pieces;

    __device__ __forceinline__ bool is_last() const { return first + count == boxes_of(length); }
};

// Through a program's segments.
struct Walk {
    int quota, program, begin, end, at;
    bool begun;

    __device__ __forceinline__ void begin_with(const Lengths& lengths, int least) {
        quota = max((lengths.total + (int)gridDim.x - 1) / (int)gridDim.x, least), program = blockIdx.x, begun = false;
        // Parts behind the end are empty.
        begin = (int)min((long long)program * quota, (long long)lengths.total);
        end = min(begin + quota, lengths.total), at = begin;
    }

    __device__ __forceinline__ Segment segment(const Unit& unit, int from, int to) const {
        const int last = (unit.offset + boxes_of(unit.length) - 1) / quota, first = unit.offset / quota;
        return {unit.row,           unit.head, unit.length,     unit.token,
                from - unit.offset, to - from, program - first, last - first + 1};
    }

    // The one that it shares with the next program first, then in their order.
    __device__ __forceinline__ Segment advance(const Lengths& lengths, int lane) {
        if (!begun) {
            begun = true;
            if (begin < end) {
                const Unit unit = unit_of(lengths, end - 1, lane);
                if (unit.offset + boxes_of(unit.length) > end) {
                    const int to = end;
                    end = max(unit.offset, begin);
                    return segment(unit, end, to);
                }
            }
        }
        if (at >= end) return {0, 0, 0, 0, 0, 0, 0, 0};
        const Unit unit = unit_of(lengths, at, lane);
        const int from = at;
        at = unit.offset + boxes_of(unit.length);
        return segment(unit, from, at);
    }
};

// A program's segments, from the first on. `begin` may find other ones than those that are there when the kernel before has
// ended; `still_holds` says whether it did, and begins anew where not.
struct Plan {
    const Rows& rows;
    const int least, lane;
    Lengths lengths;
    Walk walk;
    Segment segment;

    __device__ __forceinline__ void begin() { lengths = lengths_of(rows, lane), begin_again(); }

    __device__ __forceinline__ bool still_holds() {
        const Lengths now = lengths_of(rows, lane);
        if (are_same(lengths, now)) return true;
        lengths = now, begin_again();
        return false;
    }

    __device__ __forceinline__ Segment next() { return walk.advance(lengths, lane); }

  private:
    __device__ __forceinline__ void begin_again() { add_up(lengths, lane), walk.begin_with(lengths, least), segment = next(); }
};
