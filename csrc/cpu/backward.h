// SPDX-License-Identifier: Apache-2.0
//
// Backward pass: FlashAttention-2, algorithm 2, with the keys in the lanes.
//
//   S[i, j]   = sum_h Q[i, h] K^T[h, j]          P = exp(scale S - lse)
//   dP[i, j]  = sum_h dO[i, h] V^T[h, j]        dS = P o (dP - delta + d_lse)
//   dV^T[h, j] += sum_i dO[i, h] P[i, j]
//   dK^T[h, j] += sum_i Q[i, h] dS[i, j]         dK = scale dK^T^T
//   dQ[i, h]  += sum_j dS[i, j] K[j, h]          dQ = scale dQ
//
// with delta = rowsum(dO o O). Each product is computed once: K, K^T and V^T are packed
// per block of keys, which walks over the blocks of rows below it. delta is summed in
// the order of dP, so that dP - delta vanishes where one key holds all the mass.
//
// Keys and rows of a key/value head are cut into the same number of chunks. In step s
// the task of key chunk c works on row chunk c + s (modulo the chunks), so that no two
// tasks of a step touch the same rows: dK, dV and dQ are plain float32 sums in the
// workspace, in an order that depends on the shape alone and not on the threads.
#ifndef JAXFLASH_CSRC_CPU_BACKWARD_H_
#define JAXFLASH_CSRC_CPU_BACKWARD_H_

#include <algorithm>
#include <cstdint>

#include "cpu/backward_rows.h"
#include "cpu/backward_state.h"
#include "cpu/backward_task.h"
#include "cpu/dbias.h"
#include "cpu/problem.h"

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {

template <class M>
void backward(const jaxflash_attention_backward_params& b, void* workspace,
              const jaxflash_executor* executor) {
  const jaxflash_attention_params& p = b.forward;
  const BackwardBlocks blocks(p);
  const int64_t heads = batch_size(p) * p.num_kv_heads;
  auto* state = static_cast<float*>(workspace);
  for (int step = 0; step < blocks.chunks; ++step) {
    parallel_for(executor, heads * blocks.chunks, [&](int64_t index) {
      alignas(64) float scratch[kScratchFloats];
      const BackwardHead<M> head(b, index % heads, state);
      const BackwardRows<M> rows(b, index % heads, head);
      const int64_t key_chunk = index / heads;
      const int64_t row_chunk = (key_chunk + step) % blocks.chunks;
      const int64_t key = key_chunk * blocks.chunk_keys;
      const int64_t row = row_chunk * blocks.chunk_rows;
      if (step == 0) {
        head.start_keys(key_chunk, blocks.chunk_keys);
        rows.start(row, row + blocks.chunk_rows, scratch);
      }
      BackwardTask<M> task(head, blocks, scratch);
      if (step == 0) {
        task.refine_lse(row, row + blocks.chunk_rows);
        rows.start_sinks(row, row + blocks.chunk_rows);
      }
      task.run(key, key + blocks.chunk_keys, row, row + blocks.chunk_rows);
      if (step == blocks.chunks - 1) {
        head.store_keys(key, key + blocks.chunk_keys);
        rows.store(row, row + blocks.chunk_rows, blocks.chunk_keys);
      }
    });
  }
  if (b.dbias.data != nullptr) sum_dbias<M>(b, blocks, state, executor);
}

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET

#endif  // JAXFLASH_CSRC_CPU_BACKWARD_H_
