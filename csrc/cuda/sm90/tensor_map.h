// SPDX-License-Identifier: Apache-2.0
//
// Tensor maps: what the copy engine knows of a matrix in global memory.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "jaxflash/attention.h"

namespace jaxflash::sm90 {

// Extents of a tensor [batch][rows, heads, columns].
struct MatrixExtents {
  int64_t rows;
  int64_t heads;
  int64_t columns;
  int64_t batch;
};

// Whether a map can describe the tensor: 16-bit elements, columns next to each other,
// everything else in strides of 16 bytes. Only batch elements may share their memory.
bool fits_tensor_map(const jaxflash_tensor& tensor, const MatrixExtents& extents);

// 1 if consecutive batch elements lie at different places, 0 if they share one: what
// the batch index is multiplied by before it becomes a coordinate.
int batch_step(const jaxflash_tensor& tensor);

// A map of the tensor with coordinates (column, row, head, batch) and boxes of 64
// columns by box_rows rows, swizzled as wgmma.cuh says. The tensor must fit, and have
// elements.
cudaError_t make_tensor_map(const jaxflash_tensor& tensor, const MatrixExtents& extents,
                            int box_rows, CUtensorMap* map);

}  // namespace jaxflash::sm90
