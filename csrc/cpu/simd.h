// SPDX-License-Identifier: Apache-2.0
//
// Vectors of floats, in the vector extensions of GCC and Clang.
//
// Every header of the kernels is compiled once per instruction set, each time into a
// namespace of its own (JAXFLASH_CPU_TARGET), so that one readable source serves SSE2,
// NEON, AVX2 and AVX-512 without a library to vendor. Intrinsics appear only here and
// in element.h, for what the language cannot say. Nothing that these headers define
// may live outside that namespace: the linker would merge copies that were compiled
// for different machines.
#ifndef JAXFLASH_CSRC_CPU_SIMD_H_
#define JAXFLASH_CSRC_CPU_SIMD_H_

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16;
constexpr int kRegisters = 32;
#else
constexpr int kVectorBytes = 16;
constexpr int kRegisters = 16;
#endif
constexpr int kLanes = kVectorBytes / 4;

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504088896340736f;

inline Floats load(const float* x) {
  Floats value;
  std::memcpy(&value, x, sizeof(value));
  return value;
}

inline Ints load_ints(const int32_t* x) {
  Ints value;
  std::memcpy(&value, x, sizeof(value));
  return value;
}
inline void store(float* x, Floats value) { std::memcpy(x, &value, sizeof(value)); }

inline Floats broadcast(float x) { return x - Floats{}; }
inline Ints broadcast(int32_t x) { return x - Ints{}; }

// The bits at x in every lane, whatever they mean.
inline Floats broadcast_word(const float* x) {
  int32_t bits;
  std::memcpy(&bits, x, sizeof(bits));
  return (Floats)broadcast(bits);
}

// 0, 1, 2, ...
inline Ints iota() {
  Ints value = {};
  for (int lane = 0; lane < kLanes; ++lane) value[lane] = lane;
  return value;
}

// b where a is NaN.
inline Floats max(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_mask_max_ps((__m512)a, -1, (__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

// a * b + c, rounded once where the machine can. Contraction by the compiler is off, so
// that every other product is rounded: the backward pass relies on it.
inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline Floats select(Ints condition, Floats a, Floats b) { return condition ? a : b; }

inline Floats bit_and(Floats a, Ints mask) { return (Floats)((Ints)a & mask); }

inline float sum(Floats x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// 2^x to about 1 ulp: exactly 0 where the result would be subnormal, NaN where x is.
// x = n + f with n an integer and |f| <= 1/2; 2^f is a polynomial of degree 6, whose
// coefficients are the minimax ones for the relative error (2e-9).
inline Floats exp2(Floats x) {
#if defined(__AVX512F__)
  const Floats n = (Floats)_mm512_mask_roundscale_ps((__m512)x, -1, (__m512)x, 0);
#else
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the mantissa.
  constexpr float kRound = 0x1.8p23f;
  const Floats shifted = x + kRound;
  const Floats n = shifted - kRound;
#endif
  const Floats f = x - n;
  Floats y = fma(f, broadcast(1.5353362e-4f), broadcast(1.3398874e-3f));
  y = fma(y, f, broadcast(9.6184374e-3f));
  y = fma(y, f, broadcast(5.5503325e-2f));
  y = fma(y, f, broadcast(2.4022648e-1f));
  y = fma(y, f, broadcast(6.9314720e-1f));
  y = fma(y, f, broadcast(1.0f));
#if defined(__AVX512F__)
  const __mmask16 normal =
      _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return (Floats)_mm512_maskz_scalef_ps(normal, (__m512)y, (__m512)n);
#else
  y = (Floats)((Words)y + ((Words)shifted << 23));
  y = select(x < -126.0f, Floats{}, y);
  return select(x == x, y, x);
#endif
}

// How a 32-bit word of a packed operand enters a product: c + a * b. A word holds
// kElements neighbours along the axis that is summed over.
struct DotFloat32 {
  static constexpr int kElements = 1;
  static Floats add(Floats a, Floats b, Floats c) { return fma(a, b, c); }
};

#if defined(__AVX512BF16__)
struct DotBfloat16 {
  static constexpr int kElements = 2;

  static Floats add(Floats a, Floats b, Floats c) {
    return (Floats)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
  }

  // The lower or the upper halves of words, as floats.
  static Floats half(Floats words, int which) {
    return (Floats)(which == 0 ? (Words)words << 16 : (Words)words & 0xffff0000u);
  }

  // Words from two vectors of floats: `low` in the lower half, so first in memory.
  static Floats pair(Floats low, Floats high) {
    const __m512i split = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    const __m512i interleave =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (Floats)_mm512_permutexvar_epi16(interleave, split);
  }

  // Words from neighbouring lanes of one vector: half as many.
  static void store_halves(float* to, Floats x) {
    const __m256i halves = (__m256i)_mm512_cvtneps_pbh((__m512)x);
    std::memcpy(to, &halves, sizeof(halves));
  }
};
#endif

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET

#endif  // JAXFLASH_CSRC_CPU_SIMD_H_
