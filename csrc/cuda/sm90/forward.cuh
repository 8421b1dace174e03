// SPDX-License-Identifier: Apache-2.0
//
// Attention forward for Hopper: FlashAttention-3, algorithm 2 (arXiv 2407.08608).
//
//   S = Q K^T,  m = max(m, rowmax S),  P = exp(scale (S - m)),
//   l = exp(scale (m_old - m)) l + rowsum P,  O = exp(scale (m_old - m)) O + P V
//   out = O / l,  lse = scale m + log l
//
// Work: as many blocks as the GPU has SMs take work items, tiles of Q of one head, one
// after the other. In a block, one warpgroup moves data and two to four compute, each
// on 64 rows of the tile:
//
//   loader     thread 0: announces items (work_full, work_empty) and starts the copies
//              of Q (q_full, q_empty, a slot per consumer and item) and of a ring of
//              stages of K and V (k_full, k_empty, v_full, v_empty), the last tiles
//              first
//   screener   warps 1 to 3: clean those tiles of V of which some rows see only a part
//              (v_loaded, then v_full): hidden inf and NaN must not meet P = 0; and
//              store the rows of items that see nothing
//   consumers  S, P and O in registers
//
// Tiles that need a mask come first, the rest runs without one. The product S of a tile
// is issued before O += P V of the tile before it, so that exp has a product to hide
// behind; and the consumers take turns to issue, so that while one computes exp the
// tensor cores work for another:
//
//   consumer 0  | S1 O0 |  exp 1       | S2 O1 |  exp 2       | ...
//   consumer 1          | S1 O0 |  exp 1       | S2 O1 |  exp 2
//   tensor cores| S1 O0 | S1 O0 |      | S2 O1 | S2 O1 | ...
//
// It does not stop between items: the first S of the next one (S0') is issued behind
// the last O of this one, and runs while out = O / l is stored.
//
//   consumer 0  | O9 S0' |  out, exp 0'  | S1' O0' | ...
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/element.cuh"
#include "../common/ptx_sm90.cuh"
#include "forward_consumer.cuh"
#include "forward_loader.cuh"
#include "forward_storage.cuh"
#include "launch.h"
#include "tile_config.h"

namespace jaxflash::sm90 {

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
      Screener<Element, kConfigIndex>{storage, arguments,
                                      thread - (kWarpgroup - kScreenThreads)}
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
