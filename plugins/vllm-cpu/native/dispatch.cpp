// The exported functions: each calls its kernel in the variant that was chosen when the library was loaded.
#include <string.h>

#include "cpu.h"
#include "threads.h"
#include "vllm/ops.h"

#define VLLM_EXPORT extern "C" __attribute__((visibility("default")))

namespace vllm_cpu {

struct Table {
#define VLLM_OP(name, parameters, arguments) int32_t(*name) parameters;
#include "ops.def"
#undef VLLM_OP
};

#define VLLM_OP(name, parameters, arguments) int32_t name parameters;
#ifdef VLLM_HAVE_BASELINE
namespace baseline {
#include "ops.def"
}
#endif
#ifdef VLLM_HAVE_NEON
namespace neon {
#include "ops.def"
}
#endif
#ifdef VLLM_HAVE_AVX2
namespace avx2 {
#include "ops.def"
}
#endif
#ifdef VLLM_HAVE_AVX512VNNI
namespace avx512vnni {
#include "ops.def"
}
#endif
#undef VLLM_OP

namespace {

struct Variant {
    const char *name;
    bool (*runs)();
    Table table;
};

// Best first. The last one runs everywhere.
const Variant variants[] = {
#ifdef VLLM_HAVE_AVX512VNNI
    {"avx512vnni", cpu_has_avx512vnni,
     {
#define VLLM_OP(name, parameters, arguments) avx512vnni::name,
#include "ops.def"
#undef VLLM_OP
     }},
#endif
#ifdef VLLM_HAVE_AVX2
    {"avx2", cpu_has_avx2,
     {
#define VLLM_OP(name, parameters, arguments) avx2::name,
#include "ops.def"
#undef VLLM_OP
     }},
#endif
#ifdef VLLM_HAVE_NEON
    {"neon", cpu_has_baseline,
     {
#define VLLM_OP(name, parameters, arguments) neon::name,
#include "ops.def"
#undef VLLM_OP
     }},
#endif
#ifdef VLLM_HAVE_BASELINE
    {"baseline", cpu_has_baseline,
     {
#define VLLM_OP(name, parameters, arguments) baseline::name,
#include "ops.def"
#undef VLLM_OP
     }},
#endif
};

const Variant *choose() {
    for (const Variant &variant : variants)
        if (variant.runs()) return &variant;
    return &variants[sizeof(variants) / sizeof(variants[0]) - 1];
}

const Variant *chosen = choose();

}  // namespace
}  // namespace vllm_cpu

VLLM_EXPORT uint32_t vllm_ops_abi_version(void) { return VLLM_OPS_ABI_VERSION; }
VLLM_EXPORT uint64_t vllm_ops_abi_size(void) { return sizeof(vllm_linear_call); }
VLLM_EXPORT const char *vllm_ops_variant(void) { return vllm_cpu::chosen->name; }

VLLM_EXPORT const char *vllm_ops_list(void) {
    return
#define VLLM_OP(name, parameters, arguments) #name " "
#include "ops.def"
#undef VLLM_OP
        ;
}

VLLM_EXPORT int32_t vllm_ops_use(const char *name) {
    for (const vllm_cpu::Variant &variant : vllm_cpu::variants)
        if (!strcmp(variant.name, name)) {
            if (!variant.runs()) return VLLM_UNSUPPORTED;
            vllm_cpu::chosen = &variant;
            return VLLM_OK;
        }
    return VLLM_INVALID;
}

VLLM_EXPORT int32_t vllm_ops_set_threads(int64_t count) {
    if (count < 0) return VLLM_INVALID;
    vllm_cpu::set_num_threads(count);
    return VLLM_OK;
}

#define VLLM_OP(name, parameters, arguments) \
    VLLM_EXPORT int32_t vllm_##name parameters { return vllm_cpu::chosen->table.name arguments; }
#include "ops.def"
#undef VLLM_OP
