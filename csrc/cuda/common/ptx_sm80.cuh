// SPDX-License-Identifier: Apache-2.0
//
// The PTX that the portable kernels use, one wrapper per instruction, named after its
// mnemonic. Everything here exists from sm_80 on unless a line says otherwise.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace jaxflash {

// Address of shared memory in the .shared window.
__device__ __forceinline__ uint32_t cvta_generic_to_shared(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// "Data Movement: cvt.pack". Two integers, saturated to bytes, in the low half: `low`
// in the lowest byte; in the high half the low half of `upper`.
__device__ __forceinline__ uint32_t cvt_pack_sat_s8_s32(int high, int low,
                                                        uint32_t upper) {
  uint32_t packed;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;\n"
      : "=r"(packed)
      : "r"(high), "r"(low), "r"(upper));
  return packed;
}

// "Data Movement: cp.async". Copies 16 bytes past L1; reads only `source_bytes` of them
// (0 or 16) and fills the rest with zeros.
__device__ __forceinline__ void cp_async_cg_16(uint32_t destination, const void* source,
                                               int source_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(destination),
               "l"(source), "r"(source_bytes)
               : "memory");
}

// "cp.async.commit_group".
__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// "cp.async.wait_group": at most kPending of this thread's groups stay in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// "Warp-level matrix load: ldmatrix". Lane l passes the address of row l % 8 of 8x8
// matrix l / 8; lane l receives elements (l / 4, 2 (l % 4) + {0, 1}) of each.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

// "ldmatrix" with .trans: lane l receives (2 (l % 4) + {0, 1}, l / 4).
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t address) {
  asm volatile(
      "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(address)
      : "memory");
}

// "st.shared", 4 and 16 bytes.
__device__ __forceinline__ void st_shared_b32(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void st_shared_v4(uint32_t address, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(address),
               "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

// "ld.shared", 16 bytes.
__device__ __forceinline__ uint4 ld_shared_v4(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// "Warp-level matrix multiply: mma.m16n8k16", D += A B with float32 accumulators.
// d[i]: row l / 4 + 8 (i / 2), column 2 (l % 4) + i % 2.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4],
                                             uint32_t b0, uint32_t b1, __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4],
                                             uint32_t b0, uint32_t b1, __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// "ex2.approx.ftz.f32": 2^x, exact 0 at -inf, NaN stays.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// "ld.acquire" and "red.release" at GPU scope: a counter that blocks pass on.
__device__ __forceinline__ int ld_acquire_gpu(const int* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n"
               : "=r"(value)
               : "l"(address)
               : "memory");
  return value;
}
__device__ __forceinline__ void red_release_gpu_add(int* address, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;\n" ::"l"(address), "r"(value)
               : "memory");
}

// "red.global.add.f32": adds each lane's four values to 128 floats at `address`, which
// is the warp's. Where value i of a lane goes is what add_v4_index says: from sm_90 on
// one vector instruction per lane, before it four that cover whole 128-byte lines.
__device__ __forceinline__ int add_v4_index(int lane, int i) {
#if __CUDA_ARCH__ >= 900
  return lane * 4 + i;
#else
  return i * 32 + lane;
#endif
}
__device__ __forceinline__ void red_add_v4(float* address, int lane,
                                           const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(
                   address + add_v4_index(lane, 0)),
               "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;\n" ::"l"(
                     address + add_v4_index(lane, i)),
                 "f"(x[i])
                 : "memory");
  }
#endif
}

}  // namespace jaxflash
