// What attention of prompts (`extend.cu`) asks of Hopper (sm_90a) beside `hopper.cuh`, after which it comes: boxes of three
// dimensions, turns. Defined at compilation: KEYS, TURNS.
//
// PTX ISA: "cp.async.bulk.tensor", "bar", "Strides" of the matrix descriptor.

__device__ __forceinline__ void bring_box(u32 target, const TensorMap& map, int x, int y, int z, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
            target),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
        : "memory");
}

// Barriers of two groups of four warps, of which one does not wait; number 0 is that of all threads.
__device__ __forceinline__ void await_others(int number) { asm volatile("bar.sync %0, 256;" ::"r"(number) : "memory"); }
__device__ __forceinline__ void tell_others(int number) { asm volatile("bar.arrive %0, 256;" ::"r"(number) : "memory"); }

__device__ __forceinline__ void await_turn(int group) {
    if (TURNS) await_others(1 + group);
}

__device__ __forceinline__ void give_turn(int group) {
    if (TURNS) tell_others(1 + group);
}

__device__ __forceinline__ void stop() { asm volatile("trap;"); }

// Shared memory descriptor of values: swizzled rows of 128 bytes are keys, groups of 8 keys lie 1024 bytes apart, the next 64
// values of all keys after these.
__device__ __forceinline__ u64 values_descriptor(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | ((u64)(KEYS * 8) << 16) | (64ull << 32) | (1ull << 62);
}
