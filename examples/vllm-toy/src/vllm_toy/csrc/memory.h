// Memory of the simulated devices, and pinned memory of the host.
//
// An address of a device is a number that the host's processor refuses: whoever follows it gets a real SIGSEGV. Only
// work that the device runs may ask for the bytes behind it, with `memory`.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <sys/mman.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_set>

namespace toy {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 8;
constexpr int kTemporary = -1;  // what ops allocate for themselves; others are pools of a Device of this process
constexpr size_t kMapped = 1 << 20;
constexpr unsigned char kGarbage = 0xC5;  // fresh temporaries and unfinished results hold this

struct Block {
  char* backing;  // nullptr while its pool is released
  char* saved;
  size_t size;
  c10::DeviceIndex device;
  int pool;
};

struct Memory {
  size_t total = 0, used = 0, peak = 0;
  std::map<int, size_t> used_by_pool;
  uintptr_t next_address = 0;
  std::unordered_set<Block*> blocks;

  void count(int pool, ptrdiff_t bytes) {
    used += bytes;
    used_by_pool[pool] += bytes;
    peak = std::max(peak, used);
  }
};

// Never destroyed, like all that lasts here: at the end of a process tensors and queued work may outlive it.
inline auto& memories = *new std::array<Memory, kMaxDevices>;
inline auto& memory_lock = *new std::recursive_mutex;
inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local int current_pool = kTemporary;
inline int64_t allocations = 0, fail_allocation = 0;
inline void (*finish_all)() = nullptr;  // set by queue.h: queued work keeps temporaries alive

inline char* acquire(size_t size, int pool) {
  void* found = size < kMapped ? std::aligned_alloc(64, (size + 63) / 64 * 64)
                               : mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(found != nullptr && found != MAP_FAILED, "the host has no ", size, " bytes for the toy");
  if (pool == kTemporary || size < kMapped) std::memset(found, pool == kTemporary ? kGarbage : 0, size);
  return static_cast<char*>(found);
}

inline void give_back(char* bytes, size_t size) {
  if (bytes == nullptr) return;
  if (size < kMapped) std::free(bytes); else munmap(bytes, size);
}

inline void reserve(c10::DeviceIndex device, int pool, size_t size) {
  auto& memory = memories[device];
  if (memory.used + size > memory.total && finish_all) finish_all();
  TORCH_CHECK_WITH(OutOfMemoryError, memory.used + size <= memory.total && ++allocations != fail_allocation, "toy:", int(device),
                   " is out of memory: ", size, " bytes asked for, ", memory.total - memory.used, " of ", memory.total, " free");
  memory.count(pool, ptrdiff_t(size));
}

inline void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  std::lock_guard<std::recursive_mutex> guard(memory_lock);
  auto& memory = memories[block->device];
  if (block->backing) memory.count(block->pool, -ptrdiff_t(block->size));
  give_back(block->backing, block->size);
  give_back(block->saved, block->size);
  memory.blocks.erase(block);
  delete block;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    c10::Device device(kDevice, current_device);
    if (size == 0) return {nullptr, nullptr, &free_block, device};
    std::lock_guard<std::recursive_mutex> guard(memory_lock);
    reserve(current_device, current_pool, size);
    auto& memory = memories[current_device];
    auto* block = new Block{acquire(size, current_pool), nullptr, size, current_device, current_pool};
    memory.blocks.insert(block);
    auto address = (uintptr_t(current_device + 1) << 52) + memory.next_address;  // above what any host maps
    memory.next_address += (size + 511) / 512 * 512;
    return {reinterpret_cast<void*>(address), block, &free_block, device};
  }
  void copy_data(void*, const void*, std::size_t) const override { TORCH_CHECK(false, "the toy copies through its queue"); }
};
inline auto& allocator = *new Allocator;

// The same bytes as a tensor of the host, for work that the device runs; keeps them alive.
inline at::Tensor memory(const at::Tensor& tensor) {
  auto storage = tensor.storage();
  auto* block = static_cast<Block*>(storage.data_ptr().get_context());
  TORCH_CHECK(block == nullptr || block->backing, "toy:", int(tensor.get_device()), " touched memory of a released pool");
  auto release = [](void* kept) { delete static_cast<c10::Storage*>(kept); };
  c10::DataPtr bytes(block ? block->backing : nullptr, new c10::Storage(storage), release, c10::Device(c10::kCPU));
  c10::Storage alias(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(bytes),
                                                           nullptr, false));
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(alias), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return result;
}

inline size_t release_pool(c10::DeviceIndex device, int pool, bool keep) {
  std::lock_guard<std::recursive_mutex> guard(memory_lock);
  size_t released = 0;
  for (auto* block : memories[device].blocks) {
    if (block->pool != pool || !block->backing) continue;
    if (keep) block->saved = block->backing; else give_back(block->backing, block->size);
    block->backing = nullptr;
    memories[device].count(pool, -ptrdiff_t(block->size));
    released += block->size;
  }
  return released;
}

inline void restore_pool(c10::DeviceIndex device, int pool) {
  std::lock_guard<std::recursive_mutex> guard(memory_lock);
  for (auto* block : memories[device].blocks) {
    if (block->pool != pool || block->backing) continue;
    reserve(device, pool, block->size);
    block->backing = block->saved ? std::exchange(block->saved, nullptr) : acquire(block->size, pool);
  }
}

// Host memory that the device copies from and to while the host does something else.
struct PinnedAllocator final : c10::Allocator {
  std::map<const char*, size_t> ranges;
  std::mutex lock;

  c10::DataPtr allocate(size_t size) override;
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
  bool contains(const void* pointer) {
    std::lock_guard<std::mutex> guard(lock);
    auto after = ranges.upper_bound(static_cast<const char*>(pointer));
    if (after == ranges.begin()) return false;
    auto [begin, size] = *--after;
    return pointer < begin + size;
  }
};
inline auto& pinned = *new PinnedAllocator;

inline c10::DataPtr PinnedAllocator::allocate(size_t size) {
  auto* bytes = static_cast<char*>(std::aligned_alloc(256, (size + 255) / 256 * 256 + (size == 0) * 256));
  std::lock_guard<std::mutex> guard(lock);
  ranges[bytes] = size;
  auto release = [](void* freed) {
    std::lock_guard<std::mutex> again(pinned.lock);
    pinned.ranges.erase(static_cast<const char*>(freed));
    std::free(freed);
  };
  return {bytes, bytes, release, c10::Device(c10::kCPU)};
}

}  // namespace toy
