// SPDX-License-Identifier: Apache-2.0
#include "sm90/tensor_map.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "jaxflash/attention.h"

namespace jaxflash::sm90 {
namespace {

constexpr int64_t kElementBytes = 2;
constexpr int64_t kAlignment = 16;
constexpr int64_t kMaxStride = (int64_t{1} << 40) - kAlignment;
constexpr uint32_t kPanelColumns = 64;

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The library does not link libcuda: the runtime finds the function in the driver.
EncodeTiled find_encode_tiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  constexpr unsigned int kVersion = 12000;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", &function, kVersion, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function,
                                                    cudaEnableDefault, &found);
#endif
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<EncodeTiled>(function);
}

bool is_stride(int64_t elements) {
  const int64_t bytes = elements * kElementBytes;
  return bytes > 0 && bytes <= kMaxStride && bytes % kAlignment == 0;
}

}  // namespace

bool fits_tensor_map(const jaxflash_tensor& tensor, const MatrixExtents& extents) {
  if (tensor.dtype != JAXFLASH_BFLOAT16 && tensor.dtype != JAXFLASH_FLOAT16) {
    return false;
  }
  if (reinterpret_cast<uintptr_t>(tensor.data) % kAlignment != 0) return false;
  if (extents.columns * kElementBytes % kAlignment != 0) return false;
  if (tensor.strides[2] != 1) return false;
  if (extents.rows > 1 && !is_stride(tensor.strides[0])) return false;
  if (extents.heads > 1 && !is_stride(tensor.strides[1])) return false;
  const int64_t batch_stride = tensor.batch_strides[0];
  return extents.batch <= 1 || batch_stride == 0 || is_stride(batch_stride);
}

int batch_step(const jaxflash_tensor& tensor) {
  return tensor.batch_strides[0] == 0 ? 0 : 1;
}

cudaError_t make_tensor_map(const jaxflash_tensor& tensor, const MatrixExtents& extents,
                            int box_rows, CUtensorMap* map) {
  static const EncodeTiled encode_tiled = find_encode_tiled();
  if (encode_tiled == nullptr) return cudaErrorSymbolNotFound;
  const bool shared = batch_step(tensor) == 0;
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(extents.columns),
                               static_cast<cuuint64_t>(extents.rows),
                               static_cast<cuuint64_t>(extents.heads),
                               static_cast<cuuint64_t>(shared ? 1 : extents.batch)};
  // Where the extent is 1 the stride means nothing, but it must be a legal one.
  const int64_t elements[3] = {tensor.strides[0], tensor.strides[1],
                               tensor.batch_strides[0]};
  cuuint64_t strides[3];
  for (int i = 0; i < 3; ++i) {
    strides[i] = static_cast<cuuint64_t>(sizes[i + 1] > 1 ? elements[i] * kElementBytes
                                                          : kAlignment);
  }
  const cuuint32_t box[4] = {kPanelColumns, static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  const CUresult result = encode_tiled(
      map,
      tensor.dtype == JAXFLASH_BFLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                        : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      /*tensorRank=*/4, tensor.data, sizes, strides, box, element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace jaxflash::sm90
