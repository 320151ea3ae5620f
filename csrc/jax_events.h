// Lets XLA's threads record events on a device's streams without Python and without CUDA's headers.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

namespace wfbp {

// Python supplies event handles and the function that records an event. The mutex protects both.
class EventStock {
 public:
  // The signature of the CUDA driver's cuEventRecord; 0 means success.
  using Record = int (*)(void* event, void* stream);

  void fill(Record record, const std::vector<unsigned long long>& handles) {
    const std::lock_guard<std::mutex> hold(mutex_);
    record_ = record;
    handles_.insert(handles_.end(), handles.begin(), handles.end());
  }

  // Records an event after all work enqueued on a stream so far. Returns its handle, or 0 if no
  // event is left or recording fails.
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
