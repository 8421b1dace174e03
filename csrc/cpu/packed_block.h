// SPDX-License-Identifier: Apache-2.0
//
// The operands of the backward pass's products, for one block of keys and one of rows.
#ifndef JAXFLASH_CSRC_CPU_PACKED_BLOCK_H_
#define JAXFLASH_CSRC_CPU_PACKED_BLOCK_H_

#include <algorithm>
#include <cstdint>

#include "cpu/backward_state.h"
#include "cpu/blocks.h"
#include "cpu/gemm.h"
#include "cpu/pack.h"

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {

template <class M>
class PackedBlock {
 public:
  using Dot = typename M::Dot;

  PackedBlock(const BackwardHead<M>& head, const BackwardBlocks& blocks, Arena* arena)
      : head_(head),
        depth_(words<M>(head.head_dim)),
        value_depth_(words<M>(head.value_dim)),
        k_transposed_(arena->take(blocks.keys * depth_)),
        v_transposed_(arena->take(blocks.keys * value_depth_)),
        k_(arena->take(words<M>(blocks.keys) * head.padded_dim)),
        q_(arena->take(blocks.rows * depth_)),
        d_out_(arena->take(blocks.rows * value_depth_)),
        q_pairs_(M::kPairs ? arena->take(words<M>(blocks.rows) * head.head_dim) : q_),
        d_out_pairs_(M::kPairs ? arena->take(words<M>(blocks.rows) * head.value_dim)
                               : d_out_) {
    std::fill_n(k_, words<M>(blocks.keys) * head.padded_dim, 0.0f);
  }

  void pack_keys(int64_t first, int count) {
    for (int lane = 0; lane < count; lane += kPanel) {
      const int width = std::min(count - lane, kPanel);
      pack_transposed<M>(head_.k, first + lane, width, head_.head_dim, kPanel,
                         k_transposed_ + lane * depth_, kPanel);
      pack_transposed<M>(head_.v, first + lane, width, head_.value_dim, kPanel,
                         v_transposed_ + lane * value_depth_, kPanel);
    }
    pack_along_rows<M>(head_.k, first, count, head_.head_dim, k_, head_.padded_dim);
  }

  void pack_rows(int64_t row, int rows) {
    const int head_dim = head_.head_dim, value_dim = head_.value_dim;
    JAXFLASH_CPU_TARGET::pack_rows<M>(head_.q, row, rows, head_dim, q_, depth_);
    JAXFLASH_CPU_TARGET::pack_rows<M>(head_.d_out, row, rows, value_dim, d_out_,
                                      value_depth_);
    if constexpr (M::kPairs) {
      pack_along_rows<M>(head_.q, row, rows, head_dim, q_pairs_, head_dim);
      pack_along_rows<M>(head_.d_out, row, rows, value_dim, d_out_pairs_, value_dim);
    }
  }

  // S and dP of the panel of keys that begins at `lane`, each [rows, kPanel].
  void multiply_panel(int rows, int lane, int vectors, float* s, float* dp) const {
    gemm_scores<Dot>(
        rows, vectors, depth_,
        {q_, depth_, k_transposed_ + lane * depth_, kPanel, s, kPanel, nullptr});
    gemm_scores<Dot>(rows, vectors, value_depth_,
                     {d_out_, value_depth_, v_transposed_ + lane * value_depth_, kPanel,
                      dp, kPanel, nullptr});
  }

  const float* k() const { return k_; }              // [words of keys, padded_dim]
  const float* q_pairs() const { return q_pairs_; }  // [words of rows, head_dim]
  const float* d_out_pairs() const { return d_out_pairs_; }  // [.., value_dim]

 private:
  const BackwardHead<M>& head_;
  const int depth_, value_depth_;  // words of a row of Q and K, of V and dO
  float *const k_transposed_, *const v_transposed_;  // [panels, depth, kPanel]
  float* const k_;
  float *const q_, *const d_out_;  // [rows, depth]
  float *const q_pairs_, *const d_out_pairs_;
};

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET

#endif  // JAXFLASH_CSRC_CPU_PACKED_BLOCK_H_
