// SPDX-License-Identifier: Apache-2.0
#include "api/tensor_checks.h"

#include <algorithm>
#include <cstddef>

#include "api/status.h"
#include "api/validate.h"

namespace jaxflash {
namespace {

constexpr jaxflash_status kInvalid = JAXFLASH_INVALID_ARGUMENT;

struct Axis {
  int64_t size;
  int64_t stride;
};

// The axes of a present tensor that hold more than one element, by ascending stride.
struct Axes {
  Axis axis[JAXFLASH_MAX_BATCH_RANK + 3];
  int rank = 0;
  bool empty = false;

  void insert(Axis added) {
    empty |= added.size == 0;
    if (added.size <= 1) return;
    int position = rank++;
    for (; position > 0 && axis[position - 1].stride > added.stride; --position) {
      axis[position] = axis[position - 1];
    }
    axis[position] = added;
  }
};

jaxflash_status check_extent(const char* name, Use use, const Axes& axes,
                             int64_t width) {
  const bool is_input = use == Use::kInput || use == Use::kOptionalInput;
  int64_t last = 0;  // offset of the last element over the axes seen so far
  for (int i = 0; i < axes.rank; ++i) {
    const auto [size, stride] = axes.axis[i];
    const bool summed = use == Use::kSummedOutput && stride == 0;
    if (!is_input && !summed && stride <= last) {
      return fail(kInvalid,
                  "%s is written, so its elements must not overlap, got stride %lld on "
                  "an axis of size %lld, but the axes below it span %lld elements",
                  name, static_cast<long long>(stride), static_cast<long long>(size),
                  static_cast<long long>(last + 1));
    }
    int64_t step = 0;
    int64_t bytes = 0;
    if (__builtin_mul_overflow(size - 1, stride, &step) ||
        __builtin_add_overflow(last, step, &last) ||
        __builtin_add_overflow(last, 1, &bytes) ||
        __builtin_mul_overflow(bytes, width, &bytes)) {
      return fail(kInvalid,
                  "%s must span fewer than 2^63 bytes, got stride %lld on an axis of "
                  "size %lld",
                  name, static_cast<long long>(stride), static_cast<long long>(size));
    }
  }
  return JAXFLASH_OK;
}

bool has_type(int32_t dtype, Type type, int32_t q_dtype) {
  switch (type) {
    case Type::kFloat:
      return dtype == JAXFLASH_FLOAT32 || dtype == JAXFLASH_BFLOAT16 ||
             dtype == JAXFLASH_FLOAT16;
    case Type::kLikeQ:
      return dtype == q_dtype;
    case Type::kLikeQOrFloat:
      return dtype == q_dtype || dtype == JAXFLASH_FLOAT32;
    case Type::kFloat32:
      return dtype == JAXFLASH_FLOAT32;
    case Type::kInt32:
      return dtype == JAXFLASH_INT32;
    case Type::kUint32:
      return dtype == JAXFLASH_UINT32;
    case Type::kBool:
      return dtype == JAXFLASH_BOOL;
    case Type::kInt8:
      return dtype == JAXFLASH_INT8;
  }
  return false;
}

const char* type_text(Type type) {
  switch (type) {
    case Type::kFloat:
      return "float32, bfloat16 or float16";
    case Type::kLikeQ:
      return "that of q";
    case Type::kLikeQOrFloat:
      return "that of q or float32";
    case Type::kFloat32:
      return "float32";
    case Type::kInt32:
      return "int32";
    case Type::kUint32:
      return "uint32";
    case Type::kBool:
      return "bool";
    case Type::kInt8:
      return "int8";
  }
  return "";
}

jaxflash_status check_strides(const char* name, const char* kind,
                              const int64_t* strides, int rank) {
  for (int i = 0; i < rank; ++i) {
    if (strides[i] < 0) {
      return fail(kInvalid, "%s.%s[%d] must be at least 0, got %lld", name, kind, i,
                  static_cast<long long>(strides[i]));
    }
  }
  return JAXFLASH_OK;
}

}  // namespace

Core::Core(std::initializer_list<int64_t> sizes)
    : size{}, rank(static_cast<int>(sizes.size())) {
  std::copy(sizes.begin(), sizes.end(), size);
}

jaxflash_status check_tensor(const jaxflash_attention_params& params,
                             const TensorRule& rule) {
  const auto& [name, tensor, type, use, core] = rule;
  Axes axes;
  for (int i = 0; i < params.batch_rank; ++i) {
    axes.insert({params.batch_shape[i], tensor.batch_strides[i]});
  }
  for (int i = 0; i < core.rank; ++i) axes.insert({core.size[i], tensor.strides[i]});

  if (tensor.data == nullptr) {
    if (axes.empty || (use != Use::kInput && use != Use::kOutput)) return JAXFLASH_OK;
    return fail(kInvalid, "%s is required, got data = NULL", name);
  }
  if (!has_type(tensor.dtype, type, params.q.dtype)) {
    return fail(kInvalid, "%s must have dtype %s, got %s (%d)", name, type_text(type),
                dtype_name(tensor.dtype), tensor.dtype);
  }
  JAXFLASH_RETURN_IF_ERROR(
      check_strides(name, "batch_strides", tensor.batch_strides, params.batch_rank));
  JAXFLASH_RETURN_IF_ERROR(check_strides(name, "strides", tensor.strides, core.rank));
  if (axes.empty) return JAXFLASH_OK;
  const size_t width = dtype_size(tensor.dtype);
  if (reinterpret_cast<uintptr_t>(tensor.data) % width != 0) {
    return fail(kInvalid, "%s.data must be aligned to its %zu-byte elements, got %p",
                name, width, tensor.data);
  }
  return check_extent(name, use, axes, static_cast<int64_t>(width));
}

size_t dtype_size(int32_t dtype) {
  switch (dtype) {
    case JAXFLASH_FLOAT32:
    case JAXFLASH_INT32:
    case JAXFLASH_UINT32:
      return 4;
    case JAXFLASH_BFLOAT16:
    case JAXFLASH_FLOAT16:
      return 2;
    case JAXFLASH_BOOL:
    case JAXFLASH_INT8:
      return 1;
    default:
      return 0;
  }
}

const char* dtype_name(int32_t dtype) {
  switch (dtype) {
    case JAXFLASH_FLOAT32:
      return "float32";
    case JAXFLASH_BFLOAT16:
      return "bfloat16";
    case JAXFLASH_FLOAT16:
      return "float16";
    case JAXFLASH_INT32:
      return "int32";
    case JAXFLASH_UINT32:
      return "uint32";
    case JAXFLASH_BOOL:
      return "bool";
    case JAXFLASH_INT8:
      return "int8";
    default:
      return "no dtype";
  }
}

}  // namespace jaxflash
