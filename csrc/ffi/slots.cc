// SPDX-License-Identifier: Apache-2.0
#include "ffi/slots.h"

#include <algorithm>
#include <cstddef>

namespace jaxflash::ffi {
namespace {

using Params = jaxflash_attention_backward_params;

#define JAXFLASH_MEMBER(member) +[](Params& p) -> jaxflash_tensor& { return p.member; }
constexpr Slot kSlots[] = {
    {"query", "TNH", JAXFLASH_MEMBER(forward.q)},
    {"key", "SKH", JAXFLASH_MEMBER(forward.k)},
    {"value", "SKV", JAXFLASH_MEMBER(forward.v)},
    {"scale", "", JAXFLASH_MEMBER(forward.scale)},
    {"query_offset", "", JAXFLASH_MEMBER(forward.query_offset)},
    {"query_seq_lengths", "", JAXFLASH_MEMBER(forward.q_seq_lengths)},
    {"key_value_seq_lengths", "", JAXFLASH_MEMBER(forward.kv_seq_lengths)},
    {"bias", "NTS", JAXFLASH_MEMBER(forward.bias), /*shared=*/true},
    {"mask", "NTS", JAXFLASH_MEMBER(forward.mask), /*shared=*/true},
    {"query_segment_ids", "T", JAXFLASH_MEMBER(forward.q_segment_ids)},
    {"key_value_segment_ids", "S", JAXFLASH_MEMBER(forward.kv_segment_ids)},
    {"sinks", "N", JAXFLASH_MEMBER(forward.sinks)},
    {"alibi_slopes", "N", JAXFLASH_MEMBER(forward.alibi_slopes)},
    {"dropout_seed", "2", JAXFLASH_MEMBER(forward.dropout_seed)},
    {"out", "TNV", JAXFLASH_MEMBER(forward.out)},
    {"lse", "NT", JAXFLASH_MEMBER(forward.lse)},
    {"out_low", "TNV", JAXFLASH_MEMBER(forward.out_low)},
    {"d_out", "TNV", JAXFLASH_MEMBER(d_out)},
    {"d_lse", "NT", JAXFLASH_MEMBER(d_lse)},
    {"dq", "TNH", JAXFLASH_MEMBER(dq)},
    {"dk", "SKH", JAXFLASH_MEMBER(dk)},
    {"dv", "SKV", JAXFLASH_MEMBER(dv)},
    {"dscale", "NT", JAXFLASH_MEMBER(dscale)},
    {"dbias", "NTS", JAXFLASH_MEMBER(dbias), /*shared=*/true},
    {"dsinks", "NT", JAXFLASH_MEMBER(dsinks)},
    {"dalibi", "NT", JAXFLASH_MEMBER(dalibi)},
};
#undef JAXFLASH_MEMBER

}  // namespace

const Slot* find_slot(std::string_view name) {
  for (const Slot& slot : kSlots) {
    if (slot.name == name) return &slot;
  }
  return nullptr;
}

int64_t* letter_size(char letter, jaxflash_attention_params* params) {
  switch (letter) {
    case 'T':
      return &params->q_len;
    case 'S':
      return &params->kv_len;
    case 'N':
      return &params->num_heads;
    case 'K':
      return &params->num_kv_heads;
    case 'H':
      return &params->head_dim;
    default:
      return &params->value_head_dim;
  }
}

int32_t to_dtype(xla::ffi::DataType type) {
  switch (type) {
    case xla::ffi::DataType::F32:
      return JAXFLASH_FLOAT32;
    case xla::ffi::DataType::BF16:
      return JAXFLASH_BFLOAT16;
    case xla::ffi::DataType::F16:
      return JAXFLASH_FLOAT16;
    case xla::ffi::DataType::S32:
      return JAXFLASH_INT32;
    case xla::ffi::DataType::U32:
      return JAXFLASH_UINT32;
    case xla::ffi::DataType::S8:
      return JAXFLASH_INT8;
    case xla::ffi::DataType::PRED:
      return JAXFLASH_BOOL;
    default:
      return JAXFLASH_NO_DTYPE;
  }
}

std::string to_text(xla::ffi::AnyBuffer::Dimensions dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(dims[i]);
  }
  return text + "]";
}

xla::ffi::Error shape_error(const Bound& bound, const std::string& expected) {
  return xla::ffi::Error::InvalidArgument(std::string(bound.slot->name) +
                                          " must have " + expected + ", got shape " +
                                          to_text(bound.buffer.dimensions()));
}

std::vector<std::string_view> split(std::string_view names) {
  std::vector<std::string_view> parts;
  while (!names.empty()) {
    const size_t comma = std::min(names.find(','), names.size());
    parts.push_back(names.substr(0, comma));
    names.remove_prefix(std::min(comma + 1, names.size()));
  }
  return parts;
}

}  // namespace jaxflash::ffi
