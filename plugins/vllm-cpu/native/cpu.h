// What the CPU and the operating system allow, asked once each.
#ifndef VLLM_CPU_CPU_H
#define VLLM_CPU_CPU_H

namespace vllm_cpu {

inline bool cpu_has_baseline() { return true; }  // also NEON, which every AArch64 has

#if defined(__x86_64__) && defined(__GNUC__)
// These builtins look at the registers that the system saves (xgetbv), too.
inline bool cpu_has_avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
inline bool cpu_has_avx512vnni() {
#ifdef VLLM_IMITATED
    return cpu_has_avx2();
#endif
    return cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}
#endif

}  // namespace vllm_cpu

#endif
