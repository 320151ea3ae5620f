// Notes of gradients on their way from XLA's threads to Python.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace wfbp {

// A gradient exists: of which exchange, which leaf, and where it lies.
struct Note {
  std::int64_t exchange;
  std::int32_t index;
  std::uintptr_t address;
  // On a device: its number, the stream, and an event recorded there (0: none was). Else -1, 0, 0.
  std::int32_t device = -1;
  std::uintptr_t stream = 0;
  std::uintptr_t event = 0;
};

// The mutex protects everything. Who holds it waits for nothing, and who waits for it does not hold
// the GIL.
class Mailbox {
 public:
  void put(const Note& note) {
    bool ring = false;
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      notes_.push_back(note);
      ring = listening_;
      listening_ = false;
    }
    if (ring) bell_.notify_one();
  }

  std::vector<Note> take() {
    const std::lock_guard<std::mutex> hold(mutex_);
    return std::exchange(notes_, {});
  }

  // Waits for a note; false once closed.
  bool listen() {
    std::unique_lock<std::mutex> hold(mutex_);
    while (!closed_ && notes_.empty()) {
      listening_ = true;  // each time: whoever rang has reset it, and the notes may be taken since
      bell_.wait(hold);
    }
    listening_ = false;
    return !closed_;
  }

  void close() {
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      closed_ = true;
    }
    bell_.notify_all();
  }

  bool closed() {
    const std::lock_guard<std::mutex> hold(mutex_);
    return closed_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable bell_;
  std::vector<Note> notes_;
  bool listening_ = false;
  bool closed_ = false;
};

}  // namespace wfbp
