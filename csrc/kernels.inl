// The loops over elements. kernels.h includes this file once per instruction set, each time inside
// another namespace, and so it must not have an include guard. WFBP_TARGET names the instruction
// set for the compiler; WFBP_HAS_F16C and WFBP_HAS_STREAM tell which instructions it has.
//
// Elements are read and written by memcpy, which compilers turn into plain loads and stores, so
// that pointers need no alignment. Source and target may be the same memory. Reductions and 16-bit
// types use a small block on the stack.

template <class T>
WFBP_TARGET void multiply_plain(const std::uint8_t* from, std::uint8_t* to, std::size_t count,
                                double factor) {
  const T by = static_cast<T>(factor);
  WFBP_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, from + i * sizeof(T), sizeof(T));
    value *= by;
    std::memcpy(to + i * sizeof(T), &value, sizeof(T));
  }
}

struct BFloat16 {
  using Value = float;
  static constexpr std::size_t kItem = 2;
  WFBP_TARGET static void load(const std::uint8_t* from, float* block, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      std::uint16_t value;
      std::memcpy(&value, from + 2 * i, 2);
      block[i] = bfloat16_to_float(value);
    }
  }
  WFBP_TARGET static void store(const float* block, std::uint8_t* to, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint16_t value = float_to_bfloat16(block[i]);
      std::memcpy(to + 2 * i, &value, 2);
    }
  }
};

struct Float16 {
  using Value = float;
  static constexpr std::size_t kItem = 2;
  WFBP_TARGET static void load(const std::uint8_t* from, float* block, std::size_t count) {
    std::size_t i = 0;
#if WFBP_HAS_F16C
    for (; i + 8 <= count; i += 8) {
      const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i));
      _mm256_storeu_ps(block + i, _mm256_cvtph_ps(half));
    }
#endif
    for (; i < count; ++i) {
      std::uint16_t value;
      std::memcpy(&value, from + 2 * i, 2);
      block[i] = float16_to_float(value);
    }
  }
  WFBP_TARGET static void store(const float* block, std::uint8_t* to, std::size_t count) {
    std::size_t i = 0;
#if WFBP_HAS_F16C
    for (; i + 8 <= count; i += 8) {
      const __m256 wide = _mm256_loadu_ps(block + i);
      const __m128i half = _mm256_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i), half);
    }
#endif
    for (; i < count; ++i) {
      const std::uint16_t value = float_to_float16(block[i]);
      std::memcpy(to + 2 * i, &value, 2);
    }
  }
};

template <class Format>
WFBP_TARGET void multiply(const std::uint8_t* from, std::uint8_t* to, std::size_t count,
                          double factor) {
  const float by = static_cast<float>(factor);
  float block[kBlock];
  for (std::size_t start = 0; start < count; start += kBlock) {
    const std::size_t length = std::min(kBlock, count - start);
    Format::load(from + 2 * start, block, length);
    for (std::size_t i = 0; i < length; ++i) block[i] *= by;
    Format::store(block, to + 2 * start, length);
  }
}

// Elements without conversion.
template <class T>
struct Plain {
  using Value = T;
  static constexpr std::size_t kItem = sizeof(T);
  WFBP_TARGET static void load(const std::uint8_t* from, T* block, std::size_t count) {
    std::memcpy(block, from, count * sizeof(T));
  }
  WFBP_TARGET static void store(const T* block, std::uint8_t* to, std::size_t count) {
    std::memcpy(to, block, count * sizeof(T));
  }
};

// Integers in at least twice as many bits, so that the sum for an average cannot overflow.
template <class T>
struct Wide {
  __extension__ using Value = std::conditional_t<sizeof(T) == 8, __int128, std::int64_t>;
  static constexpr std::size_t kItem = sizeof(T);
  WFBP_TARGET static void load(const std::uint8_t* from, Value* block, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      T value;
      std::memcpy(&value, from + i * sizeof(T), sizeof(T));
      block[i] = value;
    }
  }
  WFBP_TARGET static void store(const Value* block, std::uint8_t* to, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      const T value = static_cast<T>(block[i]);
      std::memcpy(to + i * sizeof(T), &value, sizeof(T));
    }
  }
};

// Divides by multiplication if the result has the same bits: for floating-point types and powers of
// two whose inverse every type can represent.
template <class T>
WFBP_TARGET void divide(T* block, std::size_t count, double divisor) {
  if (divisor == 1.0) return;
  const T by = static_cast<T>(divisor);
  int exponent = 0;
  if (std::is_floating_point<T>::value && std::frexp(divisor, &exponent) == 0.5 &&
      std::abs(exponent) < 64) {
    const T factor = static_cast<T>(1.0 / divisor);
    for (std::size_t i = 0; i < count; ++i) block[i] *= factor;
  } else {
    for (std::size_t i = 0; i < count; ++i) block[i] /= by;
  }
}

template <class Format, class Combine>
WFBP_TARGET void reduce(const std::vector<const std::uint8_t*>& shards, std::uint8_t* out,
                        std::size_t count, double divisor) {
  using Value = typename Format::Value;
  constexpr std::size_t kItem = Format::kItem;
  Value sum[kBlock];
  Value term[kBlock];
  for (std::size_t start = 0; start < count; start += kBlock) {
    const std::size_t length = std::min(kBlock, count - start);
    Format::load(shards[0] + kItem * start, sum, length);
    for (std::size_t k = 1; k < shards.size(); ++k) {
      Format::load(shards[k] + kItem * start, term, length);
      for (std::size_t i = 0; i < length; ++i) sum[i] = Combine::of(sum[i], term[i]);
    }
    divide(sum, length, divisor);
    Format::store(sum, out + kItem * start, length);
  }
}

// A copy that bypasses the caches. An ordinary copy would first read the target into them, and a
// large target would evict data that training needs next. The caller must call fence().
WFBP_TARGET inline void stream(const std::uint8_t* from, std::uint8_t* to, std::size_t nbytes) {
#if WFBP_HAS_STREAM
  constexpr std::size_t kStep = 128;
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(to) % 32;
  const std::size_t head = std::min(nbytes, misaligned == 0 ? 0 : 32 - misaligned);
  std::memcpy(to, from, head);
  std::size_t done = head;
  for (; done + kStep <= nbytes; done += kStep) {
    const auto* source = reinterpret_cast<const __m256i*>(from + done);
    auto* target = reinterpret_cast<__m256i*>(to + done);
    const __m256i a = _mm256_loadu_si256(source);
    const __m256i b = _mm256_loadu_si256(source + 1);
    const __m256i c = _mm256_loadu_si256(source + 2);
    const __m256i d = _mm256_loadu_si256(source + 3);
    _mm256_stream_si256(target, a);
    _mm256_stream_si256(target + 1, b);
    _mm256_stream_si256(target + 2, c);
    _mm256_stream_si256(target + 3, d);
  }
  std::memcpy(to + done, from + done, nbytes - done);
#else
  std::memcpy(to, from, nbytes);
#endif
}

WFBP_TARGET inline void fence() {
#if WFBP_HAS_STREAM
  _mm_sfence();
#endif
}

template <class From, class To>
WFBP_TARGET void cast(const std::uint8_t* from, std::uint8_t* to, std::size_t count) {
  typename From::Value before[kBlock];
  typename To::Value after[kBlock];
  for (std::size_t start = 0; start < count; start += kBlock) {
    const std::size_t length = std::min(kBlock, count - start);
    From::load(from + From::kItem * start, before, length);
    for (std::size_t i = 0; i < length; ++i) {
      after[i] = static_cast<typename To::Value>(before[i]);
    }
    To::store(after, to + To::kItem * start, length);
  }
}

// Casts between a 16-bit format and a wider type.
template <class Wide, class Half>
Casts casts() {
  return {cast<Wide, Half>, cast<Half, Wide>};
}

template <class Format>
Reducers reducers(Reduce average = nullptr) {
  return {reduce<Format, Sum>, reduce<Format, Min>, reduce<Format, Max>, reduce<Format, Product>,
          average};
}

template <class T>
Reducers integer_reducers() {
  return reducers<Plain<T>>(reduce<Wide<T>, Sum>);
}

inline Kernels kernels() {
  return {multiply<Float16>,
          multiply<BFloat16>,
          multiply_plain<float>,
          multiply_plain<double>,
          reducers<Float16>(),
          reducers<BFloat16>(),
          reducers<Plain<float>>(),
          reducers<Plain<double>>(),
          integer_reducers<std::int32_t>(),
          integer_reducers<std::int64_t>(),
          integer_reducers<std::uint8_t>(),
          casts<Plain<float>, Float16>(),
          casts<Plain<float>, BFloat16>(),
          casts<Plain<double>, Float16>(),
          casts<Plain<double>, BFloat16>(),
          stream,
          fence,
          WFBP_NAME};
}
