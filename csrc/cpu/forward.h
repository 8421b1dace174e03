// SPDX-License-Identifier: Apache-2.0
//
// Forward pass: FlashAttention-2, algorithm 1, with the queries in the lanes.
//
// For a panel of queries i (a few vectors of them), and blocks of keys j in order:
//
//   S^T[j, i] = sum_h K[j, h] Q^T[h, i]
//   m'[i]     = max(m[i], max_j S^T[j, i])
//   P^T[j, i] = exp(scale (S^T[j, i] - m'[i]))
//   alpha[i]  = exp(scale (m[i] - m'[i]))
//   l[i]      = alpha[i] l[i] + sum_j P^T[j, i]
//   O^T[h, i] = alpha[i] O^T[h, i] + sum_j V[j, h] P^T[j, i]
//
// and at the end out = O / l, lse = scale m + log l. With the queries in the lanes the
// softmax never reduces across a vector, K and V are read word by word in their own
// layout, and only Q and O are transposed, once per task. Where scores are more than
// scaled products, S^T becomes the scores themselves and the scale of these lines is 1.
// A sink is one more key that was seen first and has no value.
//
// A task is a block of a few panels of one key/value head: it packs each block of K and
// V once for all its panels. Tasks share nothing, and the numbers of a row do not
// depend on how rows were split into tasks.
#ifndef JAXFLASH_CSRC_CPU_FORWARD_H_
#define JAXFLASH_CSRC_CPU_FORWARD_H_

#include <algorithm>
#include <cstdint>

#include "api/validate.h"
#include "cpu/blocks.h"
#include "cpu/forward_task.h"
#include "cpu/problem.h"

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {

template <class M>
void forward(const jaxflash_attention_params& p, const jaxflash_executor* executor) {
  const int64_t rows = p.q_len * group_size(p);
  const int64_t heads = batch_size(p) * p.num_kv_heads;
  const int threads = executor == nullptr ? 1 : std::max(executor->num_threads, 1);
  const ForwardBlocks blocks(p, heads, rows, threads);
  const int64_t block_rows = static_cast<int64_t>(blocks.panels) * kPanel;
  const int64_t row_blocks = (rows + block_rows - 1) / block_rows;

  parallel_for(executor, heads * row_blocks, [&](int64_t index) {
    alignas(64) float scratch[kScratchFloats];
    const int64_t head = index % heads;
    // Late rows see the most keys of a causal call: they come first, so that no thread
    // ends alone.
    const int64_t first = (row_blocks - 1 - index / heads) * block_rows;
    ForwardTask<M> task(p, head / p.num_kv_heads, head % p.num_kv_heads, blocks,
                        scratch);
    task.run(first, std::min(first + block_rows, rows));
  });
}

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET

#endif  // JAXFLASH_CSRC_CPU_FORWARD_H_
