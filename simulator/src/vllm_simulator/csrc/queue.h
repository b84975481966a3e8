// Order of work: streams, events, graphs, and failures on order.
//
// Work runs when somebody waits for it and not before, so a result that is read without waiting is always garbage, and
// a staging buffer that is filled again too early always spoils the step that was to read it. On real hardware both go
// well most of the time.
#pragma once
#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <deque>
#include <functional>
#include <thread>

#include "memory.h"

namespace sim {

using Work = std::function<void()>;

struct Stream {
  std::deque<Work> queue;
  uint64_t issued = 0, done = 0;
  std::exception_ptr error;
};

struct Mark {  // a recorded event
  Stream* stream = nullptr;
  uint64_t point = 0;
  double seconds = 0;
};

struct Graph {
  std::vector<Work> work;
  c10::DeviceIndex device = 0;
  bool urgent = false;
  void replay();
};

struct Fault {
  std::string kind, op;  // "hang", "crash" or "lost"; an empty op means the launch number `at`
  int64_t at;
};

inline auto& streams = *new std::map<std::pair<c10::DeviceIndex, c10::StreamId>, Stream>;
inline thread_local c10::StreamId current_stream[kMaxDevices] = {};
inline Graph* recording = nullptr;
inline bool blocking = false;  // run each launch at once, so that a failure is raised where it was launched
inline bool lost = false;      // the device does not answer any more
inline auto& lost_message = *new std::string("device lost");
inline auto& faults = *new std::vector<Fault>;
inline auto& counts = *new std::map<std::string, int64_t>;
inline int64_t launches = 0;

// One thread at a time drives the devices. The lock is taken without the GIL, which work written in Python needs.
class Turn {
 public:
  Turn() {
    static auto* shared = new std::recursive_mutex;
    lock_ = shared;
    PyThreadState* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    lock_->lock();
    if (state) PyEval_RestoreThread(state);
  }
  ~Turn() { lock_->unlock(); }

 private:
  std::recursive_mutex* lock_;
};

inline Stream& stream_of(c10::DeviceIndex device) { return streams[{device, current_stream[device]}]; }

inline void advance(Stream& stream, uint64_t point) {
  c10::InferenceMode guard;
  while (stream.done < point) {
    auto work = std::move(stream.queue.front());
    stream.queue.pop_front();
    try {
      TORCH_CHECK(!lost, lost_message);
      work();
    } catch (...) {  // raised by whoever waits next, as on any asynchronous device; the work after it still runs
      if (!stream.error) stream.error = std::current_exception();
    }
    ++stream.done;
  }
}

inline void finish(Stream& stream, uint64_t point) {
  TORCH_CHECK(!recording, "operation not permitted when stream is capturing: the host waits for the device");
  advance(stream, point);
  if (stream.error) std::rethrow_exception(std::exchange(stream.error, nullptr));
}

inline void finish_device(c10::DeviceIndex device) {
  Turn turn;
  for (auto& [key, stream] : streams)
    if (key.first == device) finish(stream, stream.issued);
}

inline Work sabotage(const std::string& op, Work work) {
  ++launches;
  ++counts[op];
  for (const auto& fault : faults) {
    if (fault.op.empty() ? launches != fault.at : fault.op != op) continue;
    if (fault.kind == "crash") return [] { *reinterpret_cast<volatile char*>(uintptr_t(1) << 52) = 0; };
    if (fault.kind == "lost") return [] {
      lost = true;
      TORCH_CHECK(false, lost_message);
    };
    return [] {
      for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
    };
  }
  return work;
}

inline void push(Stream& stream, Work work) {
  stream.queue.push_back(std::move(work));
  ++stream.issued;
}

// `urgent` work is not left waiting, because another process waits for it.
inline void launch(const std::string& op, c10::DeviceIndex device, Work work, bool urgent = false) {
  Turn turn;
  work = sabotage(op, std::move(work));
  if (recording) {
    recording->work.push_back(std::move(work));
    recording->urgent |= urgent;
    return;
  }
  auto& stream = stream_of(device);
  push(stream, std::move(work));
  if (urgent || blocking) finish(stream, stream.issued);
}

inline void Graph::replay() {
  Turn turn;
  ++counts["graph replay"];
  auto& stream = stream_of(device);
  for (const auto& one : work) push(stream, one);
  if (urgent || blocking) finish(stream, stream.issued);
}

inline void wait_for(Stream& stream, Mark mark) {
  push(stream, [mark] { if (mark.stream) advance(*mark.stream, mark.point); });
}

}  // namespace sim
