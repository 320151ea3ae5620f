// Threads on which steps are waited for while XLA's own go on.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace wfbp {

// Runs every task at once, on a thread of its own: one that is free, or a new one. A task may last
// long, because where it ends a wait, XLA computes what follows on the task's thread. The mutex
// protects everything. Threads last as long as the process.
class Waiters {
 public:
  void run(std::function<void()> task) {
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      tasks_.push_back(task);
      if (num_free_ >= tasks_.size()) {
        bell_.notify_one();
        return;
      }
      try {
        std::thread([this] { work(); }).detach();
        return;
      } catch (const std::system_error&) {
        tasks_.pop_back();  // no more threads are to be had
      }
    }
    task();
  }

 private:
  [[noreturn]] void work() {
    std::unique_lock<std::mutex> hold(mutex_);
    for (;;) {
      while (tasks_.empty()) {
        ++num_free_;
        bell_.wait(hold);
        --num_free_;
      }
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      hold.unlock();
      task();
      hold.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable bell_;
  std::deque<std::function<void()>> tasks_;
  std::size_t num_free_ = 0;
};

}  // namespace wfbp
