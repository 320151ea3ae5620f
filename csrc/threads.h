// Runs long reductions and copies on several cores if the rank has more than one.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

namespace wfbp {

constexpr std::size_t kThreadBytes = std::size_t{1} << 20;  // starting a thread takes far less

// How many threads may share one reduction or copy.
inline std::atomic<unsigned>& num_threads() {
  static std::atomic<unsigned> number{1};
  return number;
}

// Calls act(first, last) for parts of `count` elements of `item` bytes, the first part on this
// thread. Each call starts new threads, because lasting ones would have to survive forks and exits.
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
    } catch (const std::system_error&) {  // no more threads: this one does the rest
      break;
    }
    last = first;
  }
  act(std::size_t{0}, last);
  for (std::thread& other : others) other.join();
}

}  // namespace wfbp
