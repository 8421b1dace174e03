// SPDX-License-Identifier: Apache-2.0
//
// Who adds when to a sum of dQ. The first block to come stores its part, so that
// nothing has to be zeroed; a sum to which none comes has no value.
//
// Without further wishes blocks come as they come. Each takes a place when its part is
// ready, and then waits for nothing but the store of the first one, which is under way.
//
// The order of float32 additions decides the last bits of dQ. In deterministic calls
// the blocks take turns.
//
// A block draws its number when it starts to run; the number says which keys it takes.
// Its turns come after those of lower numbers, and of no others. All of these run or
// have ended, and the lowest one that runs waits for nobody. So one block always gets
// on, in whatever order and however few at a time the GPU runs them: nothing depends on
// what else holds its SMs.
//
// So that nobody waits for long, blocks that start together should come to a tile in
// the order of their numbers. A block of later keys has the lower one:
//
//   causal  Blocks start where their keys are on the diagonal: the later the keys, the
//           nearer is any tile of Q that sees them.
//   full    The block of key tile j starts at tile j kStartStep of Q and wraps around.
//           To a tile of Q first come, from later to earlier keys, the blocks that
//           started at or before it, and then, again from later to earlier keys, those
//           that have wrapped around.
//
// These are two descending orders, hence two sums with turns of their own: before and
// after wrapping around. The conversion of dQ adds them up. A causal call, where blocks
// of later keys have less to do, uses them to let the longest blocks start before
// shorter ones, which fill the gaps at the end: the first num_early tiles of keys have
// the lower numbers and the first sum, the others the second.
#pragma once

#include <cstdint>

#include "../common/ptx_sm90.cuh"
#include "backward_walk.cuh"
#include "launch_backward.h"

namespace jaxflash::sm90 {

// The number of a block: what it takes of the work.
__device__ __forceinline__ uint32_t draw_number(const BackwardArguments& arguments) {
  if (!arguments.order.by_turns) return blockIdx.x;
  griddepcontrol_wait();  // num_tickets is zero
  return atomicAdd(arguments.num_tickets, 1u);
}

template <int kBlockQ, int kBlockKV>
struct Turns {
  using Tiles = QueryTiles<kBlockQ, kBlockKV>;

  const Visible& visible;
  int num_early;

  __device__ __forceinline__ Turns(const BackwardArguments& arguments,
                                   const Visible& visible)
      : visible(visible), num_early(static_cast<int>(arguments.order.num_early)) {}

  // How many tiles of keys add to a tile of Q, in any sum.
  __device__ __forceinline__ int num_tiles(int q_tile) const {
    if (q_tile * kBlockQ >= visible.q_rows) return 0;
    return tiles_of(visible.key_limit(q_tile * kBlockQ + kBlockQ - 1));
  }

  __device__ __forceinline__ static int tiles_of(int keys) {
    return (keys + kBlockKV - 1) / kBlockKV;
  }

  // Which sum the block of a tile of keys adds to.
  __device__ __forceinline__ int sum_of(int key_tile, const Tiles& tiles,
                                        int q_tile) const {
    return visible.causal ? key_tile >= num_early : q_tile < tiles.start;
  }

  // How many of the tiles of keys [begin, end of the keys) add to a sum of a tile of Q
  // that has rows.
  __device__ __forceinline__ int num_adding(int sum, int q_tile, int begin) const {
    if (visible.causal) {
      const int seen = num_tiles(q_tile);
      const int first = sum == 0 ? 0 : num_early;
      const int end = sum == 0 ? min(seen, num_early) : seen;
      return max(0, end - max(first, begin));
    }
    const int num_starts = Tiles::num_starts((visible.q_rows + kBlockQ - 1) / kBlockQ);
    // Of the tiles [0, end), those whose start is not above q_tile.
    const int starts = min(num_starts, q_tile / Tiles::kStartStep + 1);
    const auto unwrapped = [&](int end) {
      return end / num_starts * starts + min(end % num_starts, starts);
    };
    const int end = tiles_of(visible.kv_rows);
    const int first_sum = unwrapped(end) - unwrapped(begin);
    return sum == 0 ? first_sum : end - begin - first_sum;
  }

  // How many blocks add before that of a tile of keys.
  __device__ __forceinline__ int turn(int sum, int q_tile, int key_tile) const {
    return num_adding(sum, q_tile, key_tile + 1);
  }
};

// The functions below are for one lane.

// By turns, the word of a sum counts the blocks that have added: waits for `number`.
__device__ __forceinline__ void wait_for_turn(const int* added, int number) {
  while (ld_acquire_gpu(added) != number) {
  }
  fence_proxy_async_global();  // before the additions of this block
}

// Without turns, the word of a sum counts the places that were taken, and has this bit
// when the part of the first one is there.
constexpr int kStored = 1 << 30;

// Takes the next place of a sum, and waits until a part may be added. Returns whether
// it is the first one, which is to be stored.
__device__ __forceinline__ bool take_place(int* word) {
  int before = atom_acquire_gpu_add(word, 1);
  if (before == 0) return true;
  while ((before & kStored) == 0) before = ld_acquire_gpu(word);
  fence_proxy_async_global();
  return false;
}

// Behind the bulk copies of this lane: adds to the word of a sum when they are done.
__device__ __forceinline__ void tell_others(int* word, int value) {
  cp_async_bulk_wait_group<0>();
  fence_proxy_async_global();
  red_release_gpu_add(word, value);
}

}  // namespace jaxflash::sm90
