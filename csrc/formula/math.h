// SPDX-License-Identifier: Apache-2.0
//
// The parts of the formula that every kernel shares, each a small struct that is a
// template of the arithmetic of its backend:
//
//   Math::Float                          one float32 or a vector of them
//   Math::Word                           as many uint32
//   Math::tanh(Float)
//   Math::high_product(uint32_t, Word)   upper 32 bits of the 64-bit products
//
// The CPU kernels exist once per instruction set: their Math lives in the namespace of
// the set, so that no two sets share a function.
#ifndef JAXFLASH_CSRC_FORMULA_MATH_H_
#define JAXFLASH_CSRC_FORMULA_MATH_H_

#ifdef __CUDACC__
#define JAXFLASH_FORMULA __device__ __forceinline__
#else
#define JAXFLASH_FORMULA inline
#endif

#endif  // JAXFLASH_CSRC_FORMULA_MATH_H_
