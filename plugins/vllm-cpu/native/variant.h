// Every file of kernels/ is compiled once for each instruction set, with VLLM_VARIANT set to its name (baseline, avx2,
// avx512vnni). All code of a kernel file stands between VLLM_VARIANT_BEGIN and VLLM_VARIANT_END and uses no
// templates or inline functions from outside (no standard C++ containers or algorithms): the linker keeps one copy of
// such a function, which may be one for another CPU. C headers and intrinsics are fine.
//
// An op is a function of the same name and type as in vllm/ops.h, without the prefix `vllm_`:
//     VLLM_VARIANT_BEGIN
//     int32_t rms_norm(const vllm_norm_args *args) { ... return VLLM_OK; }
//     VLLM_VARIANT_END
// and a line in ops.def, from which table and exported function are made.
#ifndef VLLM_CPU_VARIANT_H
#define VLLM_CPU_VARIANT_H

#include "vllm/ops.h"

#define VLLM_VARIANT_BEGIN  \
    namespace vllm_cpu {    \
    namespace VLLM_VARIANT {
#define VLLM_VARIANT_END \
    }                    \
    }

#ifdef VLLM_VARIANT
namespace vllm_cpu {
namespace VLLM_VARIANT {
#define VLLM_OP(name, parameters, arguments) int32_t name parameters;
#include "ops.def"
#undef VLLM_OP
}  // namespace VLLM_VARIANT
}  // namespace vllm_cpu
#endif

#endif
