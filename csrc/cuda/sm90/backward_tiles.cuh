// SPDX-License-Identifier: Apache-2.0
//
// What the Hopper kernels for dK and dV have in common: which tiles a thread block
// works on, where they lie in shared memory, and the warp that loads them.
//
//   block   a tile of keys: K and V stay in shared memory, dK and dV in registers
//   step    one tile of Q and dO of one query head of the group, two stages
#pragma once

#include <climits>
#include <cstdint>

#include "../common/problem.cuh"
#include "../common/ptx_sm90.cuh"
#include "../common/wgmma.cuh"
#include "backward_config.h"
#include "launch_backward.h"

namespace jaxflash::sm90 {

// What block `number` takes of KeyTileOrder.
struct KeyBlock {
  uint32_t batch_element;
  int kv_head;
  int tile;

  __device__ __forceinline__ KeyBlock(const BackwardArguments& arguments,
                                      uint32_t number) {
    const KeyTileOrder& order = arguments.order;
    const auto num_kv_heads =
        static_cast<uint32_t>(arguments.params.forward.num_kv_heads);
    const uint32_t blocks_in_section = order.heads_in_section * order.num_tiles;
    const uint32_t section = number / blocks_in_section;
    const uint32_t block = number % blocks_in_section;
    const uint32_t first_head = section * order.heads_in_section;
    const uint32_t heads = min(order.heads_in_section, order.num_heads - first_head);
    const uint32_t head = first_head + block % heads;
    batch_element = head / num_kv_heads;
    kv_head = static_cast<int>(head % num_kv_heads);
    const uint32_t rank = block / heads;
    tile = static_cast<int>(!order.by_turns ? rank
                            : rank < order.num_early
                                ? order.num_early - 1 - rank
                                : order.num_tiles - 1 - (rank - order.num_early));
  }

  // Calls that come here have one batch axis.
  __device__ __forceinline__ BatchIndex batch() const {
    BatchIndex index = {};
    index.axis[0] = batch_element;
    return index;
  }
};

// The tiles of Q that see a tile of keys, in the order in which its block walks them.
// Without a mask the blocks of a head would all start at the same rows: each starts
// where its keys are on the diagonal, and wraps around. With one, they start there
// anyway.
template <int kBlockQ, int kBlockKV>
struct QueryTiles {
  int first;
  int count;
  int start;       // counted from first
  int num_masked;  // the first ones of the walk, which not all keys see

  __device__ __forceinline__ QueryTiles(const Visible& visible, int key_tile) {
    const int first_key = key_tile * kBlockKV;
    const int end = (visible.q_rows + kBlockQ - 1) / kBlockQ;
    first = visible.first_row(first_key) / kBlockQ;
    count = first_key < visible.kv_rows ? max(0, end - first) : 0;
    start = visible.causal ? 0 : key_tile % num_starts(count) * kStartStep;
    const int unmasked_row = visible.first_row(first_key + kBlockKV - 1);
    num_masked = first_key + kBlockKV > visible.kv_rows
                     ? count
                     : min(count, (unmasked_row + kBlockQ - 1) / kBlockQ - first);
  }

  // The starts of consecutive tiles of keys are so many tiles of Q apart, as far as
  // these go round.
  static constexpr int kStartStep = kBlockKV / kBlockQ;
  __device__ __forceinline__ static int num_starts(int num_query_tiles) {
    return max(1, num_query_tiles / kStartStep);
  }

  __device__ __forceinline__ int operator[](int i) const {
    const int tile = start + i;
    return first + (tile < count ? tile : tile - count);
  }
};

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

// Where the rows of a query head start in the buffers of the workspace.
__device__ __forceinline__ int64_t padded_row(const BackwardArguments& arguments,
                                              uint32_t batch_element, int head) {
  const int64_t batch_head = batch_element * arguments.params.forward.num_heads + head;
  return batch_head * arguments.num_rows_padded;
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
  const int group_size = static_cast<int>(forward.num_heads / forward.num_kv_heads);
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
  Stage stage;
  const QueryTiles<kBlockQ, kConfig.block_kv> walk(visible, block.tile);
  if (walk.count == 0) return;
  const int key = block.tile * kConfig.block_kv;
  loader.load(tiles.k, &arguments.k, barriers.kv_full, 0, key, 0, end_key,
              block.kv_head, map_batch(forward.k, block.batch_element));
  loader.load(tiles.v, &arguments.v, barriers.kv_full, 0, key, 0, end_key,
              block.kv_head, map_batch(forward.v, block.batch_element));
  const int begin_row = visible.first_row(key);
  griddepcontrol_wait();  // lse and delta are written
  int64_t head_row =
      padded_row(arguments, block.batch_element, block.kv_head * group_size);
  const int end_head = (block.kv_head + 1) * group_size;
#pragma unroll 1
  for (int head = block.kv_head * group_size; head < end_head; ++head) {
#pragma unroll 1
    for (int step = 0; step < walk.count; ++step) {
      const int row = walk[step] * kBlockQ;
      const int s = stage.index;
      wait(barriers.q_empty[s], stage.parity ^ 1);
      loader.load(tiles.q[s], &arguments.q, barriers.q_full[s], kRowBytes, row,
                  begin_row, end_row, head, map_batch(forward.q, block.batch_element));
      if (lane == 0) {
        cp_async_bulk_load(cvta_generic_to_shared(rows.lse[s]),
                           arguments.lse + head_row + row, kRowBytes,
                           cvta_generic_to_shared(&barriers.q_full[s]));
      }
      wait(barriers.d_out_empty[s], stage.parity ^ 1);
      loader.load(tiles.d_out[s], &arguments.d_out, barriers.d_out_full[s], kRowBytes,
                  row, begin_row, end_row, head,
                  map_batch(arguments.params.d_out, block.batch_element));
      if (lane == 0) {
        cp_async_bulk_load(cvta_generic_to_shared(rows.delta[s]),
                           arguments.delta + head_row + row, kRowBytes,
                           cvta_generic_to_shared(&barriers.d_out_full[s]));
      }
      __syncwarp();  // a lane two phases ahead of the others would keep them waiting
      stage.advance();
    }
    head_row += arguments.num_rows_padded;
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
