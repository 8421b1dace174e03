// SPDX-License-Identifier: Apache-2.0
//
// Where the rows of a key/value head go in the forward pass.
#ifndef JAXFLASH_CSRC_CPU_FORWARD_OUTPUT_H_
#define JAXFLASH_CSRC_CPU_FORWARD_OUTPUT_H_

#include <cstdint>

#include "cpu/element.h"
#include "cpu/pack.h"
#include "cpu/problem.h"

namespace jaxflash::cpu::JAXFLASH_CPU_TARGET {

template <class Element>
class ForwardOutput {
 public:
  ForwardOutput(const jaxflash_attention_params& p, int64_t batch, int64_t kv_head)
      : columns_(static_cast<int>(p.value_head_dim)),
        out_(rows_of<Element>(p, p.out, batch, kv_head, group_size(p))),
        low_(rows_of<int8_t>(p, p.out_low, batch, kv_head, group_size(p))),
        wants_low_(p.out_low.data != nullptr),
        lse_(row_values<float>(p, p.lse, batch, kv_head)) {}

  // out = factor * column
  void store(int64_t row, const float* column, float factor, float lse) const {
    Element* out = out_.row(row);
    store_row(column, factor, columns_, out, out_.column_stride);
    *lse_.row(row) = lse;
    if (!wants_low_) return;
    int8_t* low = low_.row(row);
    for (int h = 0; h < columns_; ++h) {
      low[h * low_.column_stride] =
          low_bits(factor * column[h], out[h * out_.column_stride]);
    }
  }

  // A row that has nothing of any value.
  void store_zero(int64_t row, float lse) const {
    Element* out = out_.row(row);
    for (int h = 0; h < columns_; ++h) from_float(0.0f, &out[h * out_.column_stride]);
    *lse_.row(row) = lse;
    if (!wants_low_) return;
    int8_t* low = low_.row(row);
    for (int h = 0; h < columns_; ++h) low[h * low_.column_stride] = 0;
  }

 private:
  const int columns_;
  const Rows<Element> out_;
  const Rows<int8_t> low_;
  const bool wants_low_;
  const Rows<float> lse_;
};

}  // namespace jaxflash::cpu::JAXFLASH_CPU_TARGET

#endif  // JAXFLASH_CSRC_CPU_FORWARD_OUTPUT_H_
