// SPDX-License-Identifier: Apache-2.0
//
// Who does what when, in the forward kernel: the order of the work items, and
// rings: of slots and stages that are filled and emptied one after the other.
#pragma once

#include <cstdint>

#include "../common/problem.cuh"
#include "launch.h"

namespace jaxflash::sm90 {

// A tile of Q of one head, as the loader describes it to the other warps of the block.
// Row i of Q sees the first key_limit(i) keys.
struct WorkItem {
  static constexpr int kNone = -1;

  int num_tiles;       // of K and V, all that some row sees; kNone: the work is done
  int num_full_tiles;  // of these the first, which every row sees whole
  int first_row;
  int head;
  int kv_head;
  int batch;
  int q_rows;    // rows at or past it are padding
  int kv_rows;   // keys at or past it are hidden from all
  int diagonal;  // of a causal call: row 0 sees the first `diagonal` keys
  float scale;

  __device__ __forceinline__ int key_limit(int row) const {
    return max(0, min(kv_rows, row + diagonal));
  }
};

__device__ __forceinline__ BatchIndex single_batch_axis(int batch) {
  BatchIndex index = {};
  index.axis[0] = static_cast<uint32_t>(batch);
  return index;
}

template <int kBlockQ, int kBlockKV>
__device__ __forceinline__ WorkItem describe_work(const ForwardArguments& arguments,
                                                  uint32_t index) {
  WorkItem item = {};
  if (index >= arguments.num_work_items) {
    item.num_tiles = WorkItem::kNone;
    return item;
  }
  const uint32_t section_size = arguments.heads_per_section;
  const uint32_t section = index / (section_size * arguments.num_q_tiles);
  const uint32_t first_head = section * section_size;
  const uint32_t within = index - first_head * arguments.num_q_tiles;
  const uint32_t heads = min(section_size, arguments.num_batch_heads - first_head);
  const uint32_t q_tile = arguments.num_q_tiles - 1 - within / heads;
  const uint32_t batch_head = first_head + within % heads;
  const uint32_t num_heads = static_cast<uint32_t>(arguments.params.num_heads);
  item.first_row = static_cast<int>(q_tile) * kBlockQ;
  item.batch = static_cast<int>(batch_head / num_heads);
  item.head = static_cast<int>(batch_head % num_heads);
  item.kv_head = item.head / arguments.heads_per_kv_head;

  const BatchIndex batch = single_batch_axis(item.batch);
  item.scale = softmax_scale(arguments.params, batch);
  const Visible visible(arguments.params, batch);
  constexpr int kNoDiagonal = 1 << 30;
  item.q_rows = visible.q_rows;
  item.kv_rows = visible.kv_rows;
  item.diagonal = visible.causal ? visible.offset + 1 : kNoDiagonal;

  const int end_row = min(item.first_row + kBlockQ, item.q_rows);
  const int end_key = end_row > item.first_row ? item.key_limit(end_row - 1) : 0;
  item.num_tiles = (end_key + kBlockKV - 1) / kBlockKV;
  item.num_full_tiles = item.key_limit(item.first_row) / kBlockKV;
  return item;
}

// Index of the item that a block takes after this one. The first is blockIdx.x.
__device__ __forceinline__ uint32_t next_work(const ForwardArguments& arguments,
                                              uint32_t index) {
  if (arguments.num_taken == nullptr) return index + arguments.num_blocks;
  return arguments.num_blocks + atomicAdd(arguments.num_taken, 1u);
}

// Where a thread stands in a ring of kStages stages. The parity flips at every lap.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }

  __device__ __forceinline__ void advance(int count) {
    stage += count;
    parity ^= stage / kStages & 1;
    stage %= kStages;
  }

  // By less than one lap.
  __device__ __forceinline__ void retreat(int count) {
    stage -= count;
    if (stage < 0) {
      stage += kStages;
      parity ^= 1;
    }
  }
};

}  // namespace jaxflash::sm90
