// SPDX-License-Identifier: Apache-2.0
//
// The element types of tensors: conversion from and to float32, for one value, for a
// strided row and for a vector.
#ifndef JAXFLASH_CSRC_CPU_ELEMENT_H_
#define JAXFLASH_CSRC_CPU_ELEMENT_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/simd.h"

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline float to_float(float x) { return x; }
inline float to_float(Bfloat16 x) {
  return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}
inline float to_float(Float16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#elif defined(__aarch64__)
  return static_cast<float>(bit_cast<__fp16>(x.bits));
#else
  const uint32_t sign = (x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  uint32_t bits = (magnitude << 13) + ((127u - 15u) << 23);
  if (magnitude >= 0x7c00u) bits = 0x7f800000u | (magnitude & 0x3ffu) << 13;
  if (magnitude < 0x400u) {
    bits = bit_cast<uint32_t>(static_cast<float>(magnitude) * 0x1p-24f);
  }
  return bit_cast<float>(bits | sign);
#endif
}

inline void from_float(float x, float* to) { *to = x; }
inline void from_float(float x, Bfloat16* to) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  to->bits = static_cast<uint16_t>(x == x ? rounded : bits >> 16 | 0x40u);
}
inline void from_float(float x, Float16* to) {
#if defined(__F16C__)
  to->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
  to->bits = bit_cast<uint16_t>(static_cast<__fp16>(x));
#else
  uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const float magnitude = std::fabs(x);
  bits &= 0x7fffffffu;
  uint32_t rounded = ((bits + 0xfffu + (bits >> 13 & 1u)) >> 13) - ((127u - 15u) << 10);
  if (magnitude < 0x1p-14f) {
    // Adding 2^23 rounds to a multiple of the smallest subnormal, to nearest even.
    rounded = bit_cast<uint32_t>(magnitude * 0x1p24f + 0x1p23f) - 0x4b000000u;
  }
  if (magnitude >= 65520.0f) rounded = 0x7c00u;
  if (x != x) rounded = 0x7e00u;
  to->bits = static_cast<uint16_t>(sign | rounded);
#endif
}

// What rounding x to `rounded` lost, in units of 2^-8 of the last place of Element, and
// x again, but for what is lost even so. Floats of one sign are ordered as their bits.
template <class Element>
constexpr int kLowShift = 0;
template <>
inline constexpr int kLowShift<Bfloat16> = 16 - 8;
template <>
inline constexpr int kLowShift<Float16> = 13 - 8;

template <class Element>
inline int8_t low_bits(float x, Element rounded) {
  const int64_t lost =
      int64_t{bit_cast<int32_t>(x)} - bit_cast<int32_t>(to_float(rounded));
  constexpr int64_t kHalf = int64_t{1} << kLowShift<Element> >> 1;
  const int64_t low = (lost + kHalf) >> kLowShift<Element>;
  return static_cast<int8_t>(std::clamp<int64_t>(low, INT8_MIN, INT8_MAX));
}

template <class Element>
inline float with_low_bits(Element rounded, int8_t low) {
  const float high = to_float(rounded);
  if (!std::isfinite(high)) return high;
  return bit_cast<float>(bit_cast<int32_t>(high) + low * (1 << kLowShift<Element>));
}

// Elements x[0], x[stride], ... as floats.
template <class Element>
inline void load_row(const Element* x, int64_t stride, int count, float* to) {
  if (stride == 1) {
    for (int i = 0; i < count; ++i) to[i] = to_float(x[i]);
  } else {
    for (int i = 0; i < count; ++i) to[i] = to_float(x[i * stride]);
  }
}

#if defined(__F16C__)
inline void load_row(const Float16* x, int64_t stride, int count, float* to) {
  int i = 0;
  for (; stride == 1 && i + 8 <= count; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(halves));
  }
  for (; i < count; ++i) to[i] = to_float(x[i * stride]);
}
#endif

template <class Element>
inline void store_row(const float* from, float factor, int count, Element* x,
                      int64_t stride) {
  if (stride == 1) {
    for (int i = 0; i < count; ++i) from_float(factor * from[i], &x[i]);
  } else {
    for (int i = 0; i < count; ++i) from_float(factor * from[i], &x[i * stride]);
  }
}

// x without the last kDropped bits of its mantissa, rounded to nearest even.
template <int kDropped>
inline Floats round_mantissa(Floats x) {
  const Words bits = (Words)x;
  constexpr uint32_t kHalf = (1u << kDropped >> 1) - 1;
  const Words rounded = (bits + kHalf + (bits >> kDropped & 1u)) & ~0u << kDropped;
  return select(x == x, (Floats)rounded, x);
}

// x rounded to the mantissa of Element: its exponents would make zeros of weights that
// are small beside that of a sink, or of a key that dropout takes away.
template <class Element>
inline Floats round_to(Floats x);

template <>
inline Floats round_to<float>(Floats x) {
  return x;
}

template <>
inline Floats round_to<Bfloat16>(Floats x) {
  return round_mantissa<16>(x);
}

template <>
inline Floats round_to<Float16>(Floats x) {
  return round_mantissa<13>(x);
}

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET

#endif  // JAXFLASH_CSRC_CPU_ELEMENT_H_
