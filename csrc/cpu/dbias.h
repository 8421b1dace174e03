// SPDX-License-Identifier: Apache-2.0
//
// The gradient of bias: dS, summed over everything that shares an element of it.
//
// A pass of its own over S and dP, after the one that makes the other gradients. Each
// of its tasks owns a tile of dbias and walks over all batch elements, heads, rows and
// keys that it is the gradient of, in one order: nothing is as large as the scores, and
// no two tasks add to the same number.
#ifndef JAXFLASH_CSRC_CPU_DBIAS_H_
#define JAXFLASH_CSRC_CPU_DBIAS_H_

#include <algorithm>
#include <cstdint>

#include "cpu/backward_state.h"
#include "cpu/backward_task.h"
#include "cpu/dbias_tile.h"
#include "cpu/problem.h"

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {

// How dbias is cut into tiles, and what belongs to each.
class DbiasTiles {
 public:
  DbiasTiles(const jaxflash_attention_backward_params& b, const BackwardBlocks& blocks)
      : p_(b.forward),
        own_(only_axes(b, /*own=*/true)),
        shared_(only_axes(b, /*own=*/false)),
        tensor_(b.dbias),
        axes_{group_size(p_), is_own(p_.num_heads, tensor_.strides[0]),
              is_own(p_.q_len, tensor_.strides[1]),
              is_own(p_.kv_len, tensor_.strides[2])},
        kv_heads_(axes_.has_heads ? p_.num_kv_heads : 1),
        rows_((axes_.has_positions ? p_.q_len : 1) *
              (axes_.has_heads ? group_size(p_) : 1)),
        ld_(axes_.has_keys ? blocks.keys : kLanes),
        tile_rows_(DbiasTile::kFloats / ld_),
        row_tiles_((rows_ + tile_rows_ - 1) / tile_rows_),
        key_tiles_(axes_.has_keys ? (p_.kv_len + ld_ - 1) / ld_ : 1) {}

  int64_t count() const {
    return batch_size(own_) * kv_heads_ * row_tiles_ * key_tiles_;
  }

  // Sums tile `index` and stores it.
  template <class M>
  void sum(const jaxflash_attention_backward_params& only_dbias,
           const BackwardBlocks& blocks, int64_t index, float* workspace) const {
    alignas(64) float scratch[kScratchFloats];
    alignas(64) float sums[DbiasTile::kFloats];
    const int64_t key_tile = index % key_tiles_;
    index /= key_tiles_;
    const int64_t row_tile = index % row_tiles_;
    index /= row_tiles_;
    const int64_t kv_head = index % kv_heads_;
    const int64_t own = index / kv_heads_;
    DbiasTile tile = {axes_, row_tile * tile_rows_, key_tile * ld_, 0, ld_, sums};
    tile.rows = static_cast<int>(std::min<int64_t>(tile_rows_, rows_ - tile.first_row));
    std::fill_n(sums, tile.rows * ld_, 0.0f);

    const int64_t last_key = axes_.has_keys ? tile.first_key + ld_ : p_.kv_len;
    int64_t first_row = 0, last_row = p_.q_len * axes_.group;
    if (axes_.has_positions) {
      const int64_t step = axes_.has_heads ? 1 : axes_.group;
      first_row = tile.first_row * step;
      last_row = (tile.first_row + tile.rows) * step;
    }
    for (int64_t number = 0; number < batch_size(shared_); ++number) {
      const int64_t batch = element(own, number);
      const int64_t first_head = axes_.has_heads ? kv_head : 0;
      const int64_t last_head = axes_.has_heads ? kv_head + 1 : p_.num_kv_heads;
      for (int64_t head = first_head; head < last_head; ++head) {
        const BackwardHead<M> inputs(only_dbias, batch * p_.num_kv_heads + head,
                                     workspace);
        BackwardTask<M>(inputs, blocks, scratch, &tile)
            .run(tile.first_key, last_key, first_row, last_row);
      }
    }
    store(tile, own, kv_head);
  }

 private:
  static bool is_own(int64_t size, int64_t stride) { return stride != 0 && size != 1; }

  // Of the batch axes only those along which dbias has a stride, in which a batch
  // element is a part of dbias, or only those that share such a part.
  static jaxflash_attention_params only_axes(
      const jaxflash_attention_backward_params& b, bool own) {
    jaxflash_attention_params p = b.forward;
    for (int axis = 0; axis < p.batch_rank; ++axis) {
      if ((b.dbias.batch_strides[axis] != 0) != own) p.batch_shape[axis] = 1;
    }
    return p;
  }

  // The batch element with this number among those that share a part of dbias.
  int64_t element(int64_t own, int64_t number) const {
    int64_t batch = 0, step = 1;
    for (int axis = p_.batch_rank - 1; axis >= 0; --axis) {
      int64_t& index = tensor_.batch_strides[axis] != 0 ? own : number;
      batch += index % p_.batch_shape[axis] * step;
      index /= p_.batch_shape[axis];
      step *= p_.batch_shape[axis];
    }
    return batch;
  }

  void store(const DbiasTile& tile, int64_t own, int64_t kv_head) const {
    switch (tensor_.dtype) {
      case JAXFLASH_FLOAT32:
        return store_as<float>(tile, own, kv_head);
      case JAXFLASH_BFLOAT16:
        return store_as<Bfloat16>(tile, own, kv_head);
      case JAXFLASH_FLOAT16:
        return store_as<Float16>(tile, own, kv_head);
    }
  }

  template <class Element>
  void store_as(const DbiasTile& tile, int64_t own, int64_t kv_head) const {
    const Rows<Element> to = row_values<Element>(own_, tensor_, own, kv_head);
    const int64_t group = axes_.has_heads ? axes_.group : 1;
    for (int i = 0; i < tile.rows; ++i) {
      const int64_t row = tile.first_row + i;
      const int64_t position = axes_.has_positions ? row / group : 0;
      Element* out =
          to.data + position * to.position_stride + row % group * to.head_stride;
      float* sums = tile.sums + i * ld_;
      if (!axes_.has_keys) sums[0] = JAXFLASH_CPU_TARGET::sum(load(sums));
      const int64_t left = axes_.has_keys ? p_.kv_len - tile.first_key : 1;
      store_row(sums, 1.0f, static_cast<int>(std::min<int64_t>(left, ld_)),
                out + tile.first_key * to.column_stride, to.column_stride);
    }
  }

  const jaxflash_attention_params& p_;
  const jaxflash_attention_params own_, shared_;
  const jaxflash_tensor& tensor_;
  const DbiasAxes axes_;
  const int64_t kv_heads_;  // that have tiles of their own
  const int64_t rows_;      // of dbias, for each of them
  const int ld_;            // keys of a tile
  const int tile_rows_;
  const int64_t row_tiles_, key_tiles_;
};

template <class M>
void sum_dbias(const jaxflash_attention_backward_params& b,
               const BackwardBlocks& blocks, float* workspace,
               const jaxflash_executor* executor) {
  jaxflash_attention_backward_params only_dbias = b;
  only_dbias.dq = only_dbias.dk = only_dbias.dv = {};
  only_dbias.dscale = only_dbias.dsinks = only_dbias.dalibi = {};
  const DbiasTiles tiles(b, blocks);
  parallel_for(executor, tiles.count(), [&](int64_t index) {
    tiles.template sum<M>(only_dbias, blocks, index, workspace);
  });
}

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET

#endif  // JAXFLASH_CSRC_CPU_DBIAS_H_
