// SPDX-License-Identifier: Apache-2.0
//
// The one matrix product that all steps of attention are made of:
//
//   C[m, n] = update(sum_k A[m, k] B[k, n])        n runs along the lanes of vectors
//
// A is read one word at a time and broadcast, B and C are read in vectors, and a tile
// of C lives in registers over the whole sum. Operands hold 32-bit words: one float, or
// a pair of bfloat16 that are neighbours along k (Dot says which).
#ifndef JAXFLASH_CSRC_CPU_GEMM_H_
#define JAXFLASH_CSRC_CPU_GEMM_H_

#include <algorithm>
#include <cstdint>

#include "cpu/simd.h"

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {

enum class Update {
  kStore,     // C = A B
  kAdd,       // C = C + A B
  kScaleAdd,  // C = C diag(factor) + A B
};

// Which of A's axes is contiguous: A[m, k] is a[m * lda + k] or a[k * lda + m].
enum class Contiguous { kK, kM };

struct Operands {
  const float* a;
  int lda;
  const float* b;
  int ldb;
  float* c;
  int ldc;
  const float* factor;  // [n], for kScaleAdd
};

// The widest tile of C, and how many rows of it fit into the registers beside one row
// of B and one word of A.
constexpr int kMaxVectors = kRegisters >= 32 ? 4 : 3;
constexpr int rows_of_tile(int vectors) {
  const int rows = (kRegisters - vectors - 1) / vectors;
  return rows < 8 ? rows : 8;
}

template <Contiguous kA>
inline const float* word_of_a(const Operands& o, int m, int k) {
  return kA == Contiguous::kK ? o.a + m * static_cast<int64_t>(o.lda) + k
                              : o.a + k * static_cast<int64_t>(o.lda) + m;
}

template <Update kUpdate>
inline void update(float* c, Floats product, const float* factor) {
  if constexpr (kUpdate == Update::kAdd) product = load(c) + product;
  if constexpr (kUpdate == Update::kScaleAdd)
    product = fma(load(c), load(factor), product);
  store(c, product);
}

template <class Dot, Contiguous kA, Update kUpdate, int kRows, int kVectors>
inline void tile(int depth, Operands o) {
  Floats acc[kRows][kVectors] = {};
  const float* a[kRows];
  for (int m = 0; m < kRows; ++m) a[m] = word_of_a<kA>(o, m, 0);
  const int64_t a_step = kA == Contiguous::kK ? 1 : o.lda;
  const float* b = o.b;
  for (int k = 0; k < depth; ++k) {
    Floats row[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) row[v] = load(b + v * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const float* word = kA == Contiguous::kK ? a[m] + k : a[0] + k * a_step + m;
      const Floats value = broadcast_word(word);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) acc[m][v] = Dot::add(value, row[v], acc[m][v]);
    }
    b += o.ldb;
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      update<kUpdate>(o.c + m * static_cast<int64_t>(o.ldc) + v * kLanes, acc[m][v],
                      o.factor + v * kLanes);
    }
  }
}

// Tiles of kRows rows from `first` on; what remains is left to half as many rows.
template <class Dot, Contiguous kA, Update kUpdate, int kRows, int kVectors>
inline void column_of_tiles(int first, int rows, int depth, const Operands& o) {
  for (; first + kRows <= rows; first += kRows) {
    Operands at = o;
    at.a = word_of_a<kA>(o, first, 0);
    at.c = o.c + first * static_cast<int64_t>(o.ldc);
    tile<Dot, kA, kUpdate, kRows, kVectors>(depth, at);
  }
  if constexpr (kRows > 1) {
    constexpr int kFewer = kRows > 4 ? 4 : kRows / 2;
    column_of_tiles<Dot, kA, kUpdate, kFewer, kVectors>(first, rows, depth, o);
  }
}

// C [rows, vectors * kLanes] from `depth` words of the summed axis.
template <class Dot, Contiguous kA, Update kUpdate>
void gemm(int rows, int vectors, int depth, Operands o) {
  while (vectors > 0) {
    // Two tiles of even width rather than a wide one and a narrow one.
    const int tiles = (vectors + kMaxVectors - 1) / kMaxVectors;
    const int width = (vectors + tiles - 1) / tiles;
    if (width == 1) {
      column_of_tiles<Dot, kA, kUpdate, rows_of_tile(1), 1>(0, rows, depth, o);
    } else if (width == 2) {
      column_of_tiles<Dot, kA, kUpdate, rows_of_tile(2), 2>(0, rows, depth, o);
    } else if (width == 3) {
      column_of_tiles<Dot, kA, kUpdate, rows_of_tile(3), 3>(0, rows, depth, o);
    } else if constexpr (kMaxVectors == 4) {
      column_of_tiles<Dot, kA, kUpdate, rows_of_tile(4), 4>(0, rows, depth, o);
    }
    vectors -= width;
    o.b += width * kLanes;
    o.c += width * kLanes;
    o.factor += width * kLanes;
  }
}

// Partial sums of a score are this many words long, so that its error does not grow
// with the head dim, and one large product does not cost all later ones their low bits.
template <class Dot>
constexpr int kScoreDepth = 16 * Dot::kElements;

// C = A B, for the scores S and dP.
template <class Dot>
void gemm_scores(int rows, int vectors, int depth, Operands o) {
  constexpr int kPart = kScoreDepth<Dot>;
  gemm<Dot, Contiguous::kK, Update::kStore>(rows, vectors, std::min(depth, kPart), o);
  for (int k = kPart; k < depth; k += kPart) {
    o.a += kPart;
    o.b += kPart * static_cast<int64_t>(o.ldb);
    gemm<Dot, Contiguous::kK, Update::kAdd>(rows, vectors, std::min(depth - k, kPart),
                                            o);
  }
}

// sum_k a[k, lane] b[k, lane] in the order of gemm_scores, so that two equal dot
// products are equal to the last bit, whichever function computed them.
template <class Dot>
Floats dot_columns(int depth, const float* a, const float* b, int ld) {
  Floats total = {};
  constexpr int kPart = kScoreDepth<Dot>;
  for (int first = 0; first < depth; first += kPart) {
    Floats part = {};
    for (int k = first; k < std::min(depth, first + kPart); ++k) {
      part = Dot::add(load(a + k * ld), load(b + k * ld), part);
    }
    total = first == 0 ? part : total + part;
  }
  return total;
}

// The same sums as gemm, in the same order, over the terms that `visible` selects: it
// gives the bits of the word (m, k) that count for each lane of vector v. For tiles
// where a hidden term is not zero because one of its factors is infinite or NaN.
template <class Dot, Contiguous kA, Update kUpdate, class Visible>
void masked_gemm(int rows, int vectors, int depth, const Operands& o, Visible visible) {
  for (int m = 0; m < rows; ++m) {
    for (int v = 0; v < vectors; ++v) {
      Floats acc = {};
      for (int k = 0; k < depth; ++k) {
        const Ints bits = visible(m, k, v);
        const Floats a = bit_and(broadcast_word(word_of_a<kA>(o, m, k)), bits);
        const float* b = o.b + k * static_cast<int64_t>(o.ldb) + v * kLanes;
        acc = Dot::add(a, bit_and(load(b), bits), acc);
      }
      update<kUpdate>(o.c + m * static_cast<int64_t>(o.ldc) + v * kLanes, acc,
                      o.factor + v * kLanes);
    }
  }
}

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET

#endif  // JAXFLASH_CSRC_CPU_GEMM_H_
