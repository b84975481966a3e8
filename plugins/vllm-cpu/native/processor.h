// What kernels ask of the CPU while they run, beyond what their variant was compiled for.
#ifndef VLLM_CPU_PROCESSOR_H
#define VLLM_CPU_PROCESSOR_H

namespace vllm_cpu {

bool cpu_has_avx512bf16();

// Tiles of bfloat16 and of bytes, where the system lets this process use them.
bool cpu_has_amx();
bool cpu_has_amx_int8();

}  // namespace vllm_cpu

#endif
