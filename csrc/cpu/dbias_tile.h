// SPDX-License-Identifier: Apache-2.0
//
// A tile of the gradient of bias, summed over everything that shares it.
#ifndef JAXFLASH_CSRC_CPU_DBIAS_TILE_H_
#define JAXFLASH_CSRC_CPU_DBIAS_TILE_H_

#include <cstdint>

#include "cpu/pack.h"
#include "cpu/simd.h"

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {

// How the rows and keys of a key/value head map to the rows and columns of dbias, of
// which those that are summed have one.
struct DbiasAxes {
  int64_t group;
  bool has_heads, has_positions, has_keys;

  int64_t row(int64_t r) const {
    if (has_heads && has_positions) return r;
    if (has_positions) return r / group;
    return has_heads ? r % group : 0;
  }
};

struct DbiasTile {
  static constexpr int kFloats = 8 * 1024;

  DbiasAxes axes;
  int64_t first_row, first_key;
  int rows;
  int ld;       // whole vectors; where keys are summed, one
  float* sums;  // [rows, ld]

  // Adds dS of row r and of the vector of keys that begins with `key`.
  void add(int64_t r, int64_t key, Floats ds) const {
    const int64_t row = axes.row(r) - first_row;
    if (row < 0 || row >= rows) return;
    float* to = sums + row * ld + (axes.has_keys ? key - first_key : 0);
    store(to, load(to) + ds);
  }
};

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET

#endif  // JAXFLASH_CSRC_CPU_DBIAS_TILE_H_
