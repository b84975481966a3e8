#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <climits>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#define VLLM_PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define VLLM_PAUSE() __asm__ __volatile__("yield")
#else
#define VLLM_PAUSE() ((void)0)
#endif

namespace vllm_cpu {
namespace {

constexpr int64_t MAX_THREADS = 256;

// About ten microseconds each: a caller waits one for the last tasks of its job, a thread ten for the next job, since waking a
// core that has gone idle takes as long as a small op. After the first it offers its core to others again and again.
constexpr int SPINS = 400, PATIENCE = 10, OFFERED = 32;

// Sleep while `word` is `value`; wake ups without a cause are fine.
void sleep_while(std::atomic<uint32_t> &word, uint32_t value) {
#ifdef __linux__
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
    (void)value;
    (void)word;
    usleep(50);
#endif
}

void wake_all(std::atomic<uint32_t> &word) {
#ifdef __linux__
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

// A job's tasks lie in lanes, one a thread, which takes those of its own first and then helps others: tasks that follow each
// other often read memory that does, and what the first asked for ahead is there for the second.
// `ticket` holds the job's number in its upper half and the lane's next task in its lower half: a thread that comes late sees
// another number and leaves the job alone. A job's fields are only trusted after a ticket of that job was taken.
// What threads write at different times lies on lines of its own.
struct alignas(64) Lane {
    std::atomic<uint64_t> ticket{0};
};

struct Pool {
    Lane lanes[MAX_THREADS];
    alignas(64) std::atomic<int64_t> n_tasks{0};
    std::atomic<int64_t> n_lanes{0};
    std::atomic<void (*)(void *, int64_t)> body{nullptr};
    std::atomic<void *> context{nullptr};
    alignas(64) std::atomic<uint32_t> done{0};
    alignas(64) std::atomic<uint32_t> job{0};
    alignas(64) std::atomic<uint32_t> sleepers{0};
    std::atomic<uint32_t> caller_sleeps{0};
    std::atomic<bool> busy{false};
    int64_t workers = 0;
};

Pool *pool = nullptr;
std::atomic<int64_t> wanted{0};
thread_local bool inside = false;
pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;

int64_t allowed_threads() {
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#endif
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? online : 1;
}

// Task that lane `lane` of `lanes` begins with.
int64_t first_of(int64_t n_tasks, int64_t lane, int64_t lanes) { return n_tasks * lane / lanes; }

// Take tasks of job `number` from one lane until there are none. False: the job is over.
bool work_lane(Pool &p, uint32_t number, int64_t lane) {
    std::atomic<uint64_t> &ticket = p.lanes[lane].ticket;
    for (;;) {
        uint64_t now = ticket.load(std::memory_order_acquire);
        // Whoever reads a later job's sizes here sees that job's closed tickets, too, and takes none.
        int64_t count = p.n_tasks.load(std::memory_order_acquire), lanes = p.n_lanes.load(std::memory_order_acquire);
        auto body = p.body.load(std::memory_order_relaxed);
        void *context = p.context.load(std::memory_order_relaxed);
        if (static_cast<uint32_t>(now >> 32) != number) return false;
        int64_t task = static_cast<int64_t>(now & 0xffffffffu);
        if (task >= first_of(count, lane + 1, lanes)) return true;
        if (!ticket.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) continue;
        body(context, task);
        if (static_cast<int64_t>(p.done.fetch_add(1, std::memory_order_seq_cst)) + 1 == count &&
            p.caller_sleeps.load(std::memory_order_seq_cst))
            wake_all(p.done);
    }
}

// Take tasks of job `number` until there are none, those of lane `own` first.
void work(Pool &p, uint32_t number, int64_t own) {
    const int64_t lanes = p.n_lanes.load(std::memory_order_relaxed);
    for (int64_t i = 0; i < lanes; ++i)
        if (!work_lane(p, number, (own + i) % lanes)) return;
}

struct Worker {
    Pool *pool;
    int64_t index;
};

void *worker(void *argument) {
    Worker self = *static_cast<Worker *>(argument);
    delete static_cast<Worker *>(argument);
    Pool &p = *self.pool;
    inside = true;
    uint32_t seen = 0;
    for (;;) {
        uint32_t number = p.job.load(std::memory_order_acquire);
        for (int spin = 0; number == seen && spin < PATIENCE * SPINS; ++spin) {
            VLLM_PAUSE();
            if (spin > SPINS && spin % OFFERED == 0) sched_yield();
            number = p.job.load(std::memory_order_acquire);
        }
        if (number == seen) {
            p.sleepers.fetch_add(1, std::memory_order_seq_cst);
            sleep_while(p.job, seen);
            p.sleepers.fetch_sub(1, std::memory_order_seq_cst);
            continue;
        }
        seen = number;
        if (self.index < num_threads() - 1) work(p, number, self.index + 1);
    }
    return nullptr;
}

// A child of fork() has none of the parent's threads: it starts its own when it needs them.
void forget() {
    pool = nullptr;
    inside = false;
    pthread_mutex_init(&starting, nullptr);
}

Pool *start() {
    pthread_mutex_lock(&starting);
    if (pool == nullptr) {
        static bool registered = false;
        if (!registered) registered = pthread_atfork(nullptr, nullptr, forget) == 0;
        pool = new Pool;
    }
    while (pool->workers < num_threads() - 1) {
        pthread_t thread;
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        auto *self = new Worker{pool, pool->workers};
        int failed = pthread_create(&thread, &attributes, worker, self);
        pthread_attr_destroy(&attributes);
        if (failed) {
            delete self;
            break;
        }
        ++pool->workers;
    }
    pthread_mutex_unlock(&starting);
    return pool;
}

struct Slots {
    void *memory[8] = {};
    size_t bytes[8] = {};
    ~Slots() {
        for (void *each : memory) free(each);
    }
};

thread_local Slots slots;

}  // namespace

void set_num_threads(int64_t count) {
    wanted.store(count > MAX_THREADS ? MAX_THREADS : count);
}

int64_t num_threads() {
    int64_t count = wanted.load(std::memory_order_relaxed);
    if (count > 0) return count;
    count = allowed_threads();
    set_num_threads(count);
    return wanted.load();
}

void run_tasks(int64_t n_tasks, void (*body)(void *, int64_t), void *context) {
    Pool *p = pool;
    bool alone = inside || n_tasks <= 1 || num_threads() <= 1;
    if (!alone && (p == nullptr || p->workers < num_threads() - 1)) p = start();
    if (alone || p->workers == 0 || p->busy.exchange(true, std::memory_order_acquire)) {
        for (int64_t task = 0; task < n_tasks; ++task) body(context, task);
        return;
    }
    inside = true;
    uint32_t number = p->job.load(std::memory_order_relaxed) + 1;
    const int64_t lanes = n_tasks < num_threads() ? n_tasks : num_threads();
    // Closed while the fields change: no ticket of the new job can be taken before its lane's last store.
    // Those of the last job too: whoever looks there late finds fields that are not its own.
    const int64_t before = p->n_lanes.load(std::memory_order_relaxed);
    for (int64_t lane = 0; lane < lanes || lane < before; ++lane)
        p->lanes[lane].ticket.store((static_cast<uint64_t>(number) << 32) | 0xffffffffu, std::memory_order_seq_cst);
    p->n_tasks.store(n_tasks, std::memory_order_release);
    p->n_lanes.store(lanes, std::memory_order_release);
    p->body.store(body, std::memory_order_relaxed);
    p->context.store(context, std::memory_order_relaxed);
    p->done.store(0, std::memory_order_relaxed);
    p->caller_sleeps.store(0, std::memory_order_relaxed);
    for (int64_t lane = 0; lane < lanes; ++lane) {
        const auto first = static_cast<uint64_t>(first_of(n_tasks, lane, lanes));
        p->lanes[lane].ticket.store(static_cast<uint64_t>(number) << 32 | first, std::memory_order_release);
    }
    p->job.store(number, std::memory_order_seq_cst);
    if (p->sleepers.load(std::memory_order_seq_cst)) wake_all(p->job);
    work(*p, number, 0);
    uint32_t done = p->done.load(std::memory_order_acquire);
    for (int spin = 0; done < n_tasks; ++spin) {
        if (spin < SPINS) {
            VLLM_PAUSE();
        } else {
            p->caller_sleeps.store(1, std::memory_order_seq_cst);
            uint32_t last = p->done.load(std::memory_order_seq_cst);
            if (last < n_tasks) sleep_while(p->done, last);
        }
        done = p->done.load(std::memory_order_acquire);
    }
    inside = false;
    p->busy.store(false, std::memory_order_release);
}

void *scratch(int slot, size_t bytes) {
    if (slots.bytes[slot] < bytes) {
        free(slots.memory[slot]);
        size_t rounded = (bytes + 4095) / 4096 * 4096;
        slots.memory[slot] = aligned_alloc(64, rounded);
        slots.bytes[slot] = slots.memory[slot] ? rounded : 0;
    }
    return slots.memory[slot];
}

}  // namespace vllm_cpu
