// SPDX-License-Identifier: Apache-2.0
//
// A warpgroup of the forward kernel that computes: the loop of forward.cuh over the
// tiles of keys of an item, and from item to item.
#pragma once

#include <cstdint>

#include "../common/element.cuh"
#include "../common/ptx_sm90.cuh"
#include "../common/wgmma.cuh"
#include "forward_output.cuh"
#include "forward_storage.cuh"
#include "launch.h"
#include "online_softmax.cuh"
#include "schedule.cuh"
#include "tile_config.h"

namespace jaxflash::sm90 {

// 64 rows of Q.
template <class Element, int kConfigIndex>
struct Consumer {
  using Storage = ForwardStorage<kConfigIndex>;
  static constexpr ForwardConfig kConfig = Storage::kConfig;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kBlockKV = kConfig.block_kv;
  using Softmax = OnlineSoftmax<kBlockKV>;
  static_assert(kConfig.max_tiles_left_out() < kConfig.num_stages);

  Storage& storage;
  const ForwardArguments& arguments;
  ConsumerThread thread;
  RingPosition<Storage::kStages> ring;
  RingPosition<Storage::kQuerySlots> query;
  WorkReader<Storage> work;

  // Of the item's tiles of keys, this group walks over the first num_tiles; of these
  // the first num_full_tiles need no mask.
  int num_tiles = 0;
  int num_full_tiles = 0;
  int num_left_out = 0;

  float o[kConfig.output_columns() / 2];  // [64, kHeadDim], then row sums of P
  float s[kBlockKV / 2];                  // [64, kBlockKV], S, then P
  uint32_t p[kBlockKV / 4];               // P as the A operand of P V

  __device__ __forceinline__ Consumer(Storage& storage,
                                      const ForwardArguments& arguments, int group)
      : storage(storage),
        arguments(arguments),
        thread{group, static_cast<int>(threadIdx.x % kWarpgroup)},
        work{storage} {
    query.advance(group);
  }

  // S = Q K^T, issued.
  __device__ __forceinline__ void issue_scores(int stage) {
    const uint64_t q =
        k_major_descriptor(cvta_generic_to_shared(&storage.q[query.stage]));
    const uint64_t k = k_major_descriptor(cvta_generic_to_shared(&storage.k[stage]));
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      Wgmma<kBlockKV>::template ss<Element, Major::kK, Major::kK>(
          s, advance_descriptor(q, k_major_step<kGroupRows>(step)),
          advance_descriptor(k, k_major_step<kBlockKV>(step)),
          /*accumulate=*/step > 0);
    }
    wgmma_commit_group();
  }

  // O += P V, issued.
  __device__ __forceinline__ void issue_output(int stage) {
    const uint64_t v =
        mn_major_descriptor<kBlockKV>(cvta_generic_to_shared(&storage.v[stage]));
#pragma unroll
    for (int step = 0; step < kBlockKV / 16; ++step) {
      Wgmma<kConfig.output_columns()>::template rs<Element, Major::kMN>(
          o, p + 4 * step, v + mn_major_step(step), /*accumulate=*/true);
    }
    wgmma_commit_group();
  }

  // Consumers that walk over different tiles do not take turns.
  __device__ __forceinline__ bool has_own_tiles() const {
    return kConfig.own_tiles && arguments.params.is_causal != 0;
  }
  __device__ __forceinline__ bool takes_turns() const {
    return kConfig.ping_pong && !has_own_tiles();
  }

  // The tensor cores are this group's to issue to until it passes the turn.
  __device__ __forceinline__ void take_turn() const {
    if (takes_turns()) bar_sync(kTurnBarrier + thread.group, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void pass_turn_to(int next) const {
    if (takes_turns()) bar_arrive(kTurnBarrier + next, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void pass_turn() const {
    pass_turn_to((thread.group + 1) % kConfig.num_consumers);
  }

  // S of this tile is ready: K is needed no more, and after the last one nor is Q.
  __device__ __forceinline__ void release_operands(int tile) {
    if (!thread.leads()) return;
    arrive(storage.k_empty[ring.stage]);
    if (!kConfig.out_through_query() && tile == 0) {
      arrive(storage.q_empty[query.stage]);
    }
  }

  // Hands back this warp's part of a slot of Q, once out has left through it.
  __device__ __forceinline__ void release_query(int slot) {
    if (thread.index % 32 != 0) return;
    cp_async_bulk_wait_group_read<0>();
    arrive(storage.q_empty[slot]);
  }

  __device__ __forceinline__ void hide(const WorkItem& item, int tile) {
    const int first_column = tile * kBlockKV + thread.index % 4 * 2;
    const int row = item.first_row + thread.row();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      hide_columns<kBlockKV>(s, r, item.key_limit(row + 8 * r) - first_column);
    }
  }

  __device__ __forceinline__ void round_scores() {
#pragma unroll
    for (int i = 0; i < kBlockKV / 4; ++i) p[i] = pack<Element>(s[2 * i], s[2 * i + 1]);
  }

  __device__ __forceinline__ void sum_rounded(Softmax& softmax) {
    if (!kConfig.sum_columns && arguments.params.out_low.data != nullptr) {
      softmax.template add_rounded<Element>(p);
    }
  }

  __device__ __forceinline__ void choose_tiles(const WorkItem& item) {
    num_tiles = item.num_tiles;
    num_full_tiles = item.num_full_tiles;
    if (!has_own_tiles()) return;
    const int first_row = item.first_row + thread.group * kGroupRows;
    const int end_row = min(first_row + kGroupRows, item.q_rows);
    const int end_key = item.key_limit(end_row - 1);
    num_tiles = max(1, (end_key + kBlockKV - 1) / kBlockKV);
    num_full_tiles = item.key_limit(first_row) / kBlockKV;
    num_left_out = item.num_tiles - num_tiles;
  }

  // Hands back the tiles that are left out: K at once, V when it has surely landed.
  __device__ __forceinline__ void leave_out_keys() {
    if constexpr (kConfig.own_tiles) {
#pragma unroll 1
      for (int i = 0; i < num_left_out; ++i) {
        wait(storage.k_full[ring.stage], ring.parity);
        thread.group_sync();  // no warp waits for what may be overwritten
        if (thread.leads()) arrive(storage.k_empty[ring.stage]);
        ring.advance();
      }
    }
  }
  __device__ __forceinline__ void leave_out_values() {
    if constexpr (kConfig.own_tiles) {
      RingPosition<Storage::kStages> position = ring;
      position.retreat(num_left_out);
#pragma unroll 1
      for (int i = 0; i < num_left_out; ++i) {
        wait(storage.v_full[position.stage], position.parity);
        thread.group_sync();
        if (thread.leads()) arrive(storage.v_empty[position.stage]);
        position.advance();
      }
    }
  }

  __device__ __forceinline__ void issue_first_scores() {
    hold_registers(s);
    wgmma_fence();
    issue_scores(ring.stage);
  }

  // P of the item's first tile, whose S has been issued. `leaving`: the slot of Q
  // through which out of the item before leaves, or -1.
  __device__ __forceinline__ void first_tile(const WorkItem& item, Softmax& softmax,
                                             int leaving) {
    const int tile = num_tiles - 1;
    wgmma_wait_group<0>();
    hold_registers(s);
    release_operands(tile);
    if (leaving >= 0) release_query(leaving);
    if (tile >= num_full_tiles) hide(item, tile);
    softmax.update(s);
    round_scores();
    leave_out_values();
  }

  // P of a tile, beside O += P V of the tile before it.
  template <bool kMasked>
  __device__ __forceinline__ void step(const WorkItem& item, int tile,
                                       Softmax& softmax) {
    const RingPosition<Storage::kStages> before = ring;
    ring.advance();
    wait(storage.k_full[ring.stage], ring.parity);
    take_turn();
    hold_registers(s);
    hold_registers(o);
    hold_registers(p);
    wgmma_fence();
    issue_scores(ring.stage);
    sum_rounded(softmax);
    wait(storage.v_full[before.stage], before.parity);
    wgmma_fence();
    issue_output(before.stage);
    pass_turn();
    wgmma_wait_group<1>();  // S is ready, O may still be running
    hold_registers(s);
    release_operands(tile);
    if (kMasked) hide(item, tile);
    softmax.update(s);
    // The compiler moves the wait below up to the first use of S, which would leave exp
    // nothing to hide behind. It does not move it out of a basic block, and a wait ends
    // one; this one is long over, and will be until all warps are done with the item.
    if (kConfig.pin_wait) work.wait_again();
    wgmma_wait_group<0>();  // O is ready, P and V may be overwritten
    hold_registers(o);
    hold_registers(p);
    if (thread.leads()) arrive(storage.v_empty[before.stage]);
    softmax.rescale_output(o);
    round_scores();
  }

  // Changes the sign of this group's rows of Q, so that a negative scale becomes a
  // positive one and the row maximum of S stays the maximum of scale * S.
  __device__ __forceinline__ void negate_query() {
    constexpr uint32_t kSigns = 0x80008000u;
#pragma unroll 1
    for (int panel = 0; panel < Storage::kPanels; ++panel) {
      const uint32_t rows = cvta_generic_to_shared(&storage.q[query.stage][panel]);
#pragma unroll 1
      for (int chunk = thread.index; chunk < kGroupRows * 8; chunk += kWarpgroup) {
        uint4 x = ld_shared_v4(rows + chunk * 16);
        x = make_uint4(x.x ^ kSigns, x.y ^ kSigns, x.z ^ kSigns, x.w ^ kSigns);
        st_shared_v4(rows + chunk * 16, x);
      }
    }
    fence_proxy_async_shared();  // the tensor cores see the new signs
    thread.group_sync();
  }

  // Waits for what S of an item's first tile is made from.
  __device__ __forceinline__ void wait_for_operands(const WorkItem& item) {
    choose_tiles(item);
    wait(storage.q_full[query.stage], query.parity);
    if (item.scale < 0.f) negate_query();
    leave_out_keys();
    wait(storage.k_full[ring.stage], ring.parity);
  }

  // O on its way out. `slot`: of Q, of this item.
  __device__ __forceinline__ void store(const WorkItem& item, const Softmax& softmax,
                                        int slot, bool dropped) {
    const ForwardOutput<Element, kConfigIndex> output = {storage, arguments, thread};
    output.finish(item, o, softmax);
    if (kConfig.out_through_query()) {
      output.start_copies(item, o, slot);
    } else {
      output.store_out(item, o);
    }
    if (arguments.params.out_low.data != nullptr) output.store_out_low(item, o);
    if (dropped) output.restore_nonfinite(item);
  }

  // O += P V of the item's last tile, and S of the first tile of the next item, into
  // which `item` turns. Returns whether there is one; if not, that S is made from
  // whatever lies there and nobody looks at it.
  __device__ __forceinline__ bool last_tile(WorkItem& item, Softmax& softmax) {
    const RingPosition<Storage::kStages> before = ring;
    wait(storage.v_full[before.stage], before.parity);
    const WorkItem done = item;
    const bool dropped = work.dropped();
    work.release();
    // Not within the turn: the loader may wait for another consumer to get here.
    const bool more = work.read_visible(item);
    const int slot = query.stage;
    ring.advance();
    query.advance(kConfig.num_consumers);
    sum_rounded(softmax);
    take_turn();
    hold_registers(o);
    hold_registers(p);
    wgmma_fence();
    issue_output(before.stage);
    if (more) wait_for_operands(item);
    issue_first_scores();
    pass_turn();
    wgmma_wait_group<1>();  // O is ready, S may still be running
    hold_registers(o);
    if (thread.leads()) arrive(storage.v_empty[before.stage]);
    store(done, softmax, slot, dropped);
    return more;
  }

  __device__ __forceinline__ void run() {
    if (thread.group == kConfig.num_consumers - 1) pass_turn_to(0);
    WorkItem item;
    if (!work.read_visible(item)) return;
    wait_for_operands(item);
    issue_first_scores();
    bool more = false;
    int leaving = -1;
    do {
      Softmax softmax(item.scale);
#pragma unroll
      for (int i = 0; i < kConfig.output_columns() / 2; ++i) o[i] = 0.f;
      first_tile(item, softmax, leaving);
      if (kConfig.out_through_query()) leaving = query.stage;
      int tile = num_tiles - 2;
#pragma unroll 1
      for (; tile >= num_full_tiles; --tile) step<true>(item, tile, softmax);
#pragma unroll 1
      for (; tile >= 0; --tile) step<false>(item, tile, softmax);
      more = last_tile(item, softmax);
    } while (more);
    wgmma_wait_group<0>();
    // Shared memory stays until out has left it.
    if (thread.index % 32 == 0) cp_async_bulk_wait_group_read<0>();
  }
};

}  // namespace jaxflash::sm90
