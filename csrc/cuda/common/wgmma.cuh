// SPDX-License-Identifier: Apache-2.0
//
// "Asynchronous Warpgroup Level Matrix Instructions": D[64, N] (+)= A[64, 16] B[16, N]
// in float32, issued by the 128 threads of a warpgroup and run behind their backs:
//
//   wgmma_fence();                                registers are ready
//   Wgmma<N>::ss<...>(d, a, b, accumulate); ...   one instruction per 16 of k
//   wgmma_commit_group();
//   wgmma_wait_group<0>();                        d may be read, A and B overwritten
//
// From the fence to the wait, d and a register operand belong to the tensor cores.
//
// Thread t of the warpgroup holds d[i] = D[16 (t / 32) + t % 32 / 4 + 8 (i / 2 % 2),
// 8 (i / 4) + 2 (t % 4) + i % 2]. The A operand in registers has the same shape: for
// step j of k, a[i] = pack(d[8 j + 2 i], d[8 j + 2 i + 1]), so a product D becomes the
// A of the next product by rounding alone.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace jaxflash {

// Which index of an operand in shared memory is contiguous.
enum class Major { kK, kMN };

// Matrices of 16-bit elements lie in shared memory as panels of 64 columns. A panel of
// kRows rows takes kRows * 128 bytes and starts on 1024; within it the 16-byte chunk c
// of row r lies at 128 r + 16 (c ^ r % 8), the 128-byte swizzle. The next 64 columns
// are the next panel.
constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = 128;

constexpr int panels_of(int columns) {
  return (columns + kPanelColumns - 1) / kPanelColumns;
}

__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address,
                                                      uint32_t leading_bytes,
                                                      uint32_t stride_bytes) {
  constexpr uint64_t kSwizzle128Bytes = uint64_t{1} << 62;
  return uint64_t{(address & 0x3FFFF) >> 4} | uint64_t{leading_bytes >> 4} << 16 |
         uint64_t{stride_bytes >> 4} << 32 | kSwizzle128Bytes;
}

// Operand whose columns are k: Q and K of S = Q K^T. `address`: of a row that is a
// multiple of 8. Add the step of k to walk along k, 16 columns at a time.
__device__ __forceinline__ uint64_t k_major_descriptor(uint32_t address) {
  return matrix_descriptor(address, 16, 8 * kPanelRowBytes);
}
template <int kRows>
constexpr uint64_t k_major_step(int k) {
  return (k / 4 * (kRows * kPanelRowBytes) + k % 4 * 32) >> 4;
}

// Operand whose rows are k: V of O = P V. Starts at a panel, or at 16 rows of it.
template <int kRows>
__device__ __forceinline__ uint64_t mn_major_descriptor(uint32_t address) {
  return matrix_descriptor(address, kRows * kPanelRowBytes, 8 * kPanelRowBytes);
}
constexpr uint64_t mn_major_step(int k) { return k * (16 * kPanelRowBytes) >> 4; }

// The descriptor of a place `step` further on. All of shared memory fits into the low
// word; where the compiler cannot rule out a carry, this saves it.
__device__ __forceinline__ uint64_t advance_descriptor(uint64_t descriptor,
                                                       uint32_t step) {
  uint64_t result;
  asm("{\n"
      ".reg .b32 low, high;\n"
      "mov.b64 {low, high}, %1;\n"
      "add.u32 low, low, %2;\n"
      "mov.b64 %0, {low, high};\n"
      "}\n"
      : "=l"(result)
      : "l"(descriptor), "r"(step));
  return result;
}

// "wgmma.fence": orders earlier register accesses before the products that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

// "wgmma.commit_group".
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

// "wgmma.wait_group": at most kPending groups are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving copies of these registers across this point: before a
// fence and after a wait.
template <int kCount>
__device__ __forceinline__ void hold_registers(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void hold_registers(uint32_t (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// The instruction names its N / 2 accumulators one by one. These lists are what the
// compiler sees of them, by groups of eight: %0 ..., and the operands of the asm.
// clang-format off
#define JAXFLASH_N0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define JAXFLASH_N1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define JAXFLASH_N2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define JAXFLASH_N3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define JAXFLASH_N4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define JAXFLASH_N5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define JAXFLASH_N6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define JAXFLASH_N7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define JAXFLASH_N8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define JAXFLASH_N9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define JAXFLASH_N10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define JAXFLASH_N11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define JAXFLASH_N12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define JAXFLASH_N13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define JAXFLASH_N14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define JAXFLASH_N15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define JAXFLASH_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define JAXFLASH_D8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), \
  "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])

#define JAXFLASH_WGMMA_NAMES_32 JAXFLASH_N0 ", " JAXFLASH_N1
#define JAXFLASH_WGMMA_D_32 JAXFLASH_D8(0), JAXFLASH_D8(8)
#define JAXFLASH_WGMMA_NAMES_48 JAXFLASH_WGMMA_NAMES_32 ", " JAXFLASH_N2
#define JAXFLASH_WGMMA_D_48 JAXFLASH_WGMMA_D_32, JAXFLASH_D8(16)
#define JAXFLASH_WGMMA_NAMES_64 JAXFLASH_WGMMA_NAMES_48 ", " JAXFLASH_N3
#define JAXFLASH_WGMMA_D_64 JAXFLASH_WGMMA_D_48, JAXFLASH_D8(24)
#define JAXFLASH_WGMMA_NAMES_72 JAXFLASH_WGMMA_NAMES_64 ", %32, %33, %34, %35"
#define JAXFLASH_WGMMA_D_72 JAXFLASH_WGMMA_D_64, JAXFLASH_D4(32)
#define JAXFLASH_WGMMA_NAMES_80 JAXFLASH_WGMMA_NAMES_64 ", " JAXFLASH_N4
#define JAXFLASH_WGMMA_D_80 JAXFLASH_WGMMA_D_64, JAXFLASH_D8(32)
#define JAXFLASH_WGMMA_NAMES_96 JAXFLASH_WGMMA_NAMES_80 ", " JAXFLASH_N5
#define JAXFLASH_WGMMA_D_96 JAXFLASH_WGMMA_D_80, JAXFLASH_D8(40)
#define JAXFLASH_WGMMA_NAMES_112 JAXFLASH_WGMMA_NAMES_96 ", " JAXFLASH_N6
#define JAXFLASH_WGMMA_D_112 JAXFLASH_WGMMA_D_96, JAXFLASH_D8(48)
#define JAXFLASH_WGMMA_NAMES_128 JAXFLASH_WGMMA_NAMES_112 ", " JAXFLASH_N7
#define JAXFLASH_WGMMA_D_128 JAXFLASH_WGMMA_D_112, JAXFLASH_D8(56)
#define JAXFLASH_WGMMA_NAMES_136 JAXFLASH_WGMMA_NAMES_128 ", %64, %65, %66, %67"
#define JAXFLASH_WGMMA_D_136 JAXFLASH_WGMMA_D_128, JAXFLASH_D4(64)
#define JAXFLASH_WGMMA_NAMES_144 JAXFLASH_WGMMA_NAMES_128 ", " JAXFLASH_N8
#define JAXFLASH_WGMMA_D_144 JAXFLASH_WGMMA_D_128, JAXFLASH_D8(64)
#define JAXFLASH_WGMMA_NAMES_160 JAXFLASH_WGMMA_NAMES_144 ", " JAXFLASH_N9
#define JAXFLASH_WGMMA_D_160 JAXFLASH_WGMMA_D_144, JAXFLASH_D8(72)
#define JAXFLASH_WGMMA_NAMES_176 JAXFLASH_WGMMA_NAMES_160 ", " JAXFLASH_N10
#define JAXFLASH_WGMMA_D_176 JAXFLASH_WGMMA_D_160, JAXFLASH_D8(80)
#define JAXFLASH_WGMMA_NAMES_192 JAXFLASH_WGMMA_NAMES_176 ", " JAXFLASH_N11
#define JAXFLASH_WGMMA_D_192 JAXFLASH_WGMMA_D_176, JAXFLASH_D8(88)
#define JAXFLASH_WGMMA_NAMES_256 JAXFLASH_WGMMA_NAMES_192 ", " JAXFLASH_N12 ", " \
  JAXFLASH_N13 ", " JAXFLASH_N14 ", " JAXFLASH_N15
#define JAXFLASH_WGMMA_D_256 JAXFLASH_WGMMA_D_192, JAXFLASH_D8(96), \
  JAXFLASH_D8(104), JAXFLASH_D8(112), JAXFLASH_D8(120)

// The instruction of one N. x0 ... x6: numbers of the asm operands after D.
#define JAXFLASH_WGMMA_SS(N, type, x0, x1, x2, x3, x4)                             \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #x2 ", 0;\n"                   \
    "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " "            \
    "{" JAXFLASH_WGMMA_NAMES_##N "}, %" #x0 ", %" #x1 ", p, 1, 1, "                \
    "%" #x3 ", %" #x4 ";\n}\n"                                                     \
    : JAXFLASH_WGMMA_D_##N                                                         \
    : "l"(a), "l"(b), "r"(static_cast<uint32_t>(accumulate)),                      \
      "n"(kA == Major::kMN), "n"(kB == Major::kMN) : "memory")

#define JAXFLASH_WGMMA_RS(N, type, x0, x1, x2, x3, x4, x5, x6)                     \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #x5 ", 0;\n"                   \
    "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " "            \
    "{" JAXFLASH_WGMMA_NAMES_##N "}, {%" #x0 ", %" #x1 ", %" #x2 ", %" #x3 "}, "   \
    "%" #x4 ", p, 1, 1, %" #x6 ";\n}\n"                                            \
    : JAXFLASH_WGMMA_D_##N                                                         \
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                          \
      "r"(static_cast<uint32_t>(accumulate)), "n"(kB == Major::kMN) : "memory")

// "wgmma.mma_async". ss: A and B are descriptors of shared memory; rs: A is the four
// registers of one step of k, always K-major. Without `accumulate`, D starts from zero.
template <int kN>
struct Wgmma;

#define JAXFLASH_DEFINE_WGMMA(N, x0, x1, x2, x3, x4, x5, x6)                       \
  template <>                                                                      \
  struct Wgmma<N> {                                                                \
    template <class Element, Major kA, Major kB>                                   \
    static __device__ __forceinline__ void ss(float (&d)[N / 2], uint64_t a,       \
                                              uint64_t b, bool accumulate) {       \
      if constexpr (std::is_same_v<Element, __nv_bfloat16>) {                      \
        JAXFLASH_WGMMA_SS(N, "bf16", x0, x1, x2, x3, x4);                          \
      } else {                                                                     \
        JAXFLASH_WGMMA_SS(N, "f16", x0, x1, x2, x3, x4);                           \
      }                                                                            \
    }                                                                              \
    template <class Element, Major kB>                                             \
    static __device__ __forceinline__ void rs(float (&d)[N / 2],                   \
                                              const uint32_t* a, uint64_t b,       \
                                              bool accumulate) {                   \
      if constexpr (std::is_same_v<Element, __nv_bfloat16>) {                      \
        JAXFLASH_WGMMA_RS(N, "bf16", x0, x1, x2, x3, x4, x5, x6);                  \
      } else {                                                                     \
        JAXFLASH_WGMMA_RS(N, "f16", x0, x1, x2, x3, x4, x5, x6);                   \
      }                                                                            \
    }                                                                              \
  };

JAXFLASH_DEFINE_WGMMA(48, 24, 25, 26, 27, 28, 29, 30)
JAXFLASH_DEFINE_WGMMA(64, 32, 33, 34, 35, 36, 37, 38)
JAXFLASH_DEFINE_WGMMA(72, 36, 37, 38, 39, 40, 41, 42)
JAXFLASH_DEFINE_WGMMA(80, 40, 41, 42, 43, 44, 45, 46)
JAXFLASH_DEFINE_WGMMA(96, 48, 49, 50, 51, 52, 53, 54)
JAXFLASH_DEFINE_WGMMA(112, 56, 57, 58, 59, 60, 61, 62)
JAXFLASH_DEFINE_WGMMA(128, 64, 65, 66, 67, 68, 69, 70)
JAXFLASH_DEFINE_WGMMA(136, 68, 69, 70, 71, 72, 73, 74)
JAXFLASH_DEFINE_WGMMA(192, 96, 97, 98, 99, 100, 101, 102)
JAXFLASH_DEFINE_WGMMA(256, 128, 129, 130, 131, 132, 133, 134)

#undef JAXFLASH_DEFINE_WGMMA
#undef JAXFLASH_WGMMA_SS
#undef JAXFLASH_WGMMA_RS
// clang-format on

}  // namespace jaxflash
