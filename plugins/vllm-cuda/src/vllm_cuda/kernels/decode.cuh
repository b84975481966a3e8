// What attention of single queries (`decode.cu`) asks of Hopper (sm_90a) beside `ampere.cuh` and `hopper.cuh`, after which it
// comes: boxes of keys with their values, copies of bytes, matrices of shared memory in registers.
//
// PTX ISA: "cp.async.bulk.tensor", "cp.async.bulk", "ldmatrix", "ld", "atom".

// Keys and values of a box: [2, pieces, keys, 64] from row `y` of the heads of a block on.
__device__ __forceinline__ void bring_box(u32 target, const TensorMap& map, int y, int block, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%2, %3, %2, %2, %4}], [%5], %6;" ::"r"(target),
        "l"(&map), "r"(0), "r"(y), "r"(block), "r"(barrier), "l"(policy)
        : "memory");
}

// Both at multiples of 16 bytes, of which there are a multiple, too.
__device__ __forceinline__ void bring_bytes(u32 target, const void* source, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target), "l"(source),
        "r"(bytes), "r"(barrier)
        : "memory");
}

// Four matrices of 8 x 8: thread i gives where row i % 8 of matrix i / 8 lies, and gets two numbers of row i / 4 of each.
__device__ __forceinline__ void load_matrices(u32 (&word)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(address)
                 : "memory");
}

// The same of column i / 4 of each.
__device__ __forceinline__ void load_transposed(u32 (&word)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(address)
                 : "memory");
}

// What other programs or the kernel before write, from where all see the same. Read when it is asked for, and again each time.
__device__ __forceinline__ int fetched(const int* source) {
    int value;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
    return value;
}

__device__ __forceinline__ long long fetched(const long long* source) {
    long long value;
    asm volatile("ld.global.cg.s64 %0, [%1];" : "=l"(value) : "l"(source) : "memory");
    return value;
}

__device__ __forceinline__ float fetched(const float* source) {
    float value;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(source) : "memory");
    return value;
}

__device__ __forceinline__ int4 fetched(const int4* source) {
    int4 value;
    asm volatile("ld.global.cg.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(source)
                 : "memory");
    return value;
}

__device__ __forceinline__ float4 fetched(const float4* source) {
    float4 value;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "l"(source)
                 : "memory");
    return value;
}

// One more has come; how many had. What those wrote before is seen afterwards.
__device__ __forceinline__ int count_one(int* count) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
    return before;
}
