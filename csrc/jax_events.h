// Events for XLA's threads to record on a device's streams, without Python and without CUDA's headers.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

namespace wfbp {

// Python stocks handles of events and says which function records one. The mutex protects both.
class EventStock {
 public:
  // As cuEventRecord of the CUDA driver; 0 is success.
  using Record = int (*)(void* event, void* stream);

  void fill(Record record, const std::vector<unsigned long long>& handles) {
    const std::lock_guard<std::mutex> hold(mutex_);
    record_ = record;
    handles_.insert(handles_.end(), handles.begin(), handles.end());
  }

  // An event behind all that has been enqueued on a stream; 0 where there is none to be had.
  std::uintptr_t record(void* stream) {
    std::uintptr_t handle = 0;
    Record record = nullptr;
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      if (handles_.empty()) return 0;
      handle = handles_.back();
      handles_.pop_back();
      record = record_;
    }
    if (record(reinterpret_cast<void*>(handle), stream) == 0) return handle;
    const std::lock_guard<std::mutex> hold(mutex_);
    handles_.push_back(handle);
    return 0;
  }

 private:
  std::mutex mutex_;
  std::vector<std::uintptr_t> handles_;
  Record record_ = nullptr;
};

}  // namespace wfbp
