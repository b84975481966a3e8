// What the product of many rows with a packed weight has beside the words of `hopper.cuh` and `ampere.cuh` (sm_90a): bulk
// copies of bytes in a row, copies of 4 bytes that arrive at a barrier, registers that warps give to others, and programs that
// wait for one another.
//
// PTX ISA: "cp.async.bulk", "cp.async", "cp.async.mbarrier.arrive", "fence.proxy.async".

__device__ __forceinline__ void copy_bulk(u32 target, const u8* source, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
                 "l"(source), "r"(bytes), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void copy_pair(u32 target, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

// Zeros where `inside` is false.
__device__ __forceinline__ void copy_pair_or_clear(u32 target, const void* source, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source), "r"(inside ? 4 : 0) : "memory");
}

// An address that is counted up, and not computed anew where it is needed.
__device__ __forceinline__ const u16* kept(const u16* address) {
    asm volatile("" : "+l"(address));
    return address;
}

// This thread arrives at a barrier once all its copies so far have.
__device__ __forceinline__ void arrive_with_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// What other threads' copies have written may be read by products from here on.
__device__ __forceinline__ void show_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// An operand is not written again before this.
__device__ __forceinline__ void settle(u32& operand) { asm volatile("" : "+r"(operand)::"memory"); }

// What this thread wrote is there for other programs that wait for it.
__device__ __forceinline__ void show_to_programs() { __threadfence(); }

// Until all of `count` programs are here. The first one makes up for the others, so that together they flip the highest bit of
// the lock and leave the rest as it was.
__device__ __forceinline__ void wait_for_programs(u32* lock, int rank, int count) {
    const u32 before = atomicAdd(lock, rank ? 1 : 0x80000000 - (count - 1));
    while (((before ^ *(volatile u32*)lock) & 0x80000000) == 0) __nanosleep(20);
    __threadfence();
}

// Of another program's memory, past the cache of this one's multiprocessor.
__device__ __forceinline__ float4 read_of_programs(const float* from) { return __ldcg((const float4*)from); }
