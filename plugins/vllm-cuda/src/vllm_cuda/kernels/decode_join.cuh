// What attention of single queries (`decode.cu`) does with the sums of the warps that attend: one warp more puts them
// together, and writes them out, or, of rows that several programs share, leaves them; of these the last one to end puts
// together those of all, in their order.
//
// Comes after `decode_bring.cuh`.

#define NOTHING __uint_as_float(0xFF800000)

constexpr int FOURS = G * D / 4, ITEMS = (FOURS + 31) / 32;  // of four numbers of a head: of all, and of a lane
constexpr int AT_ONCE = ITEMS > 8 ? 1 : 12 / ITEMS > 6 ? 6 : 12 / ITEMS;  // pieces, whose numbers take registers

// Means of heads to be: sums relative to the largest score, and of weights.
struct Total {
    float4 sum;
    float largest, weights;

    __device__ __forceinline__ void shrink(float factor) {
        weights *= factor, sum.x *= factor, sum.y *= factor, sum.z *= factor, sum.w *= factor;
    }
    __device__ __forceinline__ void add(float weight, const float4& part, float its_weights) {
        weights += weight * its_weights;
        sum.x += weight * part.x, sum.y += weight * part.y, sum.z += weight * part.z, sum.w += weight * part.w;
    }
};

struct Joiner {
    const Places& at;
    const Given& given;
    const int lane;

    // A lane's items are whole; those beyond the last one repeat it, and are not written.
    __device__ __forceinline__ int item(int index) const { return min(index * 32 + lane, FOURS - 1); }
    __device__ __forceinline__ bool is_there(int index) const { return index * 32 + lane < FOURS; }
    __device__ __forceinline__ static int head_of(int item) { return item / (D / 4); }
    __device__ __forceinline__ static int column_of(int item) { return item % (D / 4) * 4; }

    __device__ __forceinline__ void write(const Work& work, int item, const Total& total) const {
        const float factor = 1.0f / total.weights;
        u16* const target = given.out + (u64)work.token * given.out_token +
                            (work.head * G + head_of(item)) * given.out_head + column_of(item);
        const float4& x = total.sum;
        *(uint2*)target = make_uint2(two_numbers(x.x * factor, x.y * factor), two_numbers(x.z * factor, x.w * factor));
    }

    __device__ __forceinline__ Total of_warps(int item) const {
        const int head = head_of(item);
        Total total = {{0, 0, 0, 0}, NOTHING, 0};
#pragma unroll
        for (int i = 0; i < WARPS; ++i) total.largest = fmaxf(total.largest, at.statistics[i * 16 + head]);
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            const float weight = power_of_2((at.statistics[i * 16 + head] - total.largest) * given.scale);
            const float4 part = *(const float4*)(at.sums + (i * G + head) * SUM_HEAD + column_of(item));
            total.add(weight, part, at.statistics[i * 16 + 8 + head]);
        }
        return total;
    }

    __device__ __forceinline__ float* piece(const Work& work, int index) const {
        // A program has one piece at the end of its part, whose row goes on, and one of a row that has begun before.
        return given.partial + ((u64)(blockIdx.x - work.piece + index) * 2 + (index == 0)) * PART;
    }

    __device__ __forceinline__ void join_pieces(const Work& work) const {
        Total total[ITEMS];
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) total[j] = {{0, 0, 0, 0}, NOTHING, 0};
        for (int first = 0; first < work.pieces; first += AT_ONCE) {
            float4 part[AT_ONCE][ITEMS];
            float largest[AT_ONCE][ITEMS], weights[AT_ONCE][ITEMS];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                // Pieces beyond the last one repeat it, with a weight of zero.
                const float* const from = piece(work, min(first + i, work.pieces - 1));
#pragma unroll
                for (int j = 0; j < ITEMS; ++j) {
                    part[i][j] = fetched((const float4*)(from + item(j) * 4));
                    largest[i][j] = fetched(from + G * D + head_of(item(j)));
                    weights[i][j] = fetched(from + G * D + 8 + head_of(item(j)));
                }
            }
#pragma unroll
            for (int j = 0; j < ITEMS; ++j) {
                float highest = total[j].largest;
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) highest = fmaxf(highest, largest[i][j]);
                total[j].shrink(power_of_2((total[j].largest - highest) * given.scale));
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    const float weight = first + i < work.pieces ? power_of_2((largest[i][j] - highest) * given.scale) : 0;
                    total[j].add(weight, part[i][j], weights[i][j]);
                }
                total[j].largest = highest;
            }
        }
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) {
            if (is_there(j)) write(work, item(j), total[j]);
        }
    }

    __device__ __forceinline__ void leave_piece(const Work& work, const Total (&total)[ITEMS]) const {
        float* const mine = piece(work, work.piece);
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) {
            if (!is_there(j)) continue;
            *(float4*)(mine + item(j) * 4) = total[j].sum;
            if (column_of(item(j)) == 0) {
                mine[G * D + head_of(item(j))] = total[j].largest, mine[G * D + 8 + head_of(item(j))] = total[j].weights;
            }
        }
        __threadfence();
        __syncwarp();
        int before = 0;
        if (lane == 0) before = count_one(given.counts + work.unit);
        before = __shfl_sync(~0u, before, 0);
        if (before != work.pieces - 1) return;
        __threadfence();
        join_pieces(work);
        if (lane == 0) given.counts[work.unit] = 0;
    }

    __device__ __forceinline__ void join_all() {
        Ring<SLOTS> ring;
        for (u32 left = 0;; left ^= 1) {
            barrier_wait(at.slot_full + ring.slot * 8, ring.phase);
            const Work work = *(const Work*)(at.slot_memory + ring.slot * SLOT_BYTES);
            if (!work.count) return;
            __syncwarp();
            if (lane == 0) barrier_arrive(at.slot_empty + ring.slot * 8);
            ring.advance();
            barrier_wait(at.sums_full, left);
            Total total[ITEMS];
#pragma unroll
            for (int j = 0; j < ITEMS; ++j) total[j] = of_warps(item(j));
            __syncwarp();
            if (lane == 0) barrier_arrive(at.sums_empty);
            if (work.pieces > 1) {
                leave_piece(work, total);
                continue;
            }
#pragma unroll
            for (int j = 0; j < ITEMS; ++j) {
                if (is_there(j)) write(work, item(j), total[j]);
            }
        }
    }
};
