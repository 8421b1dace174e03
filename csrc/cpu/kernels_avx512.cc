// SPDX-License-Identifier: Apache-2.0
#define JAXFLASH_CPU_TARGET avx512
#include "cpu/kernels_impl.h"
