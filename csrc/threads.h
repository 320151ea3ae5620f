// Long reductions and copies on several cores, where a rank has several.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

namespace wfbp {

constexpr std::size_t kThreadBytes = std::size_t{1} << 20;  // a thread starts in far less time

// How many threads may work on one.
inline std::atomic<unsigned>& num_threads() {
  static std::atomic<unsigned> number{1};
  return number;
}

// Calls act(first, last) for parts of `count` elements of `item` bytes, the first part here.
// Threads are started for each call: they would otherwise have to survive forks and exits.
template <class Act>
void in_parts(std::size_t count, std::size_t item, const Act& act) {
  const std::size_t parts =
      std::clamp<std::size_t>(count * item / kThreadBytes, 1, num_threads().load());
  std::vector<std::thread> others;
  std::size_t last = count;
  for (std::size_t part = parts - 1; part > 0; --part) {
    const std::size_t first = count * part / parts;
    try {
      others.emplace_back([&act, first, last] { act(first, last); });
    } catch (const std::system_error&) {  // no more threads here: this one does the rest
      break;
    }
    last = first;
  }
  act(std::size_t{0}, last);
  for (std::thread& other : others) other.join();
}

}  // namespace wfbp
