// SPDX-License-Identifier: Apache-2.0
//
// The PTX that the Hopper kernels use beside wgmma.cuh, one wrapper per instruction,
// named after its mnemonic. Shared memory goes by its address in the .shared window
// (cvta_generic_to_shared). Everything here needs sm_90a or sm_90.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx_sm80.cuh"

namespace jaxflash {

// "Parallel Synchronization: mbarrier.init". A phase completes when `arrivals` threads
// have arrived and the bytes that they announced have landed.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals)
               : "memory");
}

// "fence.mbarrier_init": makes the initialised barriers known to the copy engine. A
// barrier of the block makes them known to its threads.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

// "mbarrier.arrive".
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// "mbarrier.arrive.expect_tx": arrives and announces `bytes` of copies. Boxes count in
// full, also where they reach past the tensor.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier,
                                                          uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier),
      "r"(bytes)
      : "memory");
}

// "mbarrier.try_wait", repeated until the phase of this parity has completed. The first
// phase has parity 0; on a fresh barrier, waiting for parity 1 returns at once.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "retry:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra complete;\n"
      "bra retry;\n"
      "complete:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// "prefetch.tensormap".
__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

// "cp.async.bulk.tensor", global to shared: starts the copy of the map's box at
// coordinates c0 (fastest) to c3; `barrier` receives its bytes. What lies outside the
// tensor becomes zeros.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_load(uint32_t destination,
                                                             const CUtensorMap* map,
                                                             uint32_t barrier, int c0,
                                                             int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];\n" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// "cp.async.bulk.tensor", shared to global, in this thread's bulk group. What lies
// outside the tensor is not written.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_store(const CUtensorMap* map,
                                                              uint32_t source, int c0,
                                                              int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group "
      "[%0, {%2, %3, %4, %5}], [%1];\n" ::"l"(map),
      "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// "cp.async.bulk", global to shared: contiguous bytes, everything a multiple of 16.
__device__ __forceinline__ void cp_async_bulk_load(uint32_t destination,
                                                   const void* source, uint32_t bytes,
                                                   uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];\n" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// "cp.async.bulk", shared to global, in this thread's bulk group.
__device__ __forceinline__ void cp_async_bulk_store(void* destination, uint32_t source,
                                                    uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(
                   destination),
               "r"(source), "r"(bytes)
               : "memory");
}

// "cp.reduce.async.bulk": adds contiguous float32 in shared memory to global memory, in
// this thread's bulk group.
__device__ __forceinline__ void cp_reduce_async_bulk_add_f32(float* destination,
                                                             uint32_t source,
                                                             uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::
          "l"(destination),
      "r"(source), "r"(bytes)
      : "memory");
}

// "cp.async.bulk.commit_group".
__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}

// "cp.async.bulk.wait_group": at most kPending of this thread's groups are incomplete.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// The same with .read: at most kPending groups still read shared memory.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}

// "fence.proxy.async": this thread's accesses of shared memory come before those that
// wgmma and bulk copies make after a later barrier.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// The same for global memory, between this thread's accesses and bulk copies, in either
// order.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;\n" ::: "memory");
}

// "atom.acquire" at GPU scope; returns the value before.
__device__ __forceinline__ int atom_acquire_gpu_add(int* address, int value) {
  int before;
  asm volatile("atom.acquire.gpu.global.add.s32 %0, [%1], %2;\n"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
}

// "setmaxnreg": executed by all warps of a warpgroup. The registers that one group
// gives up are the ones that others wait for.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// "bar.sync" and "bar.arrive" on one of the 16 named barriers of a block. `threads`
// counts both kinds of participants; barrier 0 is __syncthreads.
__device__ __forceinline__ void bar_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void bar_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}

// "bar.red.or.pred": bar_sync that tells all participants whether any has `value`.
__device__ __forceinline__ bool bar_red_or(int barrier, int threads, bool value) {
  uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred mine, all;\n"
      "setp.ne.u32 mine, %3, 0;\n"
      "bar.red.or.pred all, %1, %2, mine;\n"
      "selp.u32 %0, 1, 0, all;\n"
      "}\n"
      : "=r"(any)
      : "r"(barrier), "r"(threads), "r"(static_cast<uint32_t>(value))
      : "memory");
  return any != 0;
}

// "stmatrix": lane l passes the address of row l % 8 of 8x8 matrix l / 8; d[i] holds
// elements (l / 4, 2 (l % 4) + {0, 1}) of matrix i.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t d0, uint32_t d1,
                                            uint32_t d2, uint32_t d3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(
          address),
      "r"(d0), "r"(d1), "r"(d2), "r"(d3)
      : "memory");
}

// "stmatrix" with .trans: d[i] holds elements (2 (l % 4) + {0, 1}, l / 4).
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t d0,
                                                  uint32_t d1, uint32_t d2,
                                                  uint32_t d3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(
          address),
      "r"(d0), "r"(d1), "r"(d2), "r"(d3)
      : "memory");
}

// "griddepcontrol": waits until the grid before this one has completed and its writes
// are visible; lets the grid after this one start.
__device__ __forceinline__ void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
}
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
}

}  // namespace jaxflash
