// A queue of notes about gradients, from XLA's threads to Python.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace wfbp {

// A gradient that exists: its exchange, the index of its leaf there, and its address.
struct Note {
  std::int64_t exchange;
  std::int32_t index;
  std::uintptr_t address;
  // On a device, its number, the stream, and an event recorded there (0 if none was recorded). On
  // the host -1, 0 and 0.
  std::int32_t device = -1;
  std::uintptr_t stream = 0;
  std::uintptr_t event = 0;
  std::chrono::steady_clock::time_point time = std::chrono::steady_clock::now();
};

// The groups of gradients of an exchange that may be sent before its wait, and how many gradients
// each group still lacks in the current step. The thread that forwards announcements is woken only
// when a group is complete: if all cores are busy, each wake-up costs XLA some 30 us.
class Groups {
 public:
  // `group_of` has each leaf's group, counted from 0, or -1 if the leaf is not sent before the
  // wait.
  explicit Groups(std::vector<std::int64_t> group_of) : group_of_(std::move(group_of)) {
    for (const std::int64_t group : group_of_) {
      if (group < 0) continue;
      const auto number = static_cast<std::size_t>(group);
      if (number >= sizes_.size()) sizes_.resize(number + 1);
      ++sizes_[number];
    }
    begin();
  }

  void begin() { missing_ = sizes_; }

  // Counts an announced leaf. Returns whether it completes its group.
  bool completes(std::int32_t index) {
    const auto leaf = static_cast<std::size_t>(index);
    if (leaf >= group_of_.size() || group_of_[leaf] < 0) return false;
    return --missing_[static_cast<std::size_t>(group_of_[leaf])] == 0;
  }

 private:
  std::vector<std::int64_t> group_of_;
  std::vector<int> sizes_, missing_;
};

// The mutex protects all members. To exclude deadlocks, a thread that holds the mutex never blocks,
// and a thread that waits for the mutex does not hold the GIL.
class Mailbox {
 public:
  void put(const Note& note) {
    bool ring = false;
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      notes_.push_back(note);
      const auto found = groups_.find(note.exchange);
      urgent_ |= found != groups_.end() && found->second.completes(note.index);
      ring = listening_ && urgent_;
      if (ring) listening_ = false;
    }
    if (ring) bell_.notify_one();
  }

  // Sets an exchange's groups from its next step on. Until the first call, nothing is sent early.
  void expect(std::int64_t exchange, Groups groups) {
    const std::lock_guard<std::mutex> hold(mutex_);
    groups_.insert_or_assign(exchange, std::move(groups));
  }

  // All gradients of a step have been announced: start counting the next step.
  void close_step(std::int64_t exchange) {
    const std::lock_guard<std::mutex> hold(mutex_);
    const auto found = groups_.find(exchange);
    if (found != groups_.end()) found->second.begin();
  }

  std::vector<Note> take() {
    const std::lock_guard<std::mutex> hold(mutex_);
    urgent_ = false;
    return std::exchange(notes_, {});
  }

  // Blocks until a group is complete. Returns false once the mailbox is closed.
  bool listen() {
    std::unique_lock<std::mutex> hold(mutex_);
    while (!closed_ && !urgent_) {
      listening_ = true;  // again before each wait, because put() resets it when it notifies
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
  std::map<std::int64_t, Groups> groups_;
  bool urgent_ = false;
  bool listening_ = false;
  bool closed_ = false;
};

}  // namespace wfbp
