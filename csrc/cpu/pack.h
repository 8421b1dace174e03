// SPDX-License-Identifier: Apache-2.0
//
// From strided rows of a tensor to the operands of gemm.h: contiguous 32-bit words, as
// float32, or as pairs of bfloat16 where the machine multiplies those.
#ifndef JAXFLASH_CSRC_CPU_PACK_H_
#define JAXFLASH_CSRC_CPU_PACK_H_

#include <cassert>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "api/validate.h"
#include "cpu/element.h"
#include "cpu/simd.h"

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {

// How one dtype is computed: elements in memory, and words in products.
template <class ElementType, class DotType>
struct Mode {
  using Element = ElementType;
  using Dot = DotType;
  static constexpr int kElements = Dot::kElements;
  static constexpr bool kPairs = kElements == 2;
};

// Words that hold `count` neighbours.
template <class M>
constexpr int words(int count) {
  return (count + M::kElements - 1) / M::kElements;
}

// The rows of one key/value head's matrices. The `group` query heads that share a
// key/value head form one matrix: row r is position r / group of head r % group. So
// rows are sorted by position, and a few queries of many heads fill a vector.
template <class Element>
struct Rows {
  Element* data;
  int64_t position_stride;
  int64_t head_stride;
  int64_t column_stride;
  int64_t group;

  Element* row(int64_t r) const {
    if (group == 1) return data + r * position_stride;
    return data + r / group * position_stride + r % group * head_stride;
  }
};

// Words of one row, neighbours along the columns; the last one is filled with zero.
template <class M>
inline void pack_row(const typename M::Element* x, int64_t stride, int columns,
                     float* to) {
  if constexpr (M::kPairs) {
    if (columns % 2 != 0) to[columns / 2] = 0.0f;
    auto* elements = reinterpret_cast<char*>(to);
    if (stride == 1) {
      std::memcpy(elements, x, columns * sizeof(*x));
    } else {
      for (int c = 0; c < columns; ++c) {
        std::memcpy(elements + c * sizeof(*x), x + c * stride, sizeof(*x));
      }
    }
  } else {
    load_row(x, stride, columns, to);
  }
}

// to[r][w]: words along the columns.
template <class M>
void pack_rows(const Rows<const typename M::Element>& x, int64_t first, int rows,
               int columns, float* to, int ld) {
  for (int r = 0; r < rows; ++r) {
    pack_row<M>(x.row(first + r), x.column_stride, columns, to + r * ld);
  }
}

// to[w][r]: the transpose of pack_rows, with zeros up to `width` rows.
template <class M>
void pack_transposed(const Rows<const typename M::Element>& x, int64_t first, int rows,
                     int columns, int width, float* to, int ld) {
  constexpr int kStrip = kLanes < 8 ? kLanes : 8;  // rows transposed at a time
  float strip[kStrip][kMaxHeadDim];
  const int depth = words<M>(columns);
  for (int r = 0; r < width; r += kStrip) {
    for (int s = 0; s < kStrip; ++s) {
      if (r + s < rows) {
        pack_row<M>(x.row(first + r + s), x.column_stride, columns, strip[s]);
      } else {
        std::memset(strip[s], 0, depth * sizeof(float));
      }
    }
    for (int w = 0; w < depth; ++w) {
      float* column = to + w * static_cast<int64_t>(ld) + r;
      for (int s = 0; s < kStrip; ++s) std::memcpy(column + s, &strip[s][w], 4);
    }
  }
}

// to[w][c]: words along the rows, the last one filled with zero.
template <class M>
void pack_along_rows(const Rows<const typename M::Element>& x, int64_t first, int rows,
                     int columns, float* to, int ld) {
  if constexpr (M::kPairs) {
    using Element = typename M::Element;
    for (int r = 0; r < rows; r += 2) {
      const Element* low = x.row(first + r);
      const bool last = r + 1 == rows;
      const Element* high = last ? low : x.row(first + r + 1);
      const uint32_t keep_high = last ? 0u : 0xffff0000u;
      float* words = to + r / 2 * ld;
      auto pair = [&](int c, int64_t at) {
        const uint32_t bits = low[at].bits | (high[at].bits << 16 & keep_high);
        std::memcpy(words + c, &bits, sizeof(bits));
      };
      if (x.column_stride == 1) {
        for (int c = 0; c < columns; ++c) pair(c, c);
      } else {
        for (int c = 0; c < columns; ++c) pair(c, c * x.column_stride);
      }
    }
  } else {
    pack_rows<M>(x, first, rows, columns, to, ld);
  }
}

// Multiplies every element by a factor that loses no bits: 0 or -1.
template <class M>
void multiply_words(float* x, int count, float factor) {
  for (int w = 0; w < count; ++w) {
    if constexpr (M::kPairs) {
      typename M::Element pair[2];
      std::memcpy(pair, x + w, sizeof(pair));
      for (auto& element : pair) from_float(factor * to_float(element), &element);
      std::memcpy(x + w, pair, sizeof(pair));
    } else {
      x[w] *= factor;
    }
  }
}

// Whether packed words hold an infinity or a NaN.
template <class M>
bool any_non_finite(const float* x, int rows, int columns, int ld) {
  constexpr uint32_t kHigh = 0x7f800000u;
  constexpr uint32_t kLow = M::kPairs ? 0x7f80u : 0x10000u;  // 0x10000: never matches
  uint32_t found = 0;
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < columns; ++c) {
      const uint32_t bits = bit_cast<uint32_t>(x[r * ld + c]);
      found |= (bits & kHigh) == kHigh;
      found |= (bits & 0xffffu & kLow) == kLow;
    }
  }
  return found != 0;
}

// The bits of word w whose elements are selected, of `count` elements in all;
// selected(element) gives a mask per lane.
template <class M, class Selected>
inline Ints bits_of_word(int w, int count, Selected selected) {
  if constexpr (M::kPairs) {
    const Ints high = 2 * w + 1 < count ? selected(2 * w + 1) : Ints{};
    return (selected(2 * w) & 0xffff) | (high & ~0xffff);
  } else {
    return selected(w);
  }
}

// Carves float arrays out of one buffer, each aligned to a cache line.
class Arena {
 public:
  Arena(float* buffer, int64_t capacity) : next_(buffer), end_(buffer + capacity) {}

  float* take(int64_t count) {
    float* array = next_;
    next_ += (count + 15) / 16 * 16;
    assert(next_ <= end_);
    return array;
  }

 private:
  float* next_;
  [[maybe_unused]] float* const end_;
};

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET

#endif  // JAXFLASH_CSRC_CPU_PACK_H_
