// Threads that wait for steps, so that XLA's own threads stay free.
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

// Starts every task immediately, on a free thread or on a new one. A task may take long: when it
// ends a wait, XLA runs the computations that follow on the same thread. The mutex protects all
// members. Threads last as long as the process.
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
        tasks_.pop_back();  // the system has no more threads: run the task here
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
