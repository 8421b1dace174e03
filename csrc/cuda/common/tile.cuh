// SPDX-License-Identifier: Apache-2.0
//
// Tiles of 16-bit elements in shared memory: row-major [rows, kCols], in chunks of 8
// elements (16 bytes) whose order within a row is permuted so that the 8 rows of an
// ldmatrix, or of a cp.async front, hit 8 different bank groups:
//
//   kCols % 64 == 0:  chunk c of row r sits at c ^ (r % 8)
//   else (32, 96):    a row starts 64 bytes off its neighbour, so c ^ (r / 2 % 4)
//
// Both maps stay inside the row, and adding a multiple of 8 to r changes neither.
#pragma once

#include <cstdint>

#include "ptx_sm80.cuh"

namespace jaxflash {

template <int kCols>
__device__ __forceinline__ uint32_t swizzle_of_row(uint32_t row) {
  return kCols % 64 == 0 ? row % 8 : row / 2 % 4;
}

// Byte offset of a chunk of a tile.
template <int kCols>
__device__ __forceinline__ uint32_t chunk_offset(uint32_t row, uint32_t chunk) {
  return row * (kCols * 2) + ((chunk ^ swizzle_of_row<kCols>(row)) << 4);
}

// Where one lane points for the ldmatrix instructions that walk a tile: lane l
// addresses row `row_of_lane` and, within pairs of chunks, chunk `chunk_of_lane`.
template <int kCols>
struct LaneAddress {
  uint32_t base;
  uint32_t swizzle;

  __device__ __forceinline__ LaneAddress(uint32_t tile, uint32_t row_of_lane,
                                         uint32_t chunk_of_lane)
      : base(tile + row_of_lane * (kCols * 2)),
        swizzle((swizzle_of_row<kCols>(row_of_lane) ^ chunk_of_lane) << 4) {}

  // `row` is a multiple of 8, `chunk` even: the lane's own parts are in the members.
  __device__ __forceinline__ uint32_t at(uint32_t row, uint32_t chunk) const {
    return base + row * (kCols * 2) + ((chunk << 4) ^ swizzle);
  }
};

// The three ways in which the kernels read 16 x 16 blocks with one ldmatrix_x4.
// A operand [16 rows, 16 of k] from a [rows, k] tile: rows 0-15, then the next chunk.
template <int kCols>
__device__ __forceinline__ LaneAddress<kCols> operand_a(uint32_t tile, int lane) {
  return {tile, static_cast<uint32_t>(lane % 16), static_cast<uint32_t>(lane / 16)};
}
// Two n8 B operands [16 of n, 16 of k] from an [n, k] tile.
template <int kCols>
__device__ __forceinline__ LaneAddress<kCols> operand_b(uint32_t tile, int lane) {
  return {tile, static_cast<uint32_t>(lane % 8 + lane / 16 * 8),
          static_cast<uint32_t>(lane / 8 % 2)};
}
// Two n8 B operands [16 of k, 16 of n] from a [k, n] tile, with ldmatrix .trans: the
// lanes walk as in operand_a. An A operand from a [k, rows] tile walks as operand_b.

// Element by element, for rows that do not start on 16 bytes. Not inlined: the kernels
// keep their registers for the path that everybody takes.
template <int kRows, int kCols, int kThreads>
__device__ __noinline__ void load_tile_by_elements(uint32_t tile,
                                                   const uint16_t* source,
                                                   int64_t row_stride, int rows_left,
                                                   int cols) {
  constexpr int kChunks = kCols / 8;
#pragma unroll 1
  for (uint32_t index = threadIdx.x; index < kRows * kChunks; index += kThreads) {
    const uint32_t row = index / kChunks;
    const uint32_t chunk = index % kChunks;
    uint32_t words[4] = {0, 0, 0, 0};
    if (static_cast<int>(row) < rows_left) {
      const uint16_t* bits = source + row * row_stride + chunk * 8;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (static_cast<int>(chunk * 8) + i < cols) {
          words[i / 2] |= static_cast<uint32_t>(bits[i]) << (16 * (i % 2));
        }
      }
    }
    st_shared_v4(tile + chunk_offset<kCols>(row, chunk),
                 make_uint4(words[0], words[1], words[2], words[3]));
  }
}

// Starts the copy of rows [0, kRows) x columns [0, kCols) of a global matrix into a
// tile. Rows at or past rows_left and columns at or past cols become zeros and are not
// read. The caller commits, waits and synchronises. vector_access: base, row stride and
// cols are multiples of 16 bytes.
template <int kRows, int kCols, int kThreads, class Element>
__device__ __forceinline__ void load_tile(uint32_t tile, const Element* source,
                                          int64_t row_stride, int rows_left, int cols,
                                          bool vector_access) {
  if (!vector_access) {
    load_tile_by_elements<kRows, kCols, kThreads>(
        tile, reinterpret_cast<const uint16_t*>(source), row_stride, rows_left, cols);
    return;
  }
  // Every step covers whole rows, so that a thread stays in one column of chunks.
  constexpr int kChunks = kCols / 8;
  constexpr int kRowsPerStep = kThreads / kChunks;
  constexpr int kSteps = (kRows + kRowsPerStep - 1) / kRowsPerStep;
  const uint32_t first_row = threadIdx.x / kChunks;
  const uint32_t chunk = threadIdx.x % kChunks;
  if (kThreads % kChunks != 0 && first_row >= kRowsPerStep) return;
  const int rows_for_thread = static_cast<int>(chunk * 8) < cols ? rows_left : 0;
  const int whole_bytes = rows_for_thread > 0 ? 16 : 0;
  const Element* pointer = source + first_row * row_stride + chunk * 8;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const uint32_t row = first_row + step * kRowsPerStep;
    if (kRows % kRowsPerStep != 0 && row >= kRows) break;
    cp_async_cg_16(tile + chunk_offset<kCols>(row, chunk), pointer,
                   rows_left == kRows                        ? whole_bytes
                   : static_cast<int>(row) < rows_for_thread ? 16
                                                             : 0);
    pointer += kRowsPerStep * row_stride;
  }
}

// The way back: rows [0, kRows) x columns [0, cols) of a tile to global memory, by
// kThreads threads of which this one is number `thread`.
template <int kRows, int kCols, int kThreads, class Element>
__device__ __forceinline__ void store_tile(Element* destination, int64_t row_stride,
                                           int rows_left, int cols, uint32_t tile,
                                           int thread, bool vector_access) {
  constexpr int kChunks = kCols / 8;
#pragma unroll 1
  for (uint32_t index = thread; index < kRows * kChunks; index += kThreads) {
    const uint32_t row = index / kChunks;
    const uint32_t chunk = index % kChunks;
    const int cols_left = cols - static_cast<int>(chunk * 8);
    if (static_cast<int>(row) >= rows_left || cols_left <= 0) continue;
    const uint4 words = ld_shared_v4(tile + chunk_offset<kCols>(row, chunk));
    Element* target = destination + row * row_stride + chunk * 8;
    if (vector_access) {
      *reinterpret_cast<uint4*>(target) = words;
      continue;
    }
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
    auto* bits = reinterpret_cast<uint16_t*>(target);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < cols_left) {
        bits[i] = static_cast<uint16_t>(word[i / 2] >> (16 * (i % 2)));
      }
    }
  }
}

}  // namespace jaxflash
