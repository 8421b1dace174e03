// SPDX-License-Identifier: Apache-2.0
#include "ffi/bind.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace jaxflash::ffi {
namespace {

using ::xla::ffi::AnyBuffer;
using ::xla::ffi::Dictionary;
using ::xla::ffi::Error;

using Shape = std::vector<int64_t>;

template <typename T>
T attribute(const Dictionary& attributes, std::string_view name, Error* error) {
  auto value = attributes.get<T>(name);
  if (value.has_value()) return *value;
  *error = Error::InvalidArgument("attribute " + std::string(name) + ": " +
                                  value.error().message());
  return T{};
}

Error bind_attributes(const Dictionary& attributes, jaxflash_attention_params* p) {
  Error error;
  p->is_causal = attribute<bool>(attributes, "is_causal", &error);
  p->window_left = attribute<int64_t>(attributes, "window_left", &error);
  p->window_right = attribute<int64_t>(attributes, "window_right", &error);
  p->softcap = static_cast<float>(attribute<double>(attributes, "softcap", &error));
  p->dropout_rate =
      static_cast<float>(attribute<double>(attributes, "dropout_rate", &error));
  p->deterministic = attribute<bool>(attributes, "deterministic", &error);
  p->precision =
      static_cast<int32_t>(attribute<int64_t>(attributes, "precision", &error));
  return error;
}

Error bind_core_sizes(const std::vector<Bound>& all, jaxflash_attention_params* p) {
  uint64_t known = 0;  // bit per letter
  for (const Bound& bound : all) {
    const std::string_view core = bound.slot->core;
    const auto dims = bound.buffer.dimensions();
    if (dims.size() < core.size()) {
      return shape_error(bound, "at least " + std::to_string(core.size()) + " axes");
    }
    for (size_t i = 0; i < core.size(); ++i) {
      const int64_t size = dims[dims.size() - core.size() + i];
      if (bound.slot->shared && size == 1) continue;
      const uint64_t bit = uint64_t{1} << (core[i] - '0');
      int64_t two = 2;
      int64_t* expected = core[i] == '2' ? &two : letter_size(core[i], p);
      if (core[i] != '2' && (known & bit) == 0) {
        *expected = size;
        known |= bit;
      }
      if (size != *expected) {
        return shape_error(bound, "size " + std::to_string(*expected) + " (" + core[i] +
                                      ") on core axis " + std::to_string(i));
      }
    }
  }
  return Error::Success();
}

// The broadcast of the leading axes of all operands.
Error find_batch_shape(const std::vector<Bound>& all, Shape* batch) {
  for (const Bound& bound : all) {
    if (bound.is_result) continue;
    const auto dims = bound.buffer.dimensions();
    const size_t rank = dims.size() - bound.slot->core.size();
    if (rank > batch->size()) batch->insert(batch->begin(), rank - batch->size(), 1);
    for (size_t i = 0; i < rank; ++i) {
      int64_t& size = (*batch)[batch->size() - rank + i];
      if (size == 1) size = dims[i];
      if (dims[i] != 1 && dims[i] != size) {
        return shape_error(bound, "batch axes of size 1 or " + std::to_string(size));
      }
    }
  }
  return Error::Success();
}

// Fills the core strides of a row-major buffer and returns its batch strides, one per
// axis of the batch shape.
Shape bind_strides(const Bound& bound, size_t batch_rank, jaxflash_tensor* tensor) {
  const auto dims = bound.buffer.dimensions();
  const std::string_view core = bound.slot->core;
  Shape batch_strides(batch_rank, 0);
  int64_t stride = 1;
  for (size_t i = dims.size(); i-- > 0;) {
    const int64_t current = dims[i] == 1 ? 0 : stride;
    const size_t leading = dims.size() - core.size();
    if (i >= leading) {
      tensor->strides[i - leading] = current;
    } else {
      batch_strides[batch_rank - leading + i] = current;
    }
    stride *= dims[i];
  }
  return batch_strides;
}

// Merges adjacent batch axes that every tensor walks in one stride and drops axes of
// size 1, so that kernels see few axes whatever vmap stacked up.
void merge_batch_axes(Shape* batch, std::vector<Shape>* strides) {
  Shape merged;
  std::vector<Shape> merged_strides(strides->size());
  for (size_t axis = 0; axis < batch->size(); ++axis) {
    const int64_t size = (*batch)[axis];
    if (size == 1) continue;
    bool merges = !merged.empty();
    for (size_t t = 0; merges && t < strides->size(); ++t) {
      merges = merged_strides[t].back() == (*strides)[t][axis] * size;
    }
    if (merges) {
      merged.back() *= size;
    } else {
      merged.push_back(size);
    }
    for (size_t t = 0; t < strides->size(); ++t) {
      if (merges) merged_strides[t].pop_back();
      merged_strides[t].push_back((*strides)[t][axis]);
    }
  }
  *batch = std::move(merged);
  *strides = std::move(merged_strides);
}

Error check_result(const Bound& bound, const Shape& batch) {
  const auto dims = bound.buffer.dimensions();
  const auto fits = [&bound](int64_t expected, int64_t size) {
    return size == expected || (bound.slot->shared && size == 1);
  };
  if (dims.size() == batch.size() + bound.slot->core.size() &&
      std::equal(batch.begin(), batch.end(), dims.begin(), fits)) {
    return Error::Success();
  }
  const char* expected = bound.slot->shared ? "1 or " : "";
  return shape_error(
      bound, expected + ("the full batch shape " +
                         to_text(AnyBuffer::Dimensions(batch.data(), batch.size()))));
}

// Binds every tensor of the call once sizes and batch shape are known.
Error bind_views(const std::vector<Bound>& all, Shape batch,
                 jaxflash_attention_backward_params* params) {
  std::vector<Shape> batch_strides;
  for (const Bound& bound : all) {
    if (bound.is_result) {
      if (Error error = check_result(bound, batch); error.failure()) return error;
    }
    // XLA may hand out NULL for an empty buffer, which would read as an absent tensor.
    static constexpr uint64_t kEmpty[2] = {};
    jaxflash_tensor& tensor = bound.slot->tensor(*params);
    void* data = bound.buffer.untyped_data();
    tensor.data = data != nullptr ? data : const_cast<uint64_t*>(kEmpty);
    tensor.dtype = to_dtype(bound.buffer.element_type());
    batch_strides.push_back(bind_strides(bound, batch.size(), &tensor));
  }
  merge_batch_axes(&batch, &batch_strides);
  if (batch.size() > JAXFLASH_MAX_BATCH_RANK) {
    return Error::InvalidArgument(
        "operands must leave at most " + std::to_string(JAXFLASH_MAX_BATCH_RANK) +
        " batch axes after merging, got " +
        to_text(AnyBuffer::Dimensions(batch.data(), batch.size())));
  }
  params->forward.batch_rank = static_cast<int32_t>(batch.size());
  std::copy(batch.begin(), batch.end(), params->forward.batch_shape);
  for (size_t t = 0; t < all.size(); ++t) {
    std::copy(batch_strides[t].begin(), batch_strides[t].end(),
              all[t].slot->tensor(*params).batch_strides);
  }
  return Error::Success();
}

// Pairs names and buffers; the workspace is the only tensor without a slot.
template <typename Get>
Error collect(std::string_view names, size_t count, bool is_result, Get get,
              std::vector<Bound>* all, Call* call) {
  const std::vector<std::string_view> parts = split(names);
  const std::string kind = is_result ? "results" : "operands";
  if (parts.size() != count) {
    return Error::InvalidArgument("attribute " + kind + " must name " +
                                  std::to_string(count) + " tensors, got " +
                                  std::string(names));
  }
  for (size_t i = 0; i < count; ++i) {
    const AnyBuffer buffer = get(i);
    if (is_result && parts[i] == "workspace") {
      call->workspace = buffer.untyped_data();
      call->workspace_bytes = buffer.size_bytes();
      continue;
    }
    const Slot* slot = find_slot(parts[i]);
    if (slot == nullptr) {
      return Error::InvalidArgument("attribute " + kind +
                                    " must use names of attention tensors, got " +
                                    std::string(parts[i]));
    }
    all->push_back({slot, buffer, is_result});
  }
  return Error::Success();
}

}  // namespace

Error bind_tensors(const std::vector<Bound>& all,
                   jaxflash_attention_backward_params* params) {
  if (Error e = bind_core_sizes(all, &params->forward); e.failure()) return e;
  Shape batch;
  if (Error e = find_batch_shape(all, &batch); e.failure()) return e;
  return bind_views(all, std::move(batch), params);
}

Error bind(xla::ffi::RemainingArgs arguments, xla::ffi::RemainingRets results,
           Dictionary attributes, Call* call) {
  call->params.struct_size = sizeof(call->params);
  call->params.forward.struct_size = sizeof(call->params.forward);

  Error error = bind_attributes(attributes, &call->params.forward);
  const auto operands = attribute<std::string_view>(attributes, "operands", &error);
  const auto names = attribute<std::string_view>(attributes, "results", &error);
  if (error.failure()) return error;

  std::vector<Bound> all;
  auto operand = [&](size_t i) { return *arguments.get<AnyBuffer>(i); };
  auto result = [&](size_t i) { return **results.get<AnyBuffer>(i); };
  error = collect(operands, arguments.size(), /*is_result=*/false, operand, &all, call);
  if (error.failure()) return error;
  error = collect(names, results.size(), /*is_result=*/true, result, &all, call);
  if (error.failure()) return error;
  return bind_tensors(all, &call->params);
}

Error to_error(jaxflash_status status) {
  switch (status) {
    case JAXFLASH_OK:
      return Error::Success();
    case JAXFLASH_INVALID_ARGUMENT:
      return Error::InvalidArgument(jaxflash_last_error());
    case JAXFLASH_UNSUPPORTED:
      return Error(xla::ffi::ErrorCode::kUnimplemented, jaxflash_last_error());
    case JAXFLASH_UNAVAILABLE:
      return Error(xla::ffi::ErrorCode::kUnavailable, jaxflash_last_error());
    default:
      return Error::Internal(jaxflash_last_error());
  }
}

}  // namespace jaxflash::ffi
