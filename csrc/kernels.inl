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

// int8 and fp8. A block is a scale (bfloat16), followed by kCodecBlock elements of 8 bits. The
// scale is rounded up, so no element exceeds the format's maximum. Scale times element is exact, so
// every processor decodes the same bits.

constexpr std::uint32_t kInfinity = 0x7f800000u;
constexpr std::uint32_t kTiny = 0x0d800000u;  // 2^-100; the inverse of a scale must be finite

// The bits of the scale that maps `most`, the largest magnitude, to `steps`. 0 if all elements are
// tiny and are sent as zeros; NaN if any is infinite or NaN.
WFBP_TARGET inline std::uint32_t scale_of(std::uint32_t most, float steps) {
  if (most >= kInfinity) return 0x7fc00000u;
  return most < kTiny ? 0 : (bits_of(float_of(most) / steps) + 0xffffu) & 0xffff0000u;
}

// Adds the error, if any. Sets `most` to the bits of the largest magnitude; such bits order like
// the numbers. Returns whether any gradient is nonzero.
WFBP_TARGET inline bool add_error(const std::uint8_t* from, const std::uint8_t* error,
                                  float* values, std::size_t length, std::uint32_t& most) {
  std::uint32_t any = 0;
  most = 0;
  std::size_t i = 0;
#if WFBP_HAS_STREAM
  const __m256i unsigned_bits = _mm256_set1_epi32(0x7fffffff);
  __m256i gradient = _mm256_setzero_si256(), largest = _mm256_setzero_si256();
  for (; i + 8 <= length; i += 8) {
    __m256 value = _mm256_loadu_ps(reinterpret_cast<const float*>(from + 4 * i));
    gradient = _mm256_or_si256(gradient, _mm256_castps_si256(value));
    if (error != nullptr) {
      value = _mm256_add_ps(value,
                            _mm256_loadu_ps(reinterpret_cast<const float*>(error + 4 * i)));
    }
    _mm256_storeu_ps(values + i, value);
    largest = _mm256_max_epu32(largest,
                               _mm256_and_si256(_mm256_castps_si256(value), unsigned_bits));
  }
  std::uint32_t lanes[8];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), largest);
  for (const std::uint32_t lane : lanes) most = std::max(most, lane);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes),
                      _mm256_and_si256(gradient, unsigned_bits));
  for (const std::uint32_t lane : lanes) any |= lane;
#endif
  for (; i < length; ++i) {
    float value, old = 0.0f;
    std::memcpy(&value, from + 4 * i, 4);
    any |= bits_of(value) & 0x7fffffffu;
    if (error != nullptr) {
      std::memcpy(&old, error + 4 * i, 4);
      value += old;
    }
    values[i] = value;
    most = std::max(most, bits_of(value) & 0x7fffffffu);
  }
  return any != 0;
}

constexpr float kRound = 12582912.0f;  // added to a small number, this rounds it to nearest even

// int8: integers. `quantize` divides values by the scale, rounds them and writes them. It stores
// the decoded values and the remaining errors; either pointer may be null. `decode` adds to `to` if
// `adds`.
struct Int8 {
  static constexpr float kMost = 127.0f;

  WFBP_TARGET static void quantize(const float* values, float scale, std::uint8_t* wire,
                                   std::uint8_t* error, std::uint8_t* decoded,
                                   std::size_t length) {
    const float inverse = 1.0f / scale;
    std::size_t i = 0;
#if WFBP_HAS_STREAM
    const __m256 by = _mm256_set1_ps(inverse), back = _mm256_set1_ps(scale);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (; i + 32 <= length; i += 32) {
      __m256i parts[4];
      for (std::size_t k = 0; k < 4; ++k) {
        const __m256 value = _mm256_loadu_ps(values + i + 8 * k);
        parts[k] = _mm256_cvtps_epi32(_mm256_mul_ps(value, by));
        const __m256 sent = _mm256_mul_ps(_mm256_cvtepi32_ps(parts[k]), back);
        const std::size_t at = 4 * (i + 8 * k);
        if (decoded != nullptr) _mm256_storeu_ps(reinterpret_cast<float*>(decoded + at), sent);
        if (error != nullptr) {
          _mm256_storeu_ps(reinterpret_cast<float*>(error + at), _mm256_sub_ps(value, sent));
        }
      }
      const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(parts[0], parts[1]),
                                               _mm256_packs_epi32(parts[2], parts[3]));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(wire + i),
                          _mm256_permutevar8x32_epi32(bytes, order));
    }
#endif
    for (; i < length; ++i) {
      const auto element = static_cast<std::int32_t>(bits_of(values[i] * inverse + kRound) -
                                                     bits_of(kRound));
      const float sent = static_cast<float>(element) * scale;
      const float left = values[i] - sent;
      wire[i] = static_cast<std::uint8_t>(element);
      if (decoded != nullptr) std::memcpy(decoded + 4 * i, &sent, 4);
      if (error != nullptr) std::memcpy(error + 4 * i, &left, 4);
    }
  }

  template <bool adds>
  WFBP_TARGET static void decode(const std::uint8_t* wire, float scale, std::uint8_t* to,
                                 std::size_t length) {
    std::size_t i = 0;
#if WFBP_HAS_STREAM
    const __m256 by = _mm256_set1_ps(scale);
    for (; i + 8 <= length; i += 8) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(wire + i));
      __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), by);
      auto* target = reinterpret_cast<float*>(to + 4 * i);
      if (adds) value = _mm256_add_ps(_mm256_loadu_ps(target), value);
      _mm256_storeu_ps(target, value);
    }
#endif
    for (; i < length; ++i) {
      float value = static_cast<float>(static_cast<std::int8_t>(wire[i])) * scale;
      if (adds) {
        float sum;
        std::memcpy(&sum, to + 4 * i, 4);
        value = sum + value;
      }
      std::memcpy(to + 4 * i, &value, 4);
    }
  }
};

// Floating point, e4m3: a sign, four bits of exponent, three of fraction. Small elements keep their
// precision beside large ones. Without branches, so that compilers use vectors.
struct Fp8 {
  static constexpr float kMost = 448.0f;

  WFBP_TARGET static std::uint32_t rounded(float value) {
    const std::uint32_t bits = bits_of(value), size = bits & 0x7fffffffu;
    const std::uint32_t least = bits_of(float_of(size) * 512.0f + kRound) - bits_of(kRound);
    const std::uint32_t other = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (120u << 3);
    const std::uint32_t is_least = 0u - ((size - 0x3c800000u) >> 31);  // below 2^-6
    return (bits >> 24 & 0x80u) | (least & is_least) | (other & ~is_least);
  }

  WFBP_TARGET static float value_of(std::uint32_t code) {
    const std::uint32_t size = code & 0x7fu;
    const std::uint32_t least = bits_of(static_cast<float>(size) * 0.001953125f);
    const std::uint32_t other = (size << 20) + (120u << 23);
    const std::uint32_t is_least = 0u - ((size - 8u) >> 31);
    return float_of((least & is_least) | (other & ~is_least) | (code & 0x80u) << 24);
  }

  WFBP_TARGET static void quantize(const float* values, float scale, std::uint8_t* wire,
                                   std::uint8_t* error, std::uint8_t* decoded,
                                   std::size_t length) {
    const float inverse = 1.0f / scale;
    float sent[kCodecBlock], left[kCodecBlock];
    std::uint32_t codes[kCodecBlock];
    WFBP_INDEPENDENT
    for (std::size_t i = 0; i < length; ++i) {
      codes[i] = rounded(values[i] * inverse);
      sent[i] = value_of(codes[i]) * scale;
      left[i] = values[i] - sent[i];
    }
    WFBP_INDEPENDENT
    for (std::size_t i = 0; i < length; ++i) wire[i] = static_cast<std::uint8_t>(codes[i]);
    if (decoded != nullptr) std::memcpy(decoded, sent, 4 * length);
    if (error != nullptr) std::memcpy(error, left, 4 * length);
  }

  template <bool adds>
  WFBP_TARGET static void decode(const std::uint8_t* wire, float scale, std::uint8_t* to,
                                 std::size_t length) {
    float sum[kCodecBlock] = {};
    if (adds) std::memcpy(sum, to, 4 * length);
    WFBP_INDEPENDENT
    for (std::size_t i = 0; i < length; ++i) {
      const float value = value_of(wire[i]) * scale;
      sum[i] = adds ? sum[i] + value : value;
    }
    std::memcpy(to, sum, 4 * length);
  }
};

// Encodes float32 elements of one tensor, after adding the `error` that earlier steps have left.
// Stores the new error and the decoded values; either pointer may be null. A block whose gradients
// are all zero is sent as zeros and keeps its error, so an unused tensor sends no old error. A
// block with infinity or NaN arrives as NaN, and keeps its error, too.
template <class Form>
WFBP_TARGET void encode_by_block(const std::uint8_t* from, std::uint8_t* error, std::uint8_t* wire,
                                 std::uint8_t* decoded, std::size_t count) {
  float values[kCodecBlock];
  for (std::size_t start = 0; start < count; start += kCodecBlock) {
    const std::size_t length = std::min(kCodecBlock, count - start), at = 4 * start;
    std::uint8_t* left = error == nullptr ? nullptr : error + at;
    std::uint8_t* out = decoded == nullptr ? nullptr : decoded + at;
    std::uint32_t most;
    const bool any = add_error(from + at, left, values, length, most);
    if (!any) most = 0;
    const bool finite = most < kInfinity, tiny = most < kTiny;
    const std::uint32_t scale = scale_of(most, Form::kMost);
    const auto sent = static_cast<std::uint16_t>(scale >> 16);
    std::memcpy(wire, &sent, 2);
    wire += 2;
    if (finite && !tiny) {
      Form::quantize(values, float_of(scale), wire, left, out, length);
    } else {
      std::memset(wire, 0, length);
      if (left != nullptr && any && finite) std::memcpy(left, values, 4 * length);
      for (std::size_t i = 0; i < length; ++i) values[i] = float_of(scale);
      if (out != nullptr) std::memcpy(out, values, 4 * length);
    }
    wire += length;
  }
}

// Decodes elements of one tensor to float32, which are added to `out` if `adds`.
template <class Form, bool adds>
WFBP_TARGET void decode_by_block(const std::uint8_t* wire, std::uint8_t* out, std::size_t count) {
  for (std::size_t start = 0; start < count; start += kCodecBlock) {
    const std::size_t length = std::min(kCodecBlock, count - start);
    std::uint8_t* to = out + 4 * start;
    std::uint16_t sent;
    std::memcpy(&sent, wire, 2);
    const float scale = bfloat16_to_float(sent);
    wire += 2;
    Form::template decode<adds>(wire, scale, to, length);
    wire += length;
  }
}

// int4. A block holds eight groups of 32 elements: group j has the elements j, j + 8, j + 16, ...
// The Walsh-Hadamard transform spreads outliers over their group. Each group is sent as a scale
// (bfloat16) and coefficients from -7 to 7. Sums of these are exact, so every processor decodes the
// same bits. The last block of a tensor is padded with zeros.
constexpr std::size_t kGroups = 8, kInt4Bytes = 2 * kGroups + kCodecBlock / 2;

WFBP_TARGET inline void transform(float* block) {
  for (std::size_t half = kGroups; half < kCodecBlock; half *= 2) {
    for (std::size_t start = 0; start < kCodecBlock; start += 2 * half) {
      WFBP_INDEPENDENT
      for (std::size_t i = start; i < start + half; ++i) {
        const float a = block[i], b = block[i + half];
        block[i] = a + b;
        block[i + half] = a - b;
      }
    }
  }
}

// The inverse transform of integer coefficients.
WFBP_TARGET inline void restore(float* block, const float* scales) {
  float by[kGroups];
  for (std::size_t j = 0; j < kGroups; ++j) by[j] = scales[j] * (kGroups / float{kCodecBlock});
  transform(block);
  for (std::size_t i = 0; i < kCodecBlock; i += kGroups) {
    for (std::size_t j = 0; j < kGroups; ++j) block[i + j] *= by[j];
  }
}

// Like encode_by_block, but with a scale per group.
WFBP_TARGET inline void encode_int4(const std::uint8_t* from, std::uint8_t* error,
                                    std::uint8_t* wire, std::uint8_t* decoded, std::size_t count) {
  for (std::size_t start = 0; start < count; start += kCodecBlock, wire += kInt4Bytes) {
    const std::size_t length = std::min(kCodecBlock, count - start), at = 4 * start;
    float values[kCodecBlock] = {}, errors[kCodecBlock] = {}, sent[kCodecBlock];
    std::uint32_t any[kGroups] = {}, most[kGroups] = {};
    std::memcpy(values, from + at, 4 * length);
    for (std::size_t i = 0; i < kCodecBlock; i += kGroups) {
      for (std::size_t j = 0; j < kGroups; ++j) any[j] |= bits_of(values[i + j]) & 0x7fffffffu;
    }
    if (error != nullptr) std::memcpy(errors, error + at, 4 * length);
    for (std::size_t i = 0; i < kCodecBlock; ++i) sent[i] = values[i] = values[i] + errors[i];
    transform(sent);
    for (std::size_t i = 0; i < kCodecBlock; i += kGroups) {
      for (std::size_t j = 0; j < kGroups; ++j) {
        most[j] = std::max(most[j], bits_of(sent[i + j]) & 0x7fffffffu);
      }
    }
    float scales[kGroups], by[kGroups];
    std::uint32_t keeps[kGroups];  // all bits set if the group keeps its error
    for (std::size_t j = 0; j < kGroups; ++j) {
      const std::uint32_t scale = scale_of(any[j] == 0 ? 0 : most[j], 7.0f);
      const bool is_sent = scale != 0 && scale < kInfinity;
      const auto half = static_cast<std::uint16_t>(scale >> 16);
      std::memcpy(wire + 2 * j, &half, 2);
      scales[j] = float_of(scale);
      by[j] = is_sent ? 1.0f / scales[j] : 0.0f;
      keeps[j] = any[j] == 0 || scale >= kInfinity ? ~0u : 0;
    }
    std::int32_t elements[kCodecBlock];
    for (std::size_t i = 0; i < kCodecBlock; i += kGroups) {
      for (std::size_t j = 0; j < kGroups; ++j) {
        const float element = by[j] == 0.0f ? 0.0f : sent[i + j] * by[j];
        elements[i + j] = static_cast<std::int32_t>(bits_of(element + kRound) - bits_of(kRound));
        sent[i + j] = static_cast<float>(elements[i + j]);
      }
    }
    for (std::size_t i = 0; i < kCodecBlock / 2; ++i) {
      wire[2 * kGroups + i] = static_cast<std::uint8_t>((elements[i] & 15) |
                                                        elements[i + kCodecBlock / 2] * 16);
    }
    if (error == nullptr && decoded == nullptr) continue;
    restore(sent, scales);
    if (decoded != nullptr) std::memcpy(decoded + at, sent, 4 * length);
    if (error == nullptr) continue;
    for (std::size_t i = 0; i < kCodecBlock; i += kGroups) {
      for (std::size_t j = 0; j < kGroups; ++j) {
        const std::uint32_t left = bits_of(values[i + j] - sent[i + j]);
        errors[i + j] = float_of((left & ~keeps[j]) | (bits_of(errors[i + j]) & keeps[j]));
      }
    }
    std::memcpy(error + at, errors, 4 * length);
  }
}

template <bool adds>
WFBP_TARGET void decode_int4(const std::uint8_t* wire, std::uint8_t* out, std::size_t count) {
  for (std::size_t start = 0; start < count; start += kCodecBlock, wire += kInt4Bytes) {
    const std::size_t length = std::min(kCodecBlock, count - start);
    float scales[kGroups], block[kCodecBlock], sum[kCodecBlock] = {};
    for (std::size_t j = 0; j < kGroups; ++j) {
      std::uint16_t half;
      std::memcpy(&half, wire + 2 * j, 2);
      scales[j] = bfloat16_to_float(half);
    }
    for (std::size_t i = 0; i < kCodecBlock / 2; ++i) {
      const std::int32_t both = static_cast<std::int8_t>(wire[2 * kGroups + i]);
      const std::int32_t low = ((both & 15) ^ 8) - 8;
      block[i] = static_cast<float>(low);
      block[i + kCodecBlock / 2] = static_cast<float>((both - (both & 15)) / 16);
    }
    restore(block, scales);
    std::uint8_t* to = out + 4 * start;
    if (adds) std::memcpy(sum, to, 4 * length);
    for (std::size_t i = 0; i < kCodecBlock; ++i) sum[i] = adds ? sum[i] + block[i] : block[i];
    std::memcpy(to, sum, 4 * length);
  }
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
          {encode_by_block<Int8>, decode_by_block<Int8, false>, decode_by_block<Int8, true>,
           divide<float>, 1, 2},
          {encode_by_block<Fp8>, decode_by_block<Fp8, false>, decode_by_block<Fp8, true>,
           divide<float>, 1, 2},
          {encode_int4, decode_int4<false>, decode_int4<true>, divide<float>, 0, kInt4Bytes},
          stream,
          fence,
          WFBP_NAME};
}
