// Portable conversion of single values between float32 and float16 or bfloat16.
//
// Rounding is to nearest, ties to even. As with the x86 instructions, a NaN becomes quiet and keeps
// its sign and the upper bits of its payload. Compilers can turn all branches into blends and so
// vectorize loops, except the branches for subnormal float16 values.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(_MSC_VER)
#define WFBP_INLINE __forceinline
#else
#define WFBP_INLINE inline __attribute__((always_inline))
#endif

namespace wfbp {

WFBP_INLINE std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

WFBP_INLINE float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

WFBP_INLINE float bfloat16_to_float(std::uint16_t value) {
  return float_of(static_cast<std::uint32_t>(value) << 16);
}

WFBP_INLINE std::uint16_t float_to_bfloat16(float value) {
  const std::uint32_t bits = bits_of(value);
  // Add half a unit of the last kept bit, minus 1 if that bit is 0, so that ties round to even.
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet = (bits >> 16) | 0x0040u;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<std::uint16_t>(is_nan ? quiet : rounded);
}

inline float float16_to_float(std::uint16_t value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value & 0x8000u) << 16;
  const std::uint32_t exponent = (value >> 10) & 0x1fu;
  const std::uint32_t fraction = value & 0x3ffu;
  if (exponent == 0x1fu) {
    const std::uint32_t quiet = fraction != 0 ? 0x00400000u : 0u;
    return float_of(sign | 0x7f800000u | quiet | (fraction << 13));
  }
  if (exponent == 0) {
    // Zero or subnormal: the value is fraction * 2^-24, which float32 represents exactly.
    const float magnitude = static_cast<float>(fraction) * 5.9604644775390625e-8f;
    return float_of(sign | bits_of(magnitude));
  }
  return float_of(sign | ((exponent + 112u) << 23) | (fraction << 13));
}

inline std::uint16_t float_to_float16(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: subnormal or zero
    // Adding 0.5 makes the processor round correctly, because the spacing of float32 at 0.5 is the
    // smallest float16 subnormal.
    half = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    const std::uint32_t even = (magnitude >> 13) & 1u;
    half = (magnitude - 0x38000000u + 0xfffu + even) >> 13;
  }
  return static_cast<std::uint16_t>(sign | half);
}

}  // namespace wfbp
