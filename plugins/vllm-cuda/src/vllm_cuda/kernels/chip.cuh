// What kernels in CUDA C++ share: types, shared memory, programs that follow one another or work together, numbers.
//
// PTX ISA: "mapa", "barrier.cluster", "griddepcontrol", all of them since sm_90. A function that is not called costs nothing
// on a chip that does not have it.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// This program's shared memory, whose size the launch says.
__device__ __forceinline__ u8* shared_memory() {
    extern __shared__ __align__(1024) u8 memory[];
    return memory;
}

__device__ __forceinline__ u32 shared_address() { return (u32)__cvta_generic_to_shared(shared_memory()); }

// Of the same place in the shared memory of another program of the cluster.
__device__ __forceinline__ u32 shared_address_of(int rank, u32 address) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}

// One half of the barrier each.
__device__ __forceinline__ void arrive_in_cluster() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void wait_in_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// All COUNT threads of this program but those that announce wait for those that do.
template <int COUNT>
__device__ __forceinline__ void announce() {
    asm volatile("bar.arrive 2, %0;" ::"n"(COUNT) : "memory");
}
template <int COUNT>
__device__ __forceinline__ void await() {
    asm volatile("bar.sync 2, %0;" ::"n"(COUNT) : "memory");
}

__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ float widened(u32 bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ u32 narrowed(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
