// What Hopper (sm_90a) has for kernels that bring their data themselves: bulk tensor copies, barriers that count their bytes,
// and products of warp groups. Comes after `chip.cuh`.
//
// PTX ISA: "cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor", "mbarrier", "createpolicy", "st.async", "stmatrix", "movmatrix",
// "ex2", "setmaxnreg", "Asynchronous Warpgroup Level Matrix Multiply-Accumulate".

struct alignas(64) TensorMap {
    u64 opaque[16];
};

__device__ __forceinline__ void prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// At a barrier of any program of the cluster, as `shared_address_of` gives it. Orders nothing between programs but products.
__device__ __forceinline__ void barrier_arrive_there(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    u32 done = 0;
    while (!done) {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    }
}

__device__ __forceinline__ void bring(u32 target, const TensorMap& map, int column, int row, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], "
        "[%4], %5;" ::"r"(target),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
        : "memory");
}

// The same of a matrix whose upper and lower half are pairs: eights of rows of the one and of the other in turns.
__device__ __forceinline__ void bring_pairs(u32 target, const TensorMap& map, int column, int eight, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(target),
        "l"(&map), "r"(column), "r"(0), "r"(eight), "r"(barrier), "l"(policy)
        : "memory");
}

// To the same place of all programs of the cluster that `mask` has a bit of; each one's own barrier counts what comes to it.
__device__ __forceinline__ void bring_to_all(
    u32 target, const TensorMap& map, int column, int row, u32 barrier, u64 policy, u16 mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], "
        "[%1, {%2, %3}], [%4], %5, %6;" ::"r"(target),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(mask), "l"(policy)
        : "memory");
}

// Of shared memory to a matrix; what lies outside of it is not written.
__device__ __forceinline__ void take(const TensorMap& map, int column, int row, u32 source) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(column),
                 "r"(row), "r"(source)
                 : "memory");
}

// The same, added to what is there.
__device__ __forceinline__ void take_and_add(const TensorMap& map, int column, int row, u32 source) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
                 "r"(column), "r"(row), "r"(source)
                 : "memory");
}

__device__ __forceinline__ void close_group_of_takes() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until shared memory has been read by all of this thread's groups but the last `LEFT`.
template <int LEFT>
__device__ __forceinline__ void wait_for_takes() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

// What this thread wrote to shared memory is there for copies that begin after it.
__device__ __forceinline__ void show_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four matrices of 8 x 8: thread i gives where row i % 8 of matrix i / 8 lies, and holds two numbers of row i / 4 of each.
__device__ __forceinline__ void store_matrices(u32 address, const u32 (&word)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(word[0]), "r"(word[1]),
                 "r"(word[2]), "r"(word[3])
                 : "memory");
}

// Of 8 x 8 numbers of a warp, two of row i / 4 in thread i.
__device__ __forceinline__ u32 transposed(u32 word) {
    u32 other;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(word));
    return other;
}

__device__ __forceinline__ u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ u64 read_again() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(policy));
    return policy;
}

// After barriers are set up: copies and the other programs of the cluster see them.
__device__ __forceinline__ void show_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// To shared memory of any program of the cluster, counted by a barrier there.
__device__ __forceinline__ void give(u32 address, const float* value, u32 barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     address),
                 "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3]), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void add_from_shared(float* sum, u32 address) {
    float a, b, c, d;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "r"(address) : "memory");
    sum[0] += a, sum[1] += b, sum[2] += c, sum[3] += d;
}

// Of all four warps of a group: each thread has so many registers from here on.
template <int COUNT>
__device__ __forceinline__ void keep_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

__device__ __forceinline__ void begin_multiplying() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void close_group_of_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// For all groups but the last `LEFT`.
template <int LEFT>
__device__ __forceinline__ void wait_for_groups_of_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// The compiler must not read a sum before this.
__device__ __forceinline__ void settle(float& sum) { asm volatile("" : "+f"(sum)::"memory"); }

// Shared memory descriptor of a tile whose rows of 128 bytes are swizzled: groups of 8 rows lie 1024 bytes apart.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ float power_of_2(float x) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}
