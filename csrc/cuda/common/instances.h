// SPDX-License-Identifier: Apache-2.0
//
// From what a call asks for at run time to the kernel that was compiled for it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "jaxflash/attention.h"

namespace jaxflash {

template <class Visit, int... kIndices>
void visit_instance(int32_t dtype, int index, const Visit& visit,
                    std::integer_sequence<int, kIndices...>) {
  const auto visit_if = [&](auto candidate) {
    if (candidate != index) return;
    if (dtype == JAXFLASH_BFLOAT16) {
      visit(__nv_bfloat16{}, candidate);
    } else {
      visit(__half{}, candidate);
    }
  };
  (visit_if(std::integral_constant<int, kIndices>{}), ...);
}

// Calls visit(Element{}, std::integral_constant<int, index>{}) with the element of a
// 16-bit dtype, for an index in [0, kCount).
template <int kCount, class Visit>
void visit_instance(int32_t dtype, int index, const Visit& visit) {
  visit_instance(dtype, index, visit, std::make_integer_sequence<int, kCount>{});
}

}  // namespace jaxflash
