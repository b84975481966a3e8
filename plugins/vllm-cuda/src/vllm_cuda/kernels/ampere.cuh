// What all chips since Ampere (sm_80) have for kernels that bring their data themselves: asynchronous copies, products of a
// warp, and two numbers of 16 bits at a time. Comes after `chip.cuh`. Defined at compilation: HALF (numbers are float16, not
// bfloat16).
//
// PTX ISA: "cp.async", "bar", "mma", "Half Precision Floating Point Instructions", "cvt".

// Targets of copies are addresses in shared memory. They have no policy for the L2 cache: of one whose target is a sum with a
// uniform register the compiler of CUDA 13.0 makes an illegal instruction.
__device__ __forceinline__ void copy(u32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ void copy_if(bool wanted, u32 target, const void* source) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global.L2::128B [%0], [%1], 16; }" ::"r"(target),
                 "l"(source), "r"((u32)wanted)
                 : "memory");
}

// Zeros where `inside` is false.
__device__ __forceinline__ void copy_or_clear(u32 target, const void* source, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(inside ? 16 : 0) : "memory");
}

// A number that is kept in a register, and not computed again where it is needed.
__device__ __forceinline__ u32 kept(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Of some warps; number 0 is that of all.
template <int THREADS>
__device__ __forceinline__ void barrier(int number) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}

// sum [16, 8] = a [16, 16] @ b [16, 8] + before.
__device__ __forceinline__ void multiply(
    float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, const float* before) {
    if (HALF) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %11, %12, %13};"
            : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(before[0]), "f"(before[1]), "f"(before[2]),
              "f"(before[3]));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %11, %12, %13};"
            : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(before[0]), "f"(before[1]), "f"(before[2]),
              "f"(before[3]));
    }
}

// Add four sums from the shared memory of a program: of this one, or of one of the cluster.
template <bool OTHERS>
__device__ __forceinline__ void add(float (&total)[4], int rank, u32 address) {
    float a, b, c, d;
    if (OTHERS) {
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(a), "=f"(b), "=f"(c), "=f"(d)
                     : "r"(shared_address_of(rank, address))
                     : "memory");
    } else {
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(a), "=f"(b), "=f"(c), "=f"(d)
                     : "r"(address)
                     : "memory");
    }
    total[0] += a, total[1] += b, total[2] += c, total[3] += d;
}

// bits & mask | base, in one instruction: of two constants the compiler makes two.
__device__ __forceinline__ u32 put_into(u32 base, u32 bits, u32 mask) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(bits), "r"(mask), "r"(base));
    return result;
}

// a * b + c of two numbers each, rounded once.
__device__ __forceinline__ u32 fused(u32 a, u32 b, u32 c) {
    u32 result;
    if (HALF) {
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    } else {
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    }
    return result;
}

// Of a float16 in the lower half.
__device__ __forceinline__ float widened_half(u32 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)bits));
    return value;
}

__device__ __forceinline__ float number(u32 bits) { return HALF ? widened_half(bits) : widened(bits); }

__device__ __forceinline__ u32 two_numbers(float low, float high) {
    if (!HALF) return narrowed(low, high);
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
