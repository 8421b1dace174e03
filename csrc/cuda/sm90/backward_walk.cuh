// SPDX-License-Identifier: Apache-2.0
//
// Which tiles a thread block of the Hopper kernels for dK and dV works on, and in which
// order.
//
//   block   a tile of keys of one key/value head
//   step    one tile of Q and dO, of one query head of the group
#pragma once

#include <cstdint>

#include "../common/problem.cuh"
#include "launch_backward.h"

namespace jaxflash::sm90 {

// What block `number` takes of KeyTileOrder.
struct KeyBlock {
  uint32_t batch_element;
  int kv_head;
  int tile;
  bool upwards;  // of steps by rows: from the last rows up

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
    upwards = order.by_rows && section % 2 == 0;
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

// The tiles of Q that see a tile of keys: [first, end).
template <int kBlockQ, int kBlockKV>
struct QueryTiles {
  int first;
  int end;
  int start;       // of a walk downwards; `first` in causal calls
  int end_masked;  // in tiles before it, which may be all, not all rows see all keys

  __device__ __forceinline__ QueryTiles(const Visible& visible, int key_tile) {
    const int first_key = key_tile * kBlockKV;
    first = visible.first_row(first_key) / kBlockQ;
    end = first_key < visible.kv_rows
              ? max(first, (visible.q_rows + kBlockQ - 1) / kBlockQ)
              : first;
    start = visible.causal ? first : key_tile % num_starts(end) * kStartStep;
    const int unmasked_row = visible.first_row(first_key + kBlockKV - 1);
    end_masked = first_key + kBlockKV > visible.kv_rows
                     ? end
                     : (unmasked_row + kBlockQ - 1) / kBlockQ;
  }

  // The starts of consecutive tiles of keys are so many tiles of Q apart, as far as
  // these go round.
  static constexpr int kStartStep = kBlockKV / kBlockQ;
  __device__ __forceinline__ static int num_starts(int num_query_tiles) {
    return max(1, num_query_tiles / kStartStep);
  }
};

// The steps of a block. Q, dO and dQ of all heads that run at a time may not fit L2, so
// the order keeps blocks that run together near each other.
//
//   by heads  Without a mask, blocks of a head start at the same time and stay at the
//             same head. They would stay at the same rows too: each starts where its
//             keys are on the diagonal, and wraps around. In a causal call they start
//             on the diagonal anyway.
//   by rows   With groups, a causal block of late keys, which few rows see, would soon
//             be heads ahead of the others. So blocks take a tile of Q of all heads of
//             the group before they go on, those of a section upwards from the last
//             rows, and those of the next one downwards from the diagonal. The block of
//             key tile j of the next section follows one that saw j tiles of Q, that
//             is, when the others of that section have come down to about j: so all of
//             it is at the same rows, too. (As far as a section fills the SMs once.)
template <int kBlockQ, int kBlockKV>
struct QueryWalk {
  const BackwardArguments& arguments;
  QueryTiles<kBlockQ, kBlockKV> tiles;
  int direction;
  int q_tile;
  int head = 0;  // of the group

  __device__ __forceinline__ QueryWalk(const BackwardArguments& arguments,
                                       const KeyBlock& block, const Visible& visible)
      : arguments(arguments),
        tiles(visible, block.tile),
        direction(block.upwards ? -1 : 1),
        q_tile(block.upwards ? tiles.end - 1 : tiles.start) {}

  __device__ __forceinline__ int num_steps() const {
    return (tiles.end - tiles.first) * arguments.group_size;
  }

  __device__ __forceinline__ void advance() {
    if (arguments.order.by_rows) {
      if (++head < arguments.group_size) return;
      head = 0;
      q_tile += direction;
    } else {
      if (++q_tile == tiles.end) q_tile = tiles.first;
      if (q_tile == tiles.start) ++head;
    }
  }

  __device__ __forceinline__ bool is_masked() const {
    return q_tile < tiles.end_masked;
  }

  // At a step that is not masked, the first one or one behind a masked one: goes to the
  // next masked step, or the end, and returns how many steps it passed over.
  __device__ __forceinline__ int skip_unmasked() {
    const int count = tiles.end - max(tiles.first, tiles.end_masked);
    if (arguments.order.by_rows) {
      q_tile += count * direction;
      return count * arguments.group_size;
    }
    q_tile = tiles.start;
    ++head;
    return count;
  }
};

}  // namespace jaxflash::sm90
