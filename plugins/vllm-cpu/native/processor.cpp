#include "processor.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace vllm_cpu {

#if defined(VLLM_IMITATED)

bool cpu_has_avx512bf16() { return true; }
bool cpu_has_amx() { return true; }
bool cpu_has_amx_int8() { return true; }

#elif defined(__x86_64__) && defined(__linux__)

namespace {

bool has_bf16() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}

// The system saves tiles only for processes that asked (Linux, x86/xstate): state 18 is their data.
bool has_tiles(int instructions) {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    constexpr int TILES = 24;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> instructions & 1) || !(d >> TILES & 1)) return false;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

}  // namespace

bool cpu_has_avx512bf16() {
    static const bool there = has_bf16();
    return there;
}

bool cpu_has_amx() {
    static const bool there = has_tiles(22);
    return there;
}

bool cpu_has_amx_int8() {
    static const bool there = has_tiles(25);
    return there;
}

#else

bool cpu_has_avx512bf16() { return false; }
bool cpu_has_amx() { return false; }
bool cpu_has_amx_int8() { return false; }

#endif

}  // namespace vllm_cpu
