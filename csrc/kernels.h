// The kernels: the same loops, compiled for several instruction sets. The best set that the
// processor supports is chosen once at run time, so that one wheel serves every machine.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

#include "half.h"
#include "threads.h"

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#define WFBP_X86 1
#include <immintrin.h>
#else
#define WFBP_X86 0
#endif

// Tells the compiler that a loop's iterations are independent. They are if source and target do not
// overlap, which a compiler can check, and also if both are the same memory, which it cannot know.
#if defined(__clang__)
#define WFBP_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define WFBP_INDEPENDENT _Pragma("GCC ivdep")
#else
#define WFBP_INDEPENDENT
#endif

namespace wfbp {

constexpr std::size_t kBlock = 512;  // elements of a stack block: two blocks easily fit into L1

// Integers must wrap around. In C++ only unsigned integers may, so arithmetic uses these.
template <class T, bool integer = std::is_integral<T>::value>
struct Wrapping {
  using type = T;
};
template <class T>
struct Wrapping<T, true> {
  using type = std::make_unsigned_t<T>;
};

struct Sum {
  template <class T>
  WFBP_INLINE static T of(T a, T b) {
    using U = typename Wrapping<T>::type;
    return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
  }
};
struct Product {
  template <class T>
  WFBP_INLINE static T of(T a, T b) {
    using U = typename Wrapping<T>::type;
    return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
  }
};
struct Min {  // a NaN on either side is the result, so that all ranks see it
  template <class T>
  WFBP_INLINE static T of(T a, T b) {
    return (a < b || a != a) ? a : b;
  }
};
struct Max {
  template <class T>
  WFBP_INLINE static T of(T a, T b) {
    return (a > b || a != a) ? a : b;
  }
};

using Multiply = void (*)(const std::uint8_t* from, std::uint8_t* to, std::size_t count,
                          double factor);
// Combines the sources in their order. The target may be one of the sources.
using Reduce = void (*)(const std::vector<const std::uint8_t*>& shards, std::uint8_t* out,
                        std::size_t count, double divisor);

// How contributions of one element type are combined, and what the result is divided by.
struct Reduction {
  Reduce reduce;
  std::size_t item;  // bytes of an element
  double divisor;

  void run(const std::vector<const std::uint8_t*>& shards, std::uint8_t* out,
           std::size_t count) const {
    in_parts(count, item, [&](std::size_t first, std::size_t last) {
      std::vector<const std::uint8_t*> parts(shards);
      for (const std::uint8_t*& part : parts) part += first * item;
      reduce(parts, out + first * item, last - first, divisor);
    });
  }
};

struct Reducers {
  Reduce sum, min, max, product;
  Reduce average;  // for integers: sums in a wider type, divides towards zero; null for others
};

// Conversion from a wider type to a 16-bit format, which rounds to nearest even, and back. float64
// is converted through float32.
using Cast = void (*)(const std::uint8_t* from, std::uint8_t* to, std::size_t count);
struct Casts {
  Cast narrow, widen;
};

// Encodes and decodes float32 elements in blocks; see kernels.inl.
constexpr std::size_t kCodecBlock = 256;
struct Codec {
  void (*encode)(const std::uint8_t* from, std::uint8_t* error, std::uint8_t* wire,
                 std::uint8_t* decoded, std::size_t count);
  void (*decode)(const std::uint8_t* wire, std::uint8_t* out, std::size_t count);
  void (*add)(const std::uint8_t* wire, std::uint8_t* sum, std::size_t count);
  void (*divide)(float* block, std::size_t count, double divisor);
  std::size_t element_bytes, block_bytes;  // bytes sent per element, and additionally per block

  std::size_t wire_bytes(std::size_t count) const {
    return count * element_bytes + (count + kCodecBlock - 1) / kCodecBlock * block_bytes;
  }
};

struct Kernels {
  Multiply float16, bfloat16, float32, float64;
  Reducers reduce_float16, reduce_bfloat16, reduce_float32, reduce_float64;
  Reducers reduce_int32, reduce_int64, reduce_uint8;
  Casts float32_float16, float32_bfloat16, float64_float16, float64_bfloat16;
  Codec int8, fp8, int4;
  void (*stream)(const std::uint8_t* from, std::uint8_t* to, std::size_t nbytes);
  void (*fence)();
  const char* name;
};

namespace portable {
#define WFBP_TARGET
#define WFBP_HAS_F16C 0
#define WFBP_HAS_STREAM 0
#define WFBP_NAME "portable"
#include "kernels.inl"
#undef WFBP_TARGET
#undef WFBP_HAS_F16C
#undef WFBP_HAS_STREAM
#undef WFBP_NAME
}  // namespace portable

#if WFBP_X86
namespace avx2 {
#define WFBP_TARGET __attribute__((target("avx2,f16c")))
#define WFBP_HAS_F16C 1
#define WFBP_HAS_STREAM 1
#define WFBP_NAME "avx2"
#include "kernels.inl"
#undef WFBP_TARGET
#undef WFBP_HAS_F16C
#undef WFBP_HAS_STREAM
#undef WFBP_NAME
}  // namespace avx2
#endif

// The kernels that this processor can run, the fastest first.
inline std::vector<Kernels> runnable_kernels() {
  std::vector<Kernels> all;
#if WFBP_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    all.push_back(avx2::kernels());
  }
#endif
  all.push_back(portable::kernels());
  return all;
}

}  // namespace wfbp
