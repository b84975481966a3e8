// Numbers of 16 bits. Comes after `chip.cuh`. Defined at compilation: HALF (they are float16, not bfloat16).

__device__ __forceinline__ float number(u32 bits) {
    if (!HALF) return widened(bits);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)bits));
    return value;
}

__device__ __forceinline__ u32 two_numbers(float low, float high) {
    if (!HALF) return narrowed(low, high);
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
