// csrc/pack.cu as C++: every block and thread in turn, every access to memory checked.
//
// A thread runs to its end before the next one starts, in the order asked for: kernels whose
// threads depend on each other give different bytes in different orders.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

#include "half.h"

struct Index {
  unsigned x;
};
static Index threadIdx, blockIdx;

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads)

static float __uint_as_float(unsigned bits) { return wfbp::float_of(bits); }
static unsigned __float_as_uint(float value) { return wfbp::bits_of(value); }

namespace {

struct Range {
  std::uintptr_t start;
  std::uintptr_t end;
};

// What one launch may touch, and what it did.
struct Watch {
  const Range* ranges;
  int num_ranges;
  std::uint64_t accesses;
  char* complaint;
  int room;

  void see(const void* address, std::size_t bytes, std::size_t alignment, bool writes) {
    ++accesses;
    const auto start = reinterpret_cast<std::uintptr_t>(address);
    const char* verb = writes ? "write" : "read";
    if (start % alignment != 0) {
      std::snprintf(complaint, room, "%s of %zu bytes: address ends in %x, not aligned to %zu",
                    verb, bytes, unsigned(start % 16), alignment);
    }
    for (int i = 0; i < num_ranges; ++i) {
      if (ranges[i].start <= start && start + bytes <= ranges[i].end) return;
    }
    std::snprintf(complaint, room, "%s of %zu bytes outside every tensor and slot, %td from one",
                  verb, bytes,
                  num_ranges ? std::ptrdiff_t(start - ranges[0].start) : std::ptrdiff_t(0));
  }
};

Watch watch;

}  // namespace

#define WFBP_ON_HOST
#define WFBP_ACCESS(address, bytes, alignment, writes) \
  watch.see(address, bytes, alignment, writes)
#include "pack.cu"

#define WFBP_NAME(name, From, To) \
  if (wanted == "wfbp_" #name) return wfbp_##name;

static void (*kernel_named(const std::string& wanted))(wfbp::Arguments) {
  WFBP_CONVERSIONS(WFBP_NAME)
  if (wanted == "wfbp_copy") return wfbp_copy;
  return nullptr;
}

// Runs a launch. Returns the number of accesses to tensors and slots, or -1 with a complaint.
extern "C" std::int64_t run_kernel(const char* name, unsigned blocks, int backwards,
                                   const wfbp::Arguments* arguments, const Range* ranges,
                                   int num_ranges, char* complaint, int room) {
  complaint[0] = '\0';
  watch = {ranges, num_ranges, 0, complaint, room};
  void (*kernel)(wfbp::Arguments) = kernel_named(name);
  if (kernel == nullptr) {
    std::snprintf(complaint, room, "there is no kernel %s", name);
    return -1;
  }
  const unsigned total = blocks * wfbp::kThreads;
  for (unsigned i = 0; i < total; ++i) {
    const unsigned thread = backwards ? total - 1 - i : i;
    blockIdx.x = thread / wfbp::kThreads;
    threadIdx.x = thread % wfbp::kThreads;
    kernel(*arguments);
  }
  return complaint[0] == '\0' ? std::int64_t(watch.accesses) : -1;
}

extern "C" unsigned threads_per_block() { return wfbp::kThreads; }
extern "C" unsigned bytes_of_arguments() { return sizeof(wfbp::Arguments); }
