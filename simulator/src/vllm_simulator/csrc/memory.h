// Memory of the simulated devices, and pinned memory of the host.
//
// An address of a device is a number that the host's processor refuses: whoever follows it gets a real SIGSEGV. Only
// work that the device runs may ask for the bytes behind it, with `memory`. SIM_KEY is the key under which torch knows
// the device: PrivateUse1, XPU or CUDA.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>

#include <cstdlib>
#include <map>
#include <mutex>

#ifndef SIM_KEY
#define SIM_KEY PrivateUse1
#endif

namespace sim {

constexpr auto kDevice = c10::DeviceType::SIM_KEY;
constexpr int kMaxDevices = 16;
constexpr size_t kMapped = 1 << 20;
constexpr unsigned char kGarbage = 0xC5;  // fresh memory and unfinished results hold this

constexpr int kPlain = 2;  // the storage format of ordinary tensors, as CANN numbers them

struct Block {
  char* backing;
  size_t size;
  c10::DeviceIndex device;
  int format = kPlain;
};

struct Memory {
  size_t total = 0, used = 0, peak = 0;
  uintptr_t next_address = 0;
  int64_t blocks = 0;

  void count(ptrdiff_t bytes) {
    used += bytes;
    blocks += bytes > 0 ? 1 : -1;
    peak = std::max(peak, used);
  }
};

// Never destroyed, like all that lasts here: at the end of a process tensors and queued work may outlive it.
inline auto& memories = *new std::array<Memory, kMaxDevices>;
inline auto& memory_lock = *new std::recursive_mutex;
inline auto& device_name = *new std::string("device");
inline thread_local c10::DeviceIndex current_device = 0;
inline int64_t allocations = 0, fail_allocation = 0;
inline void (*finish_all)() = nullptr;  // set by queue.h: queued work keeps temporaries alive

inline char* acquire(size_t size) {
  void* found = size < kMapped ? std::aligned_alloc(64, (size + 63) / 64 * 64)
                               : mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(found != nullptr && found != MAP_FAILED, "the host has no ", size, " bytes for the simulated device");
  std::memset(found, kGarbage, std::min(size, kMapped));
  return static_cast<char*>(found);
}

inline void give_back(char* bytes, size_t size) {
  if (size < kMapped) std::free(bytes); else munmap(bytes, size);
}

inline void free_block(void* context) {
  if (context == nullptr) return;
  auto* block = static_cast<Block*>(context);
  std::lock_guard<std::recursive_mutex> guard(memory_lock);
  memories[block->device].count(-ptrdiff_t(block->size));
  give_back(block->backing, block->size);
  delete block;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    c10::Device device(kDevice, current_device);
    if (size == 0) return {nullptr, nullptr, &free_block, device};
    std::lock_guard<std::recursive_mutex> guard(memory_lock);
    auto& memory = memories[current_device];
    if (memory.used + size > memory.total && finish_all) finish_all();
    TORCH_CHECK_WITH(OutOfMemoryError, memory.used + size <= memory.total && ++allocations != fail_allocation,
                     device_name, " out of memory. Tried to allocate ", size, " bytes. ", device_name, ":", int(current_device), " has a total capacity of ",
                     memory.total, " bytes of which ", memory.total - memory.used, " bytes is free.");
    memory.count(ptrdiff_t(size));
    auto* block = new Block{acquire(size), size, current_device};
    auto address = (uintptr_t(current_device + 1) << 52) + memory.next_address;  // above what any host maps
    memory.next_address += (size + 511) / 512 * 512;
    return {reinterpret_cast<void*>(address), block, &free_block, device};
  }
  void copy_data(void*, const void*, std::size_t) const override { TORCH_CHECK(false, "the device copies through its queue"); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override { if (finish_all) finish_all(); }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* one : {&stats.allocated_bytes[0], &stats.reserved_bytes[0], &stats.active_bytes[0]}) {
      one->current = int64_t(memories[device].used);
      one->peak = int64_t(memories[device].peak);
    }
    stats.allocation[0].current = memories[device].blocks;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { memories[device].peak = memories[device].used; }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {memories[device].total - memories[device].used, memories[device].total};
  }
};
inline auto& allocator = *new Allocator;

inline bool formatted = false;  // whether any tensor has another format

inline Block* block_of(const at::Tensor& tensor) { return static_cast<Block*>(tensor.storage().data_ptr().get_context()); }

inline int format_of(const at::Tensor& tensor) {
  auto* block = block_of(tensor);
  return block ? block->format : kPlain;
}

// The same bytes as a tensor of the host, for work that the device runs; keeps them alive.
inline at::Tensor memory(const at::Tensor& tensor) {
  auto storage = tensor.storage();
  auto* block = block_of(tensor);
  auto release = [](void* kept) { delete static_cast<c10::Storage*>(kept); };
  c10::DataPtr bytes(block ? block->backing : nullptr, new c10::Storage(storage), release, c10::Device(c10::kCPU));
  c10::Storage alias(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(bytes),
                                                           nullptr, false));
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(alias), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) result = result.conj();
  return result;
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

}  // namespace sim
