// SPDX-License-Identifier: Apache-2.0
//
// Attention forward for Hopper: FlashAttention-3, algorithm 2 (arXiv 2407.08608).
//
//   S = Q K^T,  m = max(m, rowmax S),  P = exp(scale (S - m)),
//   l = exp(scale (m_old - m)) l + rowsum P,  O = exp(scale (m_old - m)) O + P V
//   out = O / l,  lse = scale m + log l
//
// Work: as many blocks as the GPU has SMs take work items, tiles of Q of one head, one
// after the other. In a block, one warpgroup moves data and two or three compute, each
// on 64 rows of the tile:
//
//   loader     thread 0: describes items (work_full, work_empty) and starts the copies
//              of Q (q_full, q_empty) and of a ring of stages of K and V (k_full,
//              k_empty, v_full, v_empty), the last tiles first
//   screener   warps 1 to 3: clean those tiles of V of which some rows see only a part
//              (v_loaded, then v_full): hidden inf and NaN must not meet P = 0
//   consumers  S, P and O in registers, out through shared memory
//
// Tiles that need a mask come first, the rest runs without one. The product S of a tile
// is issued before O += P V of the tile before it, so that exp has a product to hide
// behind; and the consumers take turns to issue, so that while one computes exp the
// tensor cores work for another:
//
//   consumer 0  | S1 O0 |  exp 1       | S2 O1 |  exp 2       | ...
//   consumer 1          | S1 O0 |  exp 1       | S2 O1 |  exp 2
//   tensor cores| S1 O0 | S1 O0 |      | S2 O1 | S2 O1 | ...
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/element.cuh"
#include "../common/problem.cuh"
#include "../common/ptx_sm90.cuh"
#include "../common/wgmma.cuh"
#include "forward_loader.cuh"
#include "forward_output.cuh"
#include "forward_storage.cuh"
#include "launch.h"
#include "online_softmax.cuh"
#include "schedule.cuh"
#include "tile_config.h"

namespace jaxflash::sm90 {

// One warpgroup, 64 rows of Q.
template <class Element, int kConfigIndex>
struct Consumer {
  using Storage = ForwardStorage<kConfigIndex>;
  static constexpr ForwardConfig kConfig = Storage::kConfig;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kBlockQ = kConfig.block_q();
  static constexpr int kBlockKV = kConfig.block_kv;
  using Softmax = OnlineSoftmax<kBlockKV, kConfig.lazy_rescale>;
  using Scores = float[kBlockKV / 2];  // [64, kBlockKV]: S, then P

  Storage& storage;
  const ForwardArguments& arguments;
  ConsumerThread thread;
  RingPosition<Storage::kStages> ring;
  uint32_t q_parity = 0;

  float o[kConfig.output_columns() / 2];  // [64, kHeadDim], then row sums of P
  uint32_t p[kBlockKV / 4];               // [64, kBlockKV], P as the A operand of P V

  __device__ __forceinline__ Consumer(Storage& storage,
                                      const ForwardArguments& arguments, int group)
      : storage(storage),
        arguments(arguments),
        thread{group, static_cast<int>(threadIdx.x % kWarpgroup)} {}

  // S = Q K^T, issued.
  __device__ __forceinline__ void issue_scores(Scores& s, int stage) {
    const uint64_t q = k_major_descriptor(cvta_generic_to_shared(&storage.q) +
                                          thread.group * kGroupRows * kPanelRowBytes);
    const uint64_t k = k_major_descriptor(cvta_generic_to_shared(&storage.k[stage]));
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      Wgmma<kBlockKV>::template ss<Element, Major::kK, Major::kK>(
          s, q + k_major_step<kBlockQ>(step), k + k_major_step<kBlockKV>(step),
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

  // The tensor cores are this group's to issue to until it passes the turn.
  __device__ __forceinline__ void take_turn() const {
    if (kConfig.ping_pong) bar_sync(kTurnBarrier + thread.group, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void pass_turn_to(int next) const {
    if (kConfig.ping_pong) bar_arrive(kTurnBarrier + next, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void pass_turn() const {
    pass_turn_to((thread.group + 1) % kConfig.num_consumers);
  }

  // S of this tile has been read from K, and of the last tile from Q.
  __device__ __forceinline__ void release_key(int tile) {
    if (!thread.leads()) return;
    arrive(storage.k_empty[ring.stage]);
    if (kConfig.own_out_tile && tile == 0) arrive(storage.q_empty);
  }

  __device__ __forceinline__ void hide(Scores& s, const WorkItem& item, int tile) {
    const int first_column = tile * kBlockKV + thread.index % 4 * 2;
    const int row = item.first_row + thread.row();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      hide_columns<kBlockKV>(s, r, item.key_limit(row + 8 * r) - first_column);
    }
  }

  __device__ __forceinline__ void round_scores(const Scores& s) {
#pragma unroll
    for (int i = 0; i < kBlockKV / 4; ++i) p[i] = pack<Element>(s[2 * i], s[2 * i + 1]);
  }

  __device__ __forceinline__ void sum_rounded(Softmax& softmax) {
    if (!kConfig.sum_columns && arguments.params.out_low.data != nullptr) {
      softmax.template add_rounded<Element>(p);
    }
  }

  // P of the item's first tile.
  __device__ __forceinline__ void first_tile(const WorkItem& item, Softmax& softmax) {
    Scores s;
    const int tile = item.num_tiles - 1;
    wait(storage.k_full[ring.stage], ring.parity);
    hold_registers(s);
    wgmma_fence();
    issue_scores(s, ring.stage);
    wgmma_wait_group<0>();
    hold_registers(s);
    release_key(tile);
    if (tile >= item.num_full_tiles) hide(s, item, tile);
    softmax.update(s);
    round_scores(s);
  }

  // P of a tile, beside O += P V of the tile before it.
  template <bool kMasked>
  __device__ __forceinline__ void step(const WorkItem& item, int tile,
                                       Softmax& softmax) {
    Scores s;
    const RingPosition<Storage::kStages> before = ring;
    ring.advance();
    wait(storage.k_full[ring.stage], ring.parity);
    take_turn();
    hold_registers(s);
    hold_registers(o);
    hold_registers(p);
    wgmma_fence();
    issue_scores(s, ring.stage);
    sum_rounded(softmax);
    wait(storage.v_full[before.stage], before.parity);
    wgmma_fence();
    issue_output(before.stage);
    pass_turn();
    wgmma_wait_group<1>();  // S is ready, O may still be running
    hold_registers(s);
    release_key(tile);
    if (kMasked) hide(s, item, tile);
    softmax.update(s);
    // The compiler moves the wait below up to the first use of S, which would leave exp
    // nothing to hide behind. It does not move it out of a basic block, and waiting
    // for V, which the next step needs anyway, ends one.
    if (kConfig.pin_wait) wait(storage.v_full[ring.stage], ring.parity);
    wgmma_wait_group<0>();  // O is ready, P and V may be overwritten
    hold_registers(o);
    hold_registers(p);
    if (thread.leads()) arrive(storage.v_empty[before.stage]);
    softmax.rescale_output(o);
    round_scores(s);
  }

  // O += P V of the item's last tile.
  __device__ __forceinline__ void last_output(Softmax& softmax) {
    wait(storage.v_full[ring.stage], ring.parity);
    hold_registers(o);
    hold_registers(p);
    wgmma_fence();
    issue_output(ring.stage);
    sum_rounded(softmax);
    wgmma_wait_group<0>();
    hold_registers(o);
    if (thread.leads()) arrive(storage.v_empty[ring.stage]);
    ring.advance();
  }

  // Changes the sign of this group's rows of Q, so that a negative scale becomes a
  // positive one and the row maximum of S stays the maximum of scale * S.
  __device__ __forceinline__ void negate_query() {
    constexpr uint32_t kSigns = 0x80008000u;
#pragma unroll 1
    for (int panel = 0; panel < Storage::kPanels; ++panel) {
      const uint32_t rows =
          cvta_generic_to_shared(&storage.q[panel][thread.group * kGroupRows]);
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

  __device__ __forceinline__ void run_item(const WorkItem& item,
                                           WorkReader<Storage>& work) {
    const ForwardOutput<Element, kConfigIndex> output = {storage, arguments, thread};
    if (item.num_tiles == 0) {
      work.release();
      output.store_empty(item);
      return;
    }
    const float scale = softmax_scale(arguments.params, single_batch_axis(item.batch));
    Softmax softmax(scale);
#pragma unroll
    for (int i = 0; i < kConfig.output_columns() / 2; ++i) o[i] = 0.f;
    wait(storage.q_full, q_parity);
    q_parity ^= 1;
    if (scale < 0.f) negate_query();
    first_tile(item, softmax);
    int tile = item.num_tiles - 2;
#pragma unroll 1
    for (; tile >= item.num_full_tiles; --tile) step<true>(item, tile, softmax);
#pragma unroll 1
    for (; tile >= 0; --tile) step<false>(item, tile, softmax);
    last_output(softmax);
    const bool dropped = work.dropped();
    work.release();
    output.finish(item, o, softmax, scale);
    output.store_out(item, o);
    if (arguments.params.out_low.data != nullptr) output.store_out_low(item, o);
    if (dropped) output.restore_nonfinite(item);
  }

  __device__ __forceinline__ void run() {
    if (thread.group == kConfig.num_consumers - 1) pass_turn_to(0);
    WorkReader<Storage> work = {storage};
    WorkItem item;
#pragma unroll 1
    while (work.read(item)) run_item(item, work);
    // Shared memory stays until out has left it.
    if (thread.leads()) cp_async_bulk_wait_group_read<0>();
  }
};

template <class Element, int kConfigIndex>
__global__ void __launch_bounds__(kForwardConfigs[kConfigIndex].num_threads(), 1)
    forward_kernel(const __grid_constant__ ForwardArguments arguments) {
  constexpr ForwardConfig kConfig = kForwardConfigs[kConfigIndex];
  using Storage = ForwardStorage<kConfigIndex>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& storage = *reinterpret_cast<Storage*>(shared_memory);

  if (threadIdx.x == 0) {
    prefetch_tensormap(&arguments.q_map);
    prefetch_tensormap(&arguments.k_map);
    prefetch_tensormap(&arguments.v_map);
    prefetch_tensormap(&arguments.out_map);
    storage.init_barriers();
    fence_mbarrier_init();
  }
  storage.init_ones(pack<Element>(1.f, 1.f));
  __syncthreads();  // the barriers are ready

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == 0) {
    setmaxnreg_dec<kConfig.loader_registers>();
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
      Loader<kConfigIndex>{storage, arguments}.run();
    } else if (thread >= kWarpgroup - kScreenThreads) {
      Screener<Element, kConfigIndex>{storage, thread - (kWarpgroup - kScreenThreads)}
          .run();
    }
  } else {
    setmaxnreg_inc<kConfig.consumer_registers>();
    Consumer<Element, kConfigIndex>(storage, arguments, warpgroup - 1).run();
  }
}

template <class Element, int kConfigIndex>
void launch_forward(const ForwardArguments& arguments, Launcher& launcher) {
  constexpr ForwardConfig kConfig = kForwardConfigs[kConfigIndex];
  constexpr int kSharedBytes = sizeof(ForwardStorage<kConfigIndex>);
  static_assert(kSharedBytes <= kSharedMemory);
  static_assert(kConfig.registers_suffice());
  if (arguments.num_taken != nullptr) {
    launcher.clear(arguments.num_taken, sizeof(*arguments.num_taken));
  }
  launcher.launch("forward_kernel",
                  {kConfig.block_q(), kConfig.block_kv, kConfig.num_stages},
                  {arguments.num_blocks, kConfig.num_threads(), kSharedBytes},
                  forward_kernel<Element, kConfigIndex>, arguments);
}

}  // namespace jaxflash::sm90
