// SPDX-License-Identifier: Apache-2.0
//
// Tiles of the Hopper backward kernels in shared memory, and the warp that loads those
// for dK and dV: K and V of a block stay there, Q and dO of its steps have two stages.
#pragma once

#include <climits>
#include <cstdint>

#include "../common/problem.cuh"
#include "../common/ptx_sm90.cuh"
#include "../common/wgmma.cuh"
#include "backward_config.h"
#include "backward_walk.cuh"
#include "launch_backward.h"

namespace jaxflash::sm90 {

// Stage of Q and dO, and the parity of the phase that its barriers are in.
struct Stage {
  int index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    index ^= 1;
    parity ^= index == 0;
  }
};

constexpr int kStages = 2;

// 16-bit matrices, in panels of 64 columns as wgmma.cuh describes them.
template <int kRows, int kColumns>
struct alignas(1024) Tile {
  static constexpr int kNumPanels = panels_of(kColumns);
  static constexpr int kPanelBytes = kRows * kPanelRowBytes;
  unsigned char bytes[kNumPanels * kPanelBytes];

  __device__ __forceinline__ uint32_t address() const {
    return cvta_generic_to_shared(bytes);
  }
};

template <int kConfigIndex>
struct OperandTiles {
  static constexpr BackwardConfig kConfig = kBackwardConfigs[kConfigIndex];
  Tile<kConfig.block_kv, kConfig.head_dim> k;
  Tile<kConfig.block_kv, kConfig.head_dim> v;
  Tile<kConfig.block_q, kConfig.head_dim> q[kStages];
  Tile<kConfig.block_q, kConfig.head_dim> d_out[kStages];
};

template <int kConfigIndex>
struct alignas(16) RowValues {
  float lse[kStages][kBackwardConfigs[kConfigIndex].block_q];
  float delta[kStages][kBackwardConfigs[kConfigIndex].block_q];
};

struct OperandBarriers {
  uint64_t kv_full;
  uint64_t q_full[kStages];  // Q and lse
  uint64_t q_empty[kStages];
  uint64_t d_out_full[kStages];  // dO and delta
  uint64_t d_out_empty[kStages];
  uint64_t landed;  // a tile that the loading warp has to work on

  // q_releases, d_out_releases: arrivals that hand back a stage.
  __device__ __forceinline__ void init(int q_releases, int d_out_releases) {
    mbarrier_init(cvta_generic_to_shared(&kv_full), 2);
    mbarrier_init(cvta_generic_to_shared(&landed), 1);
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(cvta_generic_to_shared(&q_full[i]), 1);
      mbarrier_init(cvta_generic_to_shared(&q_empty[i]), q_releases);
      mbarrier_init(cvta_generic_to_shared(&d_out_full[i]), 1);
      mbarrier_init(cvta_generic_to_shared(&d_out_empty[i]), d_out_releases);
    }
  }
};

__device__ __forceinline__ void wait(const uint64_t& barrier, uint32_t parity) {
  mbarrier_wait(cvta_generic_to_shared(&barrier), parity);
}
__device__ __forceinline__ void arrive(const uint64_t& barrier) {
  mbarrier_arrive(cvta_generic_to_shared(&barrier));
}

// One warp that loads tiles of 16-bit matrices.
struct TileLoader {
  uint32_t landed;  // barrier
  uint32_t landed_parity = 0;
  int lane;

  __device__ __forceinline__ TileLoader(const uint64_t& landed_barrier, int lane)
      : landed(cvta_generic_to_shared(&landed_barrier)), lane(lane) {}

  template <int kRows, int kColumns>
  __device__ __forceinline__ void start(const Tile<kRows, kColumns>& tile,
                                        const CUtensorMap* map, uint32_t barrier,
                                        int row, int head, int batch) {
#pragma unroll
    for (int panel = 0; panel < tile.kNumPanels; ++panel) {
      cp_async_bulk_tensor_4d_load(tile.address() + panel * tile.kPanelBytes, map,
                                   barrier, panel * kPanelColumns, row, head, batch);
    }
  }

  // Loads rows [row, row + kRows) and makes them known to `full`, together with
  // more_bytes that the caller copies. Rows before begin_row or from end_row on are not
  // part of the problem: a product with P = 0 or dS = 0 does not free the sum from inf
  // or NaN in them, so the loading warp puts zeros there before it shows the tile to
  // others.
  template <int kRows, int kColumns>
  __device__ __forceinline__ void load(const Tile<kRows, kColumns>& tile,
                                       const CUtensorMap* map, const uint64_t& full,
                                       uint32_t more_bytes, int row, int begin_row,
                                       int end_row, int head, int batch) {
    const uint32_t full_barrier = cvta_generic_to_shared(&full);
    if (begin_row <= row && end_row - row >= kRows) {
      if (lane != 0) return;
      mbarrier_arrive_expect_tx(full_barrier, sizeof(tile.bytes) + more_bytes);
      start(tile, map, full_barrier, row, head, batch);
      return;
    }
    if (lane == 0) {
      mbarrier_arrive_expect_tx(landed, sizeof(tile.bytes));
      start(tile, map, landed, row, head, batch);
    }
    mbarrier_wait(landed, landed_parity);
    landed_parity ^= 1;
#pragma unroll 1
    for (int r = row + lane; r < row + kRows; r += 32) {
      if (r >= begin_row && r < end_row) continue;
      const uint32_t address = tile.address() + (r - row) * kPanelRowBytes;
#pragma unroll
      for (int chunk = 0; chunk < tile.kNumPanels * 8; ++chunk) {
        st_shared_v4(address + chunk / 8 * tile.kPanelBytes + chunk % 8 * 16,
                     make_uint4(0, 0, 0, 0));
      }
    }
    fence_proxy_async_shared();
    __syncwarp();  // all zeros are written
    if (lane == 0) mbarrier_arrive_expect_tx(full_barrier, more_bytes);
  }
};

// Coordinate of a batch element in the tensor map of an operand.
__device__ __forceinline__ int map_batch(const jaxflash_tensor& tensor,
                                         uint32_t batch_element) {
  return tensor.batch_strides[0] == 0 ? 0 : static_cast<int>(batch_element);
}

// Number of a tile of Q among those of all heads in the workspace.
template <int kBlockQ>
__device__ __forceinline__ uint32_t tile_of_all(const BackwardArguments& arguments,
                                                uint32_t batch_element, int head,
                                                int q_tile) {
  const auto num_heads = static_cast<uint32_t>(arguments.params.forward.num_heads);
  return (batch_element * num_heads + head) * (arguments.num_rows_padded / kBlockQ) +
         q_tile;
}

// The loading warp of a block.
template <int kConfigIndex>
__device__ __forceinline__ void load_operands(const BackwardArguments& arguments,
                                              OperandTiles<kConfigIndex>& tiles,
                                              RowValues<kConfigIndex>& rows,
                                              OperandBarriers& barriers,
                                              uint32_t block_number) {
  constexpr BackwardConfig kConfig = kBackwardConfigs[kConfigIndex];
  constexpr int kBlockQ = kConfig.block_q;
  constexpr uint32_t kRowBytes = kBlockQ * sizeof(float);
  const jaxflash_attention_params& forward = arguments.params.forward;
  const KeyBlock block(arguments, block_number);
  const Visible visible(forward, block.batch());
  const int lane = threadIdx.x % 32;
  const auto end_of = [](int rows, int64_t rows_in_memory) {
    return rows < rows_in_memory ? rows : INT_MAX;  // the copy engine fills with zeros
  };
  const int end_key = end_of(visible.kv_rows, forward.kv_len);
  const int end_row = end_of(visible.q_rows, forward.q_len);

  if (lane == 0) {
    prefetch_tensormap(&arguments.q);
    prefetch_tensormap(&arguments.d_out);
  }
  TileLoader loader(barriers.landed, lane);
  QueryWalk<kBlockQ, kConfig.block_kv> walk(arguments, block, visible);
  const int num_steps = walk.num_steps();
  if (num_steps == 0) return;
  const int key = block.tile * kConfig.block_kv;
  loader.load(tiles.k, &arguments.k, barriers.kv_full, 0, key, 0, end_key,
              block.kv_head, map_batch(forward.k, block.batch_element));
  loader.load(tiles.v, &arguments.v, barriers.kv_full, 0, key, 0, end_key,
              block.kv_head, map_batch(forward.v, block.batch_element));
  const int begin_row = visible.first_row(key);
  griddepcontrol_wait();  // lse and delta are written
  const int first_head = block.kv_head * arguments.group_size;
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step, walk.advance()) {
    const int head = first_head + walk.head;
    const int row = walk.q_tile * kBlockQ;
    const uint32_t tile =
        tile_of_all<kBlockQ>(arguments, block.batch_element, head, walk.q_tile);
    const auto start_row_values = [&](float* target, const float* values,
                                      const uint64_t& full) {
      if (lane != 0) return;
      cp_async_bulk_load(cvta_generic_to_shared(target),
                         values + int64_t{tile} * kBlockQ, kRowBytes,
                         cvta_generic_to_shared(&full));
    };
    const int s = step % kStages;
    const uint32_t parity = step / kStages % 2;
    wait(barriers.q_empty[s], parity ^ 1);
    loader.load(tiles.q[s], &arguments.q, barriers.q_full[s], kRowBytes, row, begin_row,
                end_row, head, map_batch(forward.q, block.batch_element));
    start_row_values(rows.lse[s], arguments.lse, barriers.q_full[s]);
    wait(barriers.d_out_empty[s], parity ^ 1);
    loader.load(tiles.d_out[s], &arguments.d_out, barriers.d_out_full[s], kRowBytes,
                row, begin_row, end_row, head,
                map_batch(arguments.params.d_out, block.batch_element));
    start_row_values(rows.delta[s], arguments.delta, barriers.d_out_full[s]);
    __syncwarp();  // a lane two phases ahead of the others would keep them waiting
  }
}

// Whether any lse of a range of tiles of Q is in natural units: then all steps of the
// block take the path that looks.
__device__ __forceinline__ bool any_large_lse(const int* large_lse, int count,
                                              int lane) {
  int any = 0;
#pragma unroll 4
  for (int i = lane; i < count; i += 32) any |= large_lse[i];
  return __any_sync(~0u, any != 0);
}

}  // namespace jaxflash::sm90
