// The library's thread pool. Kernels see `parallel` only.
//
// One pool a process, started at the first use. A caller works along with the pool's threads; tasks are handed out one by
// one, so that a thread whose core is taken by a neighbour delays what it holds and no more. Threads that wait spin for a
// few microseconds, then sleep. A call from inside a task, or while another thread uses the pool, runs on its own thread.
#ifndef VLLM_CPU_THREADS_H
#define VLLM_CPU_THREADS_H

#include <stddef.h>
#include <stdint.h>

namespace vllm_cpu {

// Threads that `parallel` uses at most, the caller included. 0: as many as this process may run at once.
void set_num_threads(int64_t count);
int64_t num_threads();

// Run `body(context, task)` for every task in 0 .. n_tasks - 1, in any order; returns when all are done.
void run_tasks(int64_t n_tasks, void (*body)(void *context, int64_t task), void *context);

// 64-byte aligned memory of the calling thread, kept for its next calls; `slot` 0 .. 7 are independent of each other.
// Whoever asks for a slot again may get the same bytes: an op's slots are its own until it returns, and tasks that run on
// the caller's thread share them with it. Null where there is no memory.
void *scratch(int slot, size_t bytes);

}  // namespace vllm_cpu

// Templates live in the variant's namespace: shared ones would be merged by the linker across instruction sets.
#ifdef VLLM_VARIANT
#include "variant.h"
VLLM_VARIANT_BEGIN

// parallel(n, [&](int64_t task) { ... })
template <class Body>
inline void parallel(int64_t n_tasks, const Body &body) {
    if (n_tasks == 1) {
        body(int64_t{0});
        return;
    }
    run_tasks(
        n_tasks, [](void *context, int64_t task) { (*static_cast<const Body *>(context))(task); },
        const_cast<void *>(static_cast<const void *>(&body)));
}

// parallel_ranges(size, grain, [&](int64_t begin, int64_t end) { ... }): about `each` ranges a thread, multiples of `grain`.
template <class Body>
inline void parallel_ranges(int64_t size, int64_t grain, const Body &body, int64_t each = 4) {
    int64_t pieces = num_threads() * each;
    int64_t step = (size + pieces - 1) / pieces;
    step = (step + grain - 1) / grain * grain;
    if (step >= size) {
        if (size > 0) body(int64_t{0}, size);
        return;
    }
    parallel((size + step - 1) / step, [&](int64_t task) {
        int64_t begin = task * step, end = begin + step < size ? begin + step : size;
        body(begin, end);
    });
}

VLLM_VARIANT_END
#endif

#endif
