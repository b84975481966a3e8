// What `flat.cu` says in PTX. Comes after `hopper.cuh`.
//
// PTX ISA: "bar", "st", "ld", "cp.async.bulk", "mma". Nothing here knows a shape.

// All COUNT threads that work, and not those that bring.
template <int COUNT>
__device__ __forceinline__ void meet() {
    asm volatile("bar.sync 1, %0;" ::"n"(COUNT) : "memory");
}

__device__ __forceinline__ void give_up() { __trap(); }

// Eight bytes that every program sees at once or not at all.
__device__ __forceinline__ void put_word(u64* where, u64 word) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(where), "l"(word) : "memory");
}

__device__ __forceinline__ void get_words(u64& first, u64& second, const u64* where) {
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(where) : "memory");
}

// To shared memory, counted by a barrier there.
__device__ __forceinline__ void copy_row(u32 target, const void* source, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(target),
        "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

__device__ __forceinline__ u32 address_of(const void* shared) { return (u32)__cvta_generic_to_shared(shared); }

__device__ __forceinline__ uint4 at_once(u32 address) {
    uint4 words;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(address)
                 : "memory");
    return words;
}

// Of the cache, which is read once a step.
__device__ __forceinline__ uint4 of_cache(const u16* address) {
    uint4 words;
    asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(address));
    return words;
}

// Of a norm's weight: on its way where this stands, and not where it is needed.
__device__ __forceinline__ float2 two_of(const float* address) {
    float2 two;
    asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(two.x), "=f"(two.y) : "l"(address));
    return two;
}

// sum [16, 8] += a [16, 16] @ b [16, 8], of bfloat16.
__device__ __forceinline__ void mma(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
