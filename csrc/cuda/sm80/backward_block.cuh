// SPDX-License-Identifier: Apache-2.0
//
// The backward kernel's block: the keys it owns, the tiles of shared memory, the place
// of its warps in the products, and the copies from and to global memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../common/problem.cuh"
#include "../common/tile.cuh"
#include "fragments.cuh"
#include "launch.h"
#include "tile_config.h"

namespace jaxflash::sm80 {

// Shared memory of a block. Tiles are row-major [rows, columns], swizzled (tile.cuh).
template <class Element, int kConfigIndex>
struct BackwardSharedMemory {
  static constexpr BackwardConfig kConfig = kBackwardConfigs[kConfigIndex];
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kBlockQ = kConfig.block_q;
  static constexpr int kBlockKV = kConfig.block_kv;

  // A tile of rows of Q and what belongs to them.
  struct Stage {
    Element q[kBlockQ * kHeadDim];
    Element d_out[kBlockQ * kHeadDim];
    float lse[kBlockQ];
    float delta[kBlockQ];
  };

  Element k[kBlockKV * kHeadDim];
  Element v[kBlockKV * kHeadDim];
  Element ds[kBlockKV * kBlockQ];  // dS^T
  Element p[kBlockKV * kBlockQ];   // P^T
  Stage stages[kConfig.num_stages];
};

// Addresses of its parts in the .shared window.
template <class Element, int kConfigIndex>
struct BackwardTiles {
  using SharedMemory = BackwardSharedMemory<Element, kConfigIndex>;
  using Stage = typename SharedMemory::Stage;

  const unsigned char* memory;
  uint32_t address;

  __device__ __forceinline__ explicit BackwardTiles(const unsigned char* memory)
      : memory(memory), address(cvta_generic_to_shared(memory)) {}

  __device__ uint32_t k() const { return address + offsetof(SharedMemory, k); }
  __device__ uint32_t v() const { return address + offsetof(SharedMemory, v); }
  __device__ uint32_t ds() const { return address + offsetof(SharedMemory, ds); }
  __device__ uint32_t p() const { return address + offsetof(SharedMemory, p); }
  __device__ uint32_t q(int i) const { return stage(i) + offsetof(Stage, q); }
  __device__ uint32_t d_out(int i) const { return stage(i) + offsetof(Stage, d_out); }
  __device__ uint32_t lse(int i) const { return stage(i) + offsetof(Stage, lse); }

  // lse [block_q], then delta [block_q].
  __device__ const float* row_values(int i) const {
    return reinterpret_cast<const float*>(memory + (lse(i) - address));
  }

 private:
  __device__ uint32_t stage(int i) const {
    return address + offsetof(SharedMemory, stages) + i * int{sizeof(Stage)};
  }
};

// Which keys a block owns. Blocks of one head run together and share its Q and dO in
// L2; the early ones, which the most rows of a causal call see, start first.
struct KeyBlock {
  uint32_t batch_element;
  int kv_head;
  int group_size;
  int first_key;

  __device__ __forceinline__ KeyBlock(const BackwardArguments& arguments,
                                      int block_kv) {
    const jaxflash_attention_params& forward = arguments.params.forward;
    const int num_kv_heads = static_cast<int>(forward.num_kv_heads);
    group_size = static_cast<int>(forward.num_heads) / num_kv_heads;
    first_key = static_cast<int>(blockIdx.x % arguments.num_kv_tiles) * block_kv;
    const uint32_t batch_head = blockIdx.x / arguments.num_kv_tiles;
    kv_head = static_cast<int>(batch_head % num_kv_heads);
    batch_element = batch_head / num_kv_heads;
  }
};

// The tiles of Q that see a block's keys.
template <int kBlockQ>
struct QueryTiles {
  int first;
  int end;
  int num_steps;  // in all heads of the group

  __device__ __forceinline__ QueryTiles(const Visible& visible, const KeyBlock& block) {
    first = visible.first_row(block.first_key) / kBlockQ;
    end = block.first_key < visible.kv_rows ? (visible.q_rows + kBlockQ - 1) / kBlockQ
                                            : 0;
    num_steps = max(0, end - first) * block.group_size;
  }
};

// The walk over the query heads of a group and the Q tiles of each.
struct QueryTile {
  int head;
  int tile;

  __device__ __forceinline__ void advance(int first_tile, int end_tile) {
    if (++tile == end_tile) {
      tile = first_tile;
      ++head;
    }
  }
};

// A warp's place in the products of its block.
template <int kConfigIndex>
struct BackwardWarp {
  static constexpr BackwardConfig kConfig = kBackwardConfigs[kConfigIndex];
  // Fragments of 16 rows x 8 columns: of S^T and dP^T, of dK and dV, of dQ.
  static constexpr int kRows = kConfig.row_tiles;
  static constexpr int kScoreCols = kConfig.block_q / kConfig.split / 8;
  static constexpr int kHeadCols = kConfig.head_dim / kConfig.split / 8;
  static constexpr int kDqRows = kConfig.dq_row_tiles();
  static constexpr int kDqRowWarps = kConfig.dq_row_warps();
  static constexpr int kDqCols =
      kConfig.head_dim * kDqRowWarps / kConfig.num_warps() / 8;

  int lane;
  int lane_col;    // of its first element of a fragment; the row is lane / 4
  int key;         // first of its keys, among the block's
  int part;        // number among the warps of these keys
  int part_row;    // first row of Q of its scores
  int part_chunk;  // first chunk of its dK and dV
  int dq_row;
  int dq_chunk;

  __device__ __forceinline__ BackwardWarp() {
    lane = threadIdx.x % 32;
    lane_col = 2 * (lane % 4);
    const int warp = threadIdx.x / 32;
    key = warp / kConfig.split * 16 * kRows;
    part = warp % kConfig.split;
    part_row = part * kScoreCols * 8;
    part_chunk = part * kHeadCols;
    dq_row = warp % kDqRowWarps * 16 * kDqRows;
    dq_chunk = warp / kDqRowWarps * kDqCols;
  }
};

// Copies between a block's matrices in global memory and its tiles.
template <class Element, int kConfigIndex>
struct BackwardCopies {
  static constexpr BackwardConfig kConfig = kBackwardConfigs[kConfigIndex];
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kBlockQ = kConfig.block_q;
  static constexpr int kBlockKV = kConfig.block_kv;
  static constexpr int kThreads = kConfig.num_threads();
  using Warp = BackwardWarp<kConfigIndex>;

  const BackwardArguments& arguments;
  const KeyBlock& block;
  const BatchIndex& batch;
  const Visible& visible;
  BackwardTiles<Element, kConfigIndex> tiles;
  int head_dim;
  const Element* q;      // row 0 of the group's first head, as is
  const Element* d_out;  // this

  __device__ __forceinline__
  BackwardCopies(const BackwardArguments& arguments, const KeyBlock& block,
                 const BatchIndex& batch, const Visible& visible,
                 const BackwardTiles<Element, kConfigIndex>& tiles)
      : arguments(arguments),
        block(block),
        batch(batch),
        visible(visible),
        tiles(tiles),
        head_dim(static_cast<int>(arguments.params.forward.head_dim)),
        q(first_head(arguments.params.forward.q)),
        d_out(first_head(arguments.params.d_out)) {}

  // Starts the copies of K and V.
  __device__ __forceinline__ void load_keys() const {
    load_keys(tiles.k(), arguments.params.forward.k);
    load_keys(tiles.v(), arguments.params.forward.v);
  }

  // Starts those of Q, dO, lse and delta, and commits all that were started as a group.
  // padded_row is the number of the tile's first row among all padded rows.
  __device__ __forceinline__ void load_stage(int stage, const QueryTile& at,
                                             int64_t padded_row) const {
    load_rows(tiles.q(stage), q, arguments.params.forward.q.strides, at);
    load_rows(tiles.d_out(stage), d_out, arguments.params.d_out.strides, at);
    constexpr int kChunks = kBlockQ / 4;  // of lse, and of delta behind it
    if (threadIdx.x < 2 * kChunks) {
      const float* source = threadIdx.x < kChunks ? arguments.lse : arguments.delta;
      cp_async_cg_16(tiles.lse(stage) + threadIdx.x * 16,
                     source + padded_row + threadIdx.x % kChunks * 4, 16);
    }
    cp_async_commit_group();
  }

  // Writes dK or dV by way of a tile that nobody reads any more.
  __device__ __forceinline__ void store(
      const jaxflash_tensor& matrix, const Fragments<Warp::kRows, Warp::kHeadCols>& x,
      uint32_t tile, const Warp& warp) const {
    if (matrix.data == nullptr) return;
    const int64_t offset = offset_of_keys(matrix);
    const int keys_left =
        static_cast<int>(arguments.params.forward.kv_len) - block.first_key;
    if (matrix.dtype == JAXFLASH_FLOAT32) {
      store_float32(batch_pointer<float>(matrix, batch) + offset, matrix.strides[0], x,
                    warp.key + warp.lane / 4, keys_left,
                    warp.part_chunk * 8 + warp.lane_col, head_dim);
      return;
    }
    store_fragments<Element, kHeadDim>(tile, x, warp.key, warp.part_chunk, warp.lane);
    __syncthreads();  // the whole tile is staged
    store_tile<kBlockKV, kHeadDim, kThreads>(
        batch_pointer<Element>(matrix, batch) + offset, matrix.strides[0], keys_left,
        head_dim, tile, threadIdx.x, arguments.vector_access);
  }

 private:
  __device__ __forceinline__ const Element* first_head(
      const jaxflash_tensor& matrix) const {
    return batch_pointer<const Element>(matrix, batch) +
           block.kv_head * block.group_size * matrix.strides[1];
  }

  __device__ __forceinline__ int64_t
  offset_of_keys(const jaxflash_tensor& matrix) const {
    return block.kv_head * matrix.strides[1] + block.first_key * matrix.strides[0];
  }

  __device__ __forceinline__ void load_keys(uint32_t tile,
                                            const jaxflash_tensor& matrix) const {
    load_tile<kBlockKV, kHeadDim, kThreads>(
        tile, batch_pointer<const Element>(matrix, batch) + offset_of_keys(matrix),
        matrix.strides[0], visible.kv_rows - block.first_key, head_dim,
        arguments.vector_access);
  }

  __device__ __forceinline__ void load_rows(uint32_t tile, const Element* heads,
                                            const int64_t (&strides)[3],
                                            const QueryTile& at) const {
    const int row = at.tile * kBlockQ;
    load_tile<kBlockQ, kHeadDim, kThreads>(
        tile, heads + at.head * strides[1] + row * strides[0], strides[0],
        visible.q_rows - row, head_dim, arguments.vector_access);
  }
};

}  // namespace jaxflash::sm80
