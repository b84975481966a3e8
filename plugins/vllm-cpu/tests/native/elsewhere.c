/* Calls one op of a native library with memory that came through a pipe, so that another machine's library can be tried by
 * an emulator of its instructions.
 *
 *     elsewhere LIBRARY < REQUEST > ANSWER
 *
 * A request, all little-endian: uint32 length and name of the function; uint32 kind (0: it takes a pointer to the first
 * buffer; 1: vllm_linear, whose seven arguments are the first buffer's int64); uint32 number of buffers, each uint64 size and
 * its bytes; uint32 number of pointers, each uint32 buffer and uint64 place where it stands, uint32 buffer that it points to.
 * The answer: int32 status, then the bytes of all buffers. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vllm/ops.h"

static void take(void *to, size_t size) {
    if (size && fread(to, 1, size, stdin) != size) exit(2);
}

static uint32_t take32(void) {
    uint32_t value;
    take(&value, 4);
    return value;
}

static uint64_t take64(void) {
    uint64_t value;
    take(&value, 8);
    return value;
}

int main(int count, char **arguments) {
    if (count != 2) return 2;
    void *library = dlopen(arguments[1], RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 3;
    }
    uint32_t (*version)(void) = (uint32_t(*)(void))dlsym(library, "vllm_ops_abi_version");
    const char *(*variant)(void) = (const char *(*)(void))dlsym(library, "vllm_ops_variant");
    if (!version || version() != VLLM_OPS_ABI_VERSION || !variant) return 4;
    fprintf(stderr, "%s\n", variant());
    char name[64] = {0};
    uint32_t length = take32();
    if (length >= sizeof(name)) return 2;
    take(name, length);
    uint32_t kind = take32(), buffers = take32();
    uint64_t *sizes = calloc(buffers, sizeof(uint64_t));
    char **memory = calloc(buffers, sizeof(char *));
    for (uint32_t i = 0; i < buffers; ++i) {
        sizes[i] = take64();
        memory[i] = aligned_alloc(64, (sizes[i] + 64) / 64 * 64);
        take(memory[i], sizes[i]);
    }
    for (uint32_t left = take32(); left; --left) {
        uint32_t buffer = take32();
        uint64_t place = take64();
        memcpy(memory[buffer] + place, &memory[take32()], sizeof(char *));
    }
    void *function = dlsym(library, name);
    if (!function) return 5;
    int32_t status;
    if (kind) {
        int64_t a[7];
        memcpy(a, memory[0], sizeof(a));
        status = ((int32_t(*)(const vllm_linear_call *, void *, int64_t, const void *, int64_t, int64_t, void *))function)(
            (const vllm_linear_call *)a[0], (void *)a[1], a[2], (const void *)a[3], a[4], a[5], NULL);
    } else {
        status = ((int32_t(*)(void *))function)(memory[0]);
    }
    fwrite(&status, 4, 1, stdout);
    for (uint32_t i = 0; i < buffers; ++i) fwrite(memory[i], 1, sizes[i], stdout);
    return 0;
}
